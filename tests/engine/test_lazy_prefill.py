"""A draft in the target's process that is not asked in every round, and whose prompts are put off: the tokens
are those of a draft that is always asked, and its cache has what its bookkeeping says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdist.engine import assembly
from specdist.engine.draft import lazy_prefill
from specdist.engine.draft.client import InProcess
from specdist.engine.draft.steps.draft_state import DraftState
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.request import Request
from specdist.engine.times.timeline import Timeline
from specdist.models.batch.flat import FlatBatch
from specdist.sampling.distributions import SamplingSettings
from tests.engine.checked import CheckedReplica
from tests.engine.harness import Harness, requests_for
from tests.engine.sampled import FILTERED, PLAIN, markov_replica
from tests.engine.scripted import Scripted

GREEDY = SamplingSettings(temperature=0.0)
SKIPPED = 3
# Three that begin alike, of several pages, and two others.
PROMPTS = [[1, 2, 3, 1, 4, 4, 2, 2, 1, 3, tail] for tail in (0, 5, 6)] + [[4], [5, 2, 2, 6, 1, 0]]
NUM_SAMPLES = 8


class Skipping(CheckedReplica):
    """Every sequence that the model has drafted for has all its tokens in the cache."""

    num_alone = 0

    def check(self, state: DraftState, request: ProposalRequest, reply: ProposalReply) -> None:
        self.num_alone += not len(reply.draft_pass_sizes_P)
        for slot, sequence, num_drafted in zip(
            request.slots_R.tolist(), request.sequences, reply.num_drafted_R, strict=True
        ):
            if num_drafted:
                assert int(state.num_computed[slot]) >= len(sequence.token_ids)
                assert self.draft_runner.is_cached(slot, 0, np.array(sequence.token_ids))
                self.num_checked += 1


@pytest.fixture(autouse=True)
def short_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_prefill, "FEWEST_PAUSED", SKIPPED)
    monkeypatch.setattr(lazy_prefill, "MOST_PAUSED", SKIPPED)


@pytest.mark.parametrize(
    ("settings", "only_odd", "options"),
    [
        (GREEDY, False, {}),
        (FILTERED, True, {"num_pages": 24}),
        (GREEDY, False, {"max_num_batched_tokens": 20}),
        (FILTERED, True, {"max_num_seqs": 3}),
    ],
    ids=["roomy", "some, tight", "chunks", "some, few"],
)
def test_whoever_is_drafted_for_has_all_its_tokens_in_the_cache(
    settings: SamplingSettings, only_odd: bool, options: dict[str, Any]
) -> None:
    """Also where prompts share pages that nobody has run, or whose first owner has long ended, where they
    come in chunks, and where sequences are preempted."""
    policy = Scripted([0, 0, 2, 0, 3, 3], only_odd=only_odd)
    sizes = {"max_num_seqs": 8, "max_new_tokens": 30, "max_seq_len": 48, "max_num_batched_tokens": 64}
    replica = markov_replica(settings, kind=Skipping, policy=policy, **sizes | options)
    replica.generate(requests_for(PROMPTS, NUM_SAMPLES))
    stats = replica.stats_recorder.close_shard(0)
    assert replica.num_checked > 20 and replica.num_alone > 10
    assert stats.num_draft_tokens > 40 and policy.num_paused > 10
    assert (stats.num_preemptions > 5) == ("num_pages" in options)


@pytest.mark.parametrize("settings", [PLAIN, FILTERED], ids=["plain", "filtered"])
def test_a_draft_that_is_skipped_leaves_the_tokens_of_one_that_is_asked(
    settings: SamplingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks of the same lengths in the same rounds. Sequences end, but none begins on the way: rounds
    are then numbered alike."""
    prompts, found = [prompt for prompt in PROMPTS for _ in range(10)], []
    for skips in (True, False):
        monkeypatch.setattr(assembly, "LEAST_SHARE", 0.0)
        monkeypatch.setattr(assembly.Assembly, "_may_skip", lambda *_, skips=skips: skips)
        pause = [0] if skips else [0] * (1 + SKIPPED)
        replica = markov_replica(settings, policy=Scripted([*pause, 2, 3, *pause, 3]))
        completions = replica.generate(requests_for(prompts))
        assert replica.stats_recorder.close_shard(0).num_misses > 20
        found.append([completion.token_ids for completion in completions])
    assert found[0] == found[1]


