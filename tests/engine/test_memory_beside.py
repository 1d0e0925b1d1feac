"""Candidates from memory beside those of a draft model: the tokens are the target's in any case."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdist.drafters import source_choice
from specdist.drafters.ngram_index import NgramIndex
from specdist.drafters.source_choice import MemorySettings, SourceChoice
from specdist.drafters.text_store import NO_TEXTS, NO_TOKEN, OVERLAP, TextSettings, TextStore
from specdist.engine.colocated import ColocatedDraft
from specdist.engine.draft_worker import DraftWorker
from specdist.engine.interfaces import Proposer
from specdist.engine.memory_beside import MemoryBeside
from specdist.engine.proposals import ProposalReply, ProposalRequest
from specdist.engine.timeline import Timeline
from specdist.sampling.distributions import SamplingSettings
from specdist.theory.rounds import ALONE, IN_TURNS, LISTEN, RoundShape
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import MarkovModel, markov_pair, repetitive_model
from tests.engine.sampled import (
    ALARM,
    COUPLED,
    FILTERED,
    PLAIN,
    PROMPTS,
    TOP_K,
    markov_replica,
    p_values,
)
from tests.engine.scripted import Scripted

TARGET = repetitive_model()
# Of another one.
DRAFT = MarkovModel(0.2 * TARGET.logits_VVV + markov_pair(spread=2.0, seed=4)[0].logits_VVV)
NUM_SAMPLES = 400
# Of which much fits, and of which the oldest are forgotten.
TEXTS = TextSettings(
    num_tokens=4000,
    given=[np.random.default_rng(row).integers(7, size=50) for row in range(40)],
    adds_sequences=True,
)
GIVEN = TextSettings(num_tokens=4000, given=TEXTS.given)
GREEDY = SamplingSettings(temperature=0.0)
AHEAD: dict[str, Any] = {"num_ahead_tokens": 3, "num_branches": 1}
SHAPES = [
    IN_TURNS,
    RoundShape(num_ahead=3, num_branches=1),
    LISTEN,
    ALONE,
    RoundShape(num_rounds_alone=3),
]


def replica_with(
    settings: SamplingSettings = PLAIN, *, learns: bool = True, least_chance: float = 0.2, **options: Any
) -> Harness:
    memory = MemorySettings(
        max_tokens=6,
        max_model_tokens=3,
        least_chance=least_chance,
        learns_together=learns,
        texts=options.pop("texts", NO_TEXTS),
    )
    return markov_replica(settings, pair=(TARGET, DRAFT), num_draft_tokens=3, beside=memory, **options)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (FILTERED, {"learns": False}),
        (FILTERED, {"learns": False, "policy": Scripted([0, 2, 0, 0, 3])}),
        (PLAIN, AHEAD),
        (TOP_K, {"shapes": SHAPES, **AHEAD}),
        (PLAIN, {"max_num_seqs": 400, "num_pages": 700, "texts": TEXTS}),
        (PLAIN, {"draft_window": 6, **AHEAD}),
    ],
    ids=["in_turns", "late", "ahead", "any_shape", "preempted", "window"],
)
def test_tokens_follow_the_target_s_distribution(settings: SamplingSettings, options: dict[str, Any]) -> None:
    replica = replica_with(settings, **options)
    found = p_values(replica, TARGET, NUM_SAMPLES)
    assert min(found) > ALARM, found
    stats = replica.stats_recorder.close_shard(0)
    assert 0.05 < stats.num_memory_tokens / stats.num_draft_tokens < 0.9
    assert 0.05 < stats.num_accepted_memory_tokens / stats.num_memory_tokens < 0.8
    assert ("num_pages" in options) == (stats.num_preemptions > 5)


@pytest.mark.parametrize("settings", [GREEDY, COUPLED])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": Scripted([0, 2, 0, 0, 3])},
        {"shapes": SHAPES, **AHEAD},
        {"draft_window": 6, "shapes": SHAPES, **AHEAD},
    ],
    ids=["in_turns", "late", "any_shape", "window"],
)
def test_one_hot_targets_emit_what_they_emit_alone(
    settings: SamplingSettings, options: dict[str, Any]
) -> None:
    eos = [5] if settings.is_coupled else []
    alone = tokens_of(markov_replica(settings, pair=(TARGET, None), eos=eos))
    replica = replica_with(settings, eos=eos, texts=TEXTS, max_num_seqs=40, **options)
    assert tokens_of(replica) == alone
    stats = replica.stats_recorder.close_shard(0)
    assert 0 < stats.num_memory_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("least_gain", [0.0, 10.0])
def test_where_the_model_pays_no_more_the_draft_is_asked_for_memory_alone(
    least_gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at all where memory adds nothing either; the tokens are those of the target."""
    monkeypatch.setattr(source_choice, "LEAST_GAIN", least_gain)
    shapes = [RoundShape(num_rounds_alone=5), LISTEN]
    replica = replica_with(COUPLED, shapes=shapes, max_num_seqs=40, **AHEAD)
    assert tokens_of(replica) == tokens_of(markov_replica(COUPLED, pair=(TARGET, None)))
    stats = replica.stats_recorder.close_shard(0)
    # One round of seven listens; memory proposes in all of them, or in two.
    assert 0 < stats.num_ahead_chains < 0.3 * stats.num_row_steps
    assert (stats.num_memory_tokens > 0.25 * stats.num_row_steps) == (least_gain == 0.0)


