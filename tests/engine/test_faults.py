"""Rounds that fail: too little memory, and logits that are not finite. Other rows are not affected."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.engine import assembly
from specdist.engine.draft import channels
from specdist.engine.draft.channels import InProcess, ToRank, serve_draft
from specdist.engine.draft.client import Draft
from specdist.engine.messages.interfaces import Proposer
from specdist.engine.messages.link import Link
from specdist.engine.request import Completion
from specdist.engine.rounds.faults import NUM_SUSPECT_ROWS
from specdist.engine.target.local_target import LocalTarget
from specdist.engine.times.timeline import Timeline
from specdist.models.batch.flat import FlatBatch
from specdist.models.passes.runner import ModelRunner
from specdist.policies import GammaTune
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError
from tests.engine.harness import Harness, requests_for
from tests.engine.test_greedy import prompts_of_lengths
from tests.engine.test_identity import outcome
from tests.models.families import noisy_copy, tiny_model

TARGET, DRAFT = 0, 1
NAN, INF = float("nan"), float("inf")
GREEDY = SamplingSettings(temperature=0.0)
SAMPLED = SamplingSettings(temperature=1.0, top_p=0.95)
GUMBEL = SamplingSettings(temperature=1.0, is_coupled=True)
# Block lengths follow each row's history.
WITH_HISTORY: dict[str, Any] = {
    "max_new_tokens": 20,
    "policy": GammaTune(
        num_draft_tokens=2, min_draft_tokens=1, max_draft_tokens=4, length_bonus=1.0, length_rate=0.5
    ),
}
# torch's own messages, on a GPU and on a CPU.
COMPLAINTS = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: not enough memory: you tried ..."),
    MemoryError(),
]


@pytest.fixture(scope="module")
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny_model("llama", seed=3)
    return target, noisy_copy(target)


def fail_at(monkeypatch: pytest.MonkeyPatch, runner: ModelRunner, error: Exception, *passes: int) -> None:
    """Let these passes of the runner fail, counted from 1."""
    forward, counter = runner.forward, itertools.count(1)

    def failing(batch: FlatBatch, logits_index: np.ndarray) -> Tensor:
        if next(counter) in passes:
            raise error
        return forward(batch, logits_index)

    monkeypatch.setattr(runner, "forward", failing)


@pytest.mark.parametrize(
    ("model", "num_ahead_tokens", "num_branches", "settings"),
    [(TARGET, 0, 0, GREEDY), (TARGET, 4, 2, SAMPLED), (DRAFT, 0, 0, SAMPLED), (DRAFT, 4, 2, GREEDY)],
    ids=["target-none-greedy", "target-asynchronous-sampled", "draft-none-sampled",
         "draft-asynchronous-greedy"],
)  # fmt: skip
def test_too_little_memory_makes_the_batch_smaller_and_changes_no_token(
    models: tuple[PreTrainedModel, PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: SamplingSettings,
    num_ahead_tokens: int,
    num_branches: int,
    model: int,
) -> None:
    """Also with a policy whose block lengths follow each row's history: a block that is repeated is observed
    once. A draft that was wrong about that would draft other lengths, and draw other tokens."""
    requests = requests_for(prompts_of_lengths(5, 23, 40, 2, 11, 17, 33, 8))
    common = WITH_HISTORY | {
        "settings": settings,
        "eos": [7],
        "num_ahead_tokens": num_ahead_tokens,
        "num_branches": num_branches,
    }
    expected = Harness(*models, **common).generate(requests)
    # In the middle of the run, at any point of a round: before prompts, between the steps of a draft batch,
    # ...
    for complaint, first in zip(COMPLAINTS, (3, 6, 8) if model == TARGET else (5, 12, 18), strict=True):
        replica = Harness(*models, **common)
        with monkeypatch.context() as patch:
            fail_at(patch, replica.runners[model], complaint, first, first + 4)
            completions = replica.generate(requests)
        assert outcome(completions) == outcome(expected)
        assert replica.stats_recorder.shard(0).num_out_of_memory == 2
        assert replica.scheduler.settings.num_slots == 2
    assert (
        "at most 4 sequences and 32 tokens" in caplog.text
        and "at most 2 sequences and 16 tokens" in caplog.text
    )


class OneOfSeveral(LocalTarget):
    """As if other ranks of the target waited for its next pass."""

    is_single_rank = False


def test_a_draft_beside_a_sharded_target_out_of_memory_needs_no_other_rank(
    models: tuple[PreTrainedModel, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank takes part in the draft's passes, so that the round is repeated; a failed pass of the target
    ends it, since the others would wait in theirs."""
    requests = requests_for(prompts_of_lengths(5, 23, 40, 2, 11, 17, 33, 8))
    expected = Harness(*models, **WITH_HISTORY).generate(requests)
    monkeypatch.setattr(assembly, "LocalTarget", OneOfSeveral)
    replica = Harness(*models, **WITH_HISTORY)
    with monkeypatch.context() as patch:
        fail_at(patch, replica.runners[DRAFT], COMPLAINTS[0], 5, 12)
        assert outcome(replica.generate(requests)) == outcome(expected)
    assert replica.stats_recorder.shard(0).num_out_of_memory == 2
    replica = Harness(*models, **WITH_HISTORY)
    fail_at(monkeypatch, replica.runners[TARGET], COMPLAINTS[0], 5)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        replica.generate(requests)