def passes_of_the_draft(monkeypatch: pytest.MonkeyPatch, replica: Harness) -> list[tuple[int, int]]:
    """Of every pass its tokens, and those whose logits are asked for, as they come."""
    runner, found = replica.runners[1], list[tuple[int, int]]()
    forward = runner.forward

    def counted(batch: FlatBatch, logits_index: Any) -> Any:
        found.append((len(batch), len(logits_index)))
        return forward(batch, logits_index)

    monkeypatch.setattr(runner, "forward", counted)
    return found


def test_prompts_are_run_once_and_only_if_anything_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prefix in common, the tokens of its full pages are run for one sequence alone."""
    all_of_them = sum(map(len, PROMPTS)) - 2 * 8 + 3 * NUM_SAMPLES * 5
    for lengths, most in (([0], 0), ([0, 0, 2], all_of_them)):
        replica = markov_replica(GREEDY, policy=Scripted(lengths), max_new_tokens=25)
        passes = passes_of_the_draft(monkeypatch, replica)
        replica.generate(requests_for(PROMPTS, NUM_SAMPLES))
        num_run = sum(size for size, num_logits in passes if not num_logits)
        assert num_run <= most and (num_run > 30) == (most > 0)


def test_no_pass_is_larger_than_allowed_however_much_the_cache_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After texts that the model has had no part in."""
    replica = markov_replica(
        GREEDY, policy=Scripted([*[0] * 8, 2]), kind=Skipping,
        max_new_tokens=40, max_num_seqs=8, max_num_batched_tokens=24,
    )  # fmt: skip
    passes = passes_of_the_draft(monkeypatch, replica)
    replica.generate(requests_for(PROMPTS, NUM_SAMPLES))
    assert replica.num_checked > 20
    # Eight more, of which the next tokens are drawn.
    assert 16 < max(size for size, _ in passes) <= 24 + 8


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of every request that the draft has to answer, the sequences that decode, and the rounds that it lets
    pass."""
    found: list[tuple[int, int]] = []
    ask = InProcess.ask

    def counted(self: InProcess, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        reply = ask(self, request, clock)
        found.append((len(request.slots_R), reply.num_rounds_alone))
        return reply

    monkeypatch.setattr(InProcess, "ask", counted)
    return found


@pytest.fixture
def long_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_prefill, "FEWEST_PAUSED", 1000)
    monkeypatch.setattr(lazy_prefill, "MOST_PAUSED", 1000)


def test_skips_get_longer_until_something_is_drafted(
    asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the longest."""
    monkeypatch.setattr(lazy_prefill, "MOST_PAUSED", 3 * SKIPPED)
    policy = Scripted([0, 0, 0, 0, 2, 0, 2, 2, 0, 0])
    markov_replica(GREEDY, policy=policy, max_new_tokens=80, max_seq_len=96).generate(requests_for([[4]]))
    # The first is a round of the prompt alone.
    assert [skip for _, skip in asked[:11]] == [0, 3, 6, 9, 9, 0, 3, 0, 0, 3, 6]


@pytest.mark.usefixtures("long_skips")
def test_with_fewer_sequences_the_draft_is_asked_again(asked: list[tuple[int, int]]) -> None:
    """Before the skipped rounds are over."""
    replica = markov_replica(GREEDY, policy=Scripted([0]))
    replica.generate(
        [
            Request(row_id=row, sample_index=0, prompt_ids=[1] * (1 + row), max_new_tokens=3 * (1 + row))
            for row in range(8)
        ]
    )
    # Three quarters of 8 are 6, of 5 about 4, of 3 about 2; where nothing decodes, nothing is decided.
    assert [num for num, _ in asked] == [0, 8, 5, 3, 2, 1]


@pytest.mark.usefixtures("long_skips")
def test_prompts_alone_end_no_skipping(asked: list[tuple[int, int]]) -> None:
    """Sequences one after the other."""
    replica = markov_replica(GREEDY, policy=Scripted([0]), max_num_seqs=1)
    replica.generate(requests_for(PROMPTS))
    assert [num for num, _ in asked] == [0, 1]