@pytest.mark.parametrize("window", [None, 2])
def test_tokens_depend_neither_on_the_batch_nor_on_preemptions(window: int | None) -> None:
    """Under rejection, where every sequence learns alone: the choice of the source is its own, too. A draft
    with a window does not run all of a prompt, and memory has all of it."""
    common: dict[str, Any] = {"learns": False, "texts": GIVEN, "draft_window": window}
    prompts = PROMPTS if window is None else [2 * prompt for prompt in PROMPTS]
    expected = tokens_of(replica_with(FILTERED, **common), prompts)
    crowded = replica_with(FILTERED, **common, max_num_seqs=60, num_pages=130 if window is None else 160)
    assert tokens_of(crowded, prompts) == expected
    assert crowded.stats_recorder.close_shard(0).num_preemptions > 5


class Repeating:
    """Compares the block of every sequence that goes on with that before it was preempted."""

    def __init__(self, inner: Proposer) -> None:
        self._inner, self.close = inner, inner.close
        self._blocks: dict[tuple[int, int], list[int]] = {}
        self.num_repeated = 0

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        request.meanwhile()
        keys = [(sequence.stream_key, len(sequence.token_ids)) for sequence in request.sequences]
        reply = self._inner.propose(request, clock)
        blocks = np.split(reply.candidate_ids_C, np.cumsum(reply.num_drafted_R))[: len(keys)]
        for key, block, is_again in zip(keys, blocks, request.num_redraft_R > 0, strict=True):
            assert not is_again or block.tolist() == self._blocks[key]
            self._blocks[key] = block.tolist()
            self.num_repeated += is_again
        return reply


class Counting:
    """Counts the blocks that are the model's."""

    def __init__(self, inner: Proposer) -> None:
        self._inner, self.close = inner, inner.close
        self.num_blocks = self.num_of_memory = 0

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        reply = self._inner.propose(request, clock)
        is_memory_R = reply.num_from_memory_R > 0
        self.num_blocks += int(((reply.num_drafted_R > 0) & ~is_memory_R).sum())
        self.num_of_memory += int(is_memory_R.sum())
        return reply


class CountingReplica(Harness):
    def proposer(self) -> Proposer:
        self.counting = Counting(super().proposer())
        return self.counting