class OverAWire(Harness):
    """The draft in a thread of its own, reached by messages."""

    def proposer(self) -> Proposer:
        local = super().proposer()
        assert isinstance(local, Draft) and isinstance(local._channel, InProcess)
        worker = local._channel._draft
        threading.Thread(
            target=serve_draft, args=(worker, 0), kwargs={"clock": Timeline("transfer")}, daemon=True
        ).start()
        return Draft(ToRank(1))


@pytest.mark.parametrize(("num_ahead_tokens", "num_branches"), [(0, 0), (4, 2)], ids=["none", "asynchronous"])
def test_a_draft_rank_out_of_memory_reports_it_and_goes_on(
    models: tuple[PreTrainedModel, PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_ahead_tokens: int,
    num_branches: int,
) -> None:
    """Before its reply, and after it."""
    queues: list[queue.Queue[Tensor]] = [queue.Queue(), queue.Queue()]
    monkeypatch.setattr(
        channels, "link_to", lambda rank: Link(lambda tensor: queues[rank].put(tensor.clone()))
    )
    monkeypatch.setattr(
        channels,
        "link_from",
        lambda rank, wait: Link(lambda tensor: tensor.copy_(queues[1 - rank].get(timeout=60))),
    )
    requests = requests_for(prompts_of_lengths(5, 23, 40, 2, 11, 17, 33, 8))
    common = WITH_HISTORY | {
        "settings": SAMPLED,
        "num_ahead_tokens": num_ahead_tokens,
        "num_branches": num_branches,
    }
    expected = Harness(*models, **common).generate(requests)
    for first in (5, 12, 18):
        replica = OverAWire(*models, **common)
        fail_at(monkeypatch, replica.runners[DRAFT], COMPLAINTS[0], first, first + 9)
        assert outcome(replica.generate(requests)) == outcome(expected)
        assert replica.stats_recorder.shard(0).num_out_of_memory == 2
    assert "out of memory (DraftOutOfMemory: draft: OutOfMemoryError: CUDA out of memory." in caplog.text


def test_a_row_that_does_not_fit_alone_is_an_error_and_the_batch_recovers(
    models: tuple[PreTrainedModel, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long context needs memory however few of its tokens are run."""
    requests = requests_for(prompts_of_lengths(5, 60, 8, 11, 2, 17, 9, 8))
    common: dict[str, Any] = {"max_new_tokens": 12, "max_num_seqs": 4}
    expected = Harness(*models, **common).generate(requests)
    replica = Harness(*models, **common)
    forward = replica.runners[TARGET].forward

    def run(batch: FlatBatch, logits_index: np.ndarray) -> Tensor:
        if np.max(batch.positions_T) >= 50:
            raise COMPLAINTS[0]
        return forward(batch, logits_index)

    monkeypatch.setattr(replica.runners[TARGET], "forward", run)
    completions = replica.generate(requests)
    error = completions.pop(1)
    del expected[1]
    assert error.finish_reason == "error"
    assert "does not fit" in (error.error or "") and "Tried to allocate" in (error.error or "")
    assert outcome(completions) == outcome(expected)
    assert replica.scheduler.settings == replica.scheduling
    assert replica.stats_recorder.shard(0).num_completions == len(expected)


def test_other_errors_are_not_mistaken_for_a_lack_of_memory(
    models: tuple[PreTrainedModel, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Harness(*models)
    fail_at(monkeypatch, replica.runners[TARGET], RuntimeError("device-side assert triggered"), 1)
    with pytest.raises(RuntimeError, match="assert triggered"):
        replica.generate(requests_for(prompts_of_lengths(5)))


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
    models: tuple[PreTrainedModel, PreTrainedModel],
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
    pair = models if has_draft else (models[TARGET], None)
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
    models: tuple[PreTrainedModel, PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: SamplingSettings,
    num_ahead_tokens: int,
) -> None:
    """A draft that is the target is always accepted; only the tokens at its NaNs are not drafted."""
    requests = requests_for(prompts_of_lengths(5, 23, 40, 2), num_samples=2)
    replica = Harness(
        models[TARGET],
        models[TARGET],
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


def test_a_draft_of_nans_leaves_the_target_to_decode_alone(
    models: tuple[PreTrainedModel, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_for(prompts_of_lengths(5, 23))
    replica = Harness(*models, settings=SAMPLED)
    poison(monkeypatch, replica.runners[DRAFT], float("nan"), lambda *_: True)
    completions = replica.generate(requests)
    alone = Harness(models[TARGET], None, settings=SAMPLED).generate(requests)
    assert [c.token_ids for c in completions] == [c.token_ids for c in alone]
    assert replica.stats_recorder.close_shard(0).num_draft_tokens == 0


def test_a_target_of_nans_ends_the_job_before_anything_is_written(
    models: tuple[PreTrainedModel, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with fewer rows per batch than it takes to be sure; with fewer rows in all, they are errors."""
    for max_num_seqs in (2, 16):
        replica = Harness(*models, max_num_seqs=max_num_seqs, max_num_batched_tokens=128)
        poison(monkeypatch, replica.runners[TARGET], float("nan"), lambda *_: True)
        few = replica.generate(requests_for(prompts_of_lengths(*range(3, 2 + NUM_SUSPECT_ROWS))))
        assert [c.finish_reason for c in few] == ["error"] * (NUM_SUSPECT_ROWS - 1)
        with pytest.raises(UserError, match=r"all of the first \d+ rows.*--dtype float32"):
            replica.generate(requests_for(prompts_of_lengths(*range(3, 23))))
