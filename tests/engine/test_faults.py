"""Logits that are not finite: other rows are not affected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from specdist.engine.request import Completion
from specdist.engine.rounds.faults import NUM_SUSPECT_ROWS
from specdist.engine.target.local_target import LocalTarget
from specdist.models.batch.flat import FlatBatch
from specdist.models.passes.runner import ModelRunner
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError
from tests.engine.harness import Harness, llama_pair, requests_for
from tests.engine.test_greedy import prompts_of_lengths
from tests.engine.test_identity import outcome

TARGET, DRAFT = 0, 1
NAN, INF = float("nan"), float("inf")
GREEDY = SamplingSettings(temperature=0.0)
SAMPLED = SamplingSettings(temperature=1.0, top_p=0.95)
GUMBEL = SamplingSettings(temperature=1.0, is_coupled=True)


def poison(
    monkeypatch: pytest.MonkeyPatch, runner: ModelRunner, value: float, is_bad: Callable[[int, int], bool]
) -> None:
    """Spoil one logit after every token for which ``is_bad(token id, position)``."""
    forward = runner.forward

    def spoiled(batch: FlatBatch, logits_index: np.ndarray) -> Tensor:
        logits_NV = forward(batch, logits_index).clone()
        asked = np.asarray(logits_index, np.int64)
        ids, positions = np.asarray(batch.token_ids_T)[asked], np.asarray(batch.positions_T)[asked]
        for line, (token_id, position) in enumerate(zip(ids.tolist(), positions.tolist(), strict=True)):
            if is_bad(token_id, position):
                logits_NV[line, 11] = value
        return logits_NV

    monkeypatch.setattr(runner, "forward", spoiled)


def check_bad_rows(
    completions: list[Completion], expected: list[Completion], is_bad: Callable[[int, int], bool]
) -> int:
    """Rows end where their context first has a bad token, and the others are unchanged."""
    num_bad = 0
    for found, undisturbed in zip(completions, expected, strict=True):
        ids = undisturbed.request.prompt_ids + undisturbed.token_ids
        num_prompt = len(undisturbed.request.prompt_ids)
        ends = [p for p in range(num_prompt - 1, len(ids) - 1) if is_bad(ids[p], p)]
        if not ends:
            assert outcome([found]) == outcome([undisturbed])
            continue
        num_bad += 1
        assert found.finish_reason == "error"
        assert found.token_ids == ids[num_prompt : ends[0] + 1]
        assert f"target's logits for the token at position {ends[0] + 1} " in (found.error or "")
    return num_bad


@pytest.mark.parametrize(
    ("settings", "value", "has_draft", "num_ahead_tokens"),
    [
        (GREEDY, NAN, True, 0),
        (GREEDY, INF, False, 0),
        (SAMPLED, INF, True, 4),
        (GUMBEL, NAN, True, 4),
        (SamplingSettings(top_k=9), NAN, True, 0),
    ],
    ids=["greedy", "alone, inf", "asynchronous, inf", "asynchronous, gumbel", "top-k"],
)
def test_rows_without_finite_logits_end_as_errors_and_the_others_are_unchanged(
    monkeypatch: pytest.MonkeyPatch,
    settings: SamplingSettings,
    value: float,
    has_draft: bool,
    num_ahead_tokens: int,
) -> None:
    """After a prompt, a next token or a candidate: anywhere logits are needed."""
    requests = requests_for(prompts_of_lengths(5, 23, 40, 2, 11, 17, 33, 8), num_samples=2)
    common: dict[str, Any] = {
        "settings": settings,
        "max_new_tokens": 16,
        "num_ahead_tokens": num_ahead_tokens,
    }
    common["num_branches"] = 2 * bool(num_ahead_tokens)
    pair = llama_pair() if has_draft else (llama_pair()[TARGET], None)
    expected = Harness(*pair, **common).generate(requests)

    def is_bad(token_id: int, position: int) -> bool:
        return (token_id + 3 * position) % 37 == 0

    replica = Harness(*pair, **common)
    poison(monkeypatch, replica.runners[TARGET], value, is_bad)
    completions = replica.generate(requests)
    assert 2 <= check_bad_rows(completions, expected, is_bad) < len(requests)


@pytest.mark.parametrize(
    ("settings", "num_ahead_tokens"), [(GREEDY, 4), (SAMPLED, 0), (SAMPLED, 4), (GUMBEL, 0)]
)
def test_a_draft_with_some_nans_only_drafts_less(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: SamplingSettings,
    num_ahead_tokens: int,
) -> None:
    """A draft that is the target is always accepted; only the tokens at its NaNs are not drafted."""
    requests = requests_for(prompts_of_lengths(5, 23, 40, 2), num_samples=2)
    target = llama_pair()[TARGET]
    replica = Harness(
        target,
        target,
        settings=settings,
        max_new_tokens=24,
        num_ahead_tokens=num_ahead_tokens,
    )
    whole = replica.generate(requests)
    poison(monkeypatch, replica.runners[DRAFT], float("nan"), lambda _, position: position % 5 == 0)
    completions = replica.generate(requests)
    stats = replica.stats_recorder.close_shard(0)
    assert all(c.error is None and len(c.token_ids) == 24 for c in completions)
    assert 0 < stats.num_accepted_tokens == stats.num_draft_tokens
    assert "the draft's logits are not finite" in caplog.text
    if settings is not SAMPLED:
        assert [c.token_ids for c in completions] == [c.token_ids for c in whole]


def test_a_draft_of_nans_leaves_the_target_to_decode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_for(prompts_of_lengths(5, 23))
    replica = Harness(*llama_pair(), settings=SAMPLED)
    poison(monkeypatch, replica.runners[DRAFT], float("nan"), lambda *_: True)
    completions = replica.generate(requests)
    alone = Harness(llama_pair()[TARGET], None, settings=SAMPLED).generate(requests)
    assert [c.token_ids for c in completions] == [c.token_ids for c in alone]
    assert replica.stats_recorder.close_shard(0).num_draft_tokens == 0


def test_a_target_of_nans_ends_the_job_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with fewer rows per batch than it takes to be sure; with fewer rows in all, they are errors, if it
    was no other rank's fault."""

    def blame(_: object) -> None:
        raise RuntimeError("rank 2 never signalled")

    for max_num_seqs in (2, 16):
        replica = Harness(*llama_pair(), max_num_seqs=max_num_seqs, max_num_batched_tokens=128)
        poison(monkeypatch, replica.runners[TARGET], float("nan"), lambda *_: True)
        few = replica.generate(requests_for(prompts_of_lengths(*range(3, 2 + NUM_SUSPECT_ROWS))))
        assert [c.finish_reason for c in few] == ["error"] * (NUM_SUSPECT_ROWS - 1)
        with pytest.raises(UserError, match=r"all of the first \d+ rows.*--dtype float32"):
            replica.generate(requests_for(prompts_of_lengths(*range(3, 23))))
    monkeypatch.setattr(LocalTarget, "check", blame)
    with pytest.raises(RuntimeError, match="rank 2 never signalled"):
        replica.generate(requests_for(prompts_of_lengths(3)))