@pytest.mark.parametrize("options", [{}, AHEAD], ids=["in_turns", "ahead"])
def test_what_the_model_s_blocks_bring_is_learned_from_them_alone(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were blocks of memory among them, the model would seem to bring nothing there, and less with each. Of a
    sequence that ends the last block is not told."""
    told: list[int] = []
    observe = SourceChoice.observe_blocks

    def noting(choice: SourceChoice, classes_R: np.ndarray, *counts_R: np.ndarray) -> None:
        told.append(len(classes_R))
        observe(choice, classes_R, *counts_R)

    monkeypatch.setattr(SourceChoice, "observe_blocks", noting)
    replica = replica_with(GREEDY, kind=CountingReplica, **options)
    tokens_of(replica)
    counting = replica.counting  # type: ignore[attr-defined]
    assert counting.num_of_memory > 0.3 * counting.num_blocks
    assert 0.5 * counting.num_blocks < sum(told) <= counting.num_blocks


class Knowing:
    """Compares what memory knows of every sequence with its tokens."""

    def __init__(self, inner: ColocatedDraft) -> None:
        self._inner, self.close = inner, inner.close

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        request.meanwhile()
        reply = self._inner.propose(request, clock)
        memory = self._inner._draft._memory
        assert isinstance(memory, MemoryBeside)
        for sequence in request.sequences:
            known = memory._index.tokens[sequence.slot, : len(sequence.token_ids)]
            assert known.tolist() == sequence.token_ids
        return reply


class KnowingReplica(Harness):
    def proposer(self) -> Proposer:
        inner = super().proposer()
        assert isinstance(inner, ColocatedDraft)
        return Knowing(inner)


@pytest.mark.parametrize("window", [None, 2])
def test_memory_knows_all_of_a_text_of_which_the_draft_runs_a_part(window: int | None) -> None:
    """What shares pages with another prompt, what a window does not see, and after preemptions."""
    prompts = [[1, 2, 3, 4] * 5, [1, 2, 3, 4] * 5 + [5, 6], [6, 5, 4, 3, 2, 1] * 5]
    limits = {"max_num_seqs": 20, "num_pages": 90}
    replica = replica_with(PLAIN, draft_window=window, kind=KnowingReplica, **limits)
    tokens_of(replica, prompts, num_samples=10)
    assert replica.stats_recorder.close_shard(0).num_preemptions > 3


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 24}], ids=["whole", "in_parts"])
def test_prompts_are_looked_through_while_the_target_is_at_work(
    limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target waits for a reply: no prompt is read before one."""
    read: dict[bool, list[int]] = {True: [], False: []}
    is_waited_for = False
    respond, append = DraftWorker.respond, NgramIndex.append

    def responding(worker: DraftWorker, request: ProposalRequest) -> ProposalReply:
        nonlocal is_waited_for
        is_waited_for = True
        reply = respond(worker, request)
        is_waited_for = False
        return reply

    def noting(index: NgramIndex, slots_R: np.ndarray, counts_R: np.ndarray, tokens_C: np.ndarray) -> None:
        read[is_waited_for] += counts_R.tolist()
        append(index, slots_R, counts_R, tokens_C)

    monkeypatch.setattr(DraftWorker, "respond", responding)
    monkeypatch.setattr(NgramIndex, "append", noting)
    prompts = [[1, 2, 3, 4] * 5, [6, 5, 4, 3, 2, 1] * 5, [2, 4] * 9]
    tokens_of(replica_with(PLAIN, **limits), prompts, num_samples=2)
    assert sorted(read[False]) == [18, 18, 20, 20, 30, 30]
    assert max(read[True]) <= 7


class RepeatingReplica(Harness):
    def proposer(self) -> Proposer:
        self.repeating = Repeating(super().proposer())
        return self.repeating


@pytest.mark.parametrize("options", [{}, {"memory": 0.0, "pair": (TARGET, None)}], ids=["beside", "alone"])
def test_a_preempted_sequence_repeats_its_block(options: dict[str, Any]) -> None:
    """Though memory has learned from others meanwhile: the random numbers are the same, too."""
    memory = MemorySettings(
        max_tokens=6, max_model_tokens=3, least_chance=0.0, learns_together=True, texts=TEXTS
    )
    replica = markov_replica(
        PLAIN,
        **{"kind": RepeatingReplica, "pair": (TARGET, DRAFT), "num_draft_tokens": 3, "beside": memory}
        | {"max_num_seqs": 60, "num_pages": 130, **options},
    )
    tokens_of(replica, num_samples=25)
    assert replica.repeating.num_repeated > 5  # type: ignore[attr-defined]


def test_other_rows_are_remembered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often they are preempted: no token but those that a new block repeats is stored again."""
    counts = []
    for limits in ({"max_num_seqs": 400}, {"max_num_seqs": 60, "num_pages": 130}):
        stores: list[TextStore] = []
        monkeypatch.setattr(NgramIndex, "begin", _noting_stores(NgramIndex.begin, stores))
        others = TextSettings(num_tokens=20000, adds_sequences=True)
        replica = replica_with(COUPLED, texts=others, **limits)
        tokens_of(replica, num_samples=25)
        num_places = int(stores[-1].count[0])
        assert num_places < stores[-1].capacity
        num_preemptions = replica.stats_recorder.close_shard(0).num_preemptions
        counts.append(int((stores[-1].tokens[:num_places] != NO_TOKEN).sum()) - OVERLAP * num_preemptions)
        monkeypatch.undo()
    assert num_preemptions > 5 and 0 < counts[1] <= counts[0]


def _noting_stores(begin: Any, stores: list[TextStore]) -> Any:
    def noting(index: NgramIndex, *arguments: Any) -> None:
        assert index._state.store is not None
        stores.append(index._state.store)
        begin(index, *arguments)

    return noting


def tokens_of(replica: Harness, prompts: list[list[int]] = PROMPTS, num_samples: int = 60) -> list[list[int]]:
    completions = replica.generate(requests_for(prompts, num_samples))
    assert all(completion.error is None for completion in completions)
    return [completion.token_ids for completion in completions]
