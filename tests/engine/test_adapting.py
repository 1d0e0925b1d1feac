"""A draft that changes between two rounds, whatever it becomes: the same tokens, or the same distribution.

Learning is wild here: at a rate that makes garbage of the draft, which takes over after every comparison.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from specdist.engine.adapting import AdaptingDraftWorker
from specdist.engine.assembly import Assembly
from specdist.engine.colocated import ColocatedDraft
from specdist.engine.interfaces import Proposer
from specdist.engine.proposals import ProposalReply, ProposalRequest
from specdist.engine.spare_time import SpareTime
from specdist.engine.timeline import Timeline
from specdist.learning.adaptation import Adaptation, AdaptSettings, Served, copy_of
from specdist.learning.rows import RowBuffer
from specdist.models.replacing import parameters_of, replace_weights
from specdist.sampling.distributions import SamplingSettings
from specdist.stats.learning import Learned
from tests.engine.harness import CPU, Harness, requests_for
from tests.engine.markov import MarkovModel, MarkovRunner, markov_pair
from tests.engine.sampled import ALARM, PLAIN, markov_replica, p_values
from tests.engine.test_greedy import MODES, prompts_of_lengths
from tests.models.families import noisy_copy, tiny_model

GREEDY = SamplingSettings(temperature=0.0)
COUPLED = SamplingSettings(temperature=0.9, top_k=40, is_coupled=True)
AHEAD: list[dict[str, Any]] = [{}, {"num_ahead_tokens": 4}, {"num_ahead_tokens": 4, "num_branches": 2}]
NUM_PIECES = 40


class Between(ColocatedDraft):
    """As a rank of its own: learns between the reply and the next request."""

    def __init__(self, worker: AdaptingDraftWorker, num_pieces: int) -> None:
        super().__init__(worker)
        self._worker, self._num_pieces = worker, num_pieces

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        reply = super().propose(request, clock)
        for _ in range(self._num_pieces):
            self._worker.learn_piece()
        return reply


class Adapting(Harness):
    """Learns from the first rows while the others run."""

    num_pieces = NUM_PIECES

    @property
    def assembly(self) -> Assembly:
        return dataclasses.replace(super().assembly, adapts=True)

    def proposer(self) -> Proposer:
        worker = self.assembly.draft_worker(self.runners[1], self.policy, learner=self.learner())
        assert isinstance(worker, AdaptingDraftWorker)
        self.worker = worker
        return Between(worker, self.num_pieces)

    def learner(self) -> Any:
        runner, sampling = self.runners[1], self.settings
        settings = AdaptSettings(
            sampling=sampling, vocab_size=self.vocab_size, rate=1.0, batch_tokens=20, interval=1, margin=-1.0
        )
        own = parameters_of(runner)
        served = Served(weights=own, replace=lambda weights: replace_weights(runner, weights))
        self.adaptation = Adaptation(copy_of(runner.model, own, CPU), settings, served)
        return self.adaptation


@pytest.mark.parametrize("settings", [GREEDY, COUPLED], ids=["greedy", "gumbel"])
@pytest.mark.parametrize("ahead", AHEAD, ids=MODES)
def test_tokens_are_the_target_s_whatever_the_draft_becomes(
    ahead: dict[str, Any], settings: SamplingSettings
) -> None:
    target = tiny_model("llama", seed=3)
    requests = requests_for(prompts_of_lengths(5, 23, 30, 2, 11, 17, 8, 3), num_samples=2)
    common: dict[str, Any] = {"settings": settings, "max_new_tokens": 16, "max_num_seqs": 3}
    expected = [c.token_ids for c in Harness(target, None, **common).generate(requests)]
    replica = Adapting(target, noisy_copy(target, scale=0.02), **common, **ahead)
    completions = replica.generate(requests)
    assert [c.token_ids for c in completions] == expected
    stats = replica.stats_recorder.close_shard(0)
    assert stats.num_adapt_switches > 3 and stats.num_adapt_steps >= stats.num_adapt_switches
    assert stats.num_adapt_judged > 0 and stats.adapt_ns > 0
    last = replica.adaptation.last
    assert last is not None and last.of_draft < 0.5, "the draft was to become garbage"


def test_a_draft_that_is_the_target_has_all_accepted_until_it_is_replaced() -> None:
    target = tiny_model("llama", seed=3)
    requests = requests_for(prompts_of_lengths(5, 23, 30, 2, 11, 17, 8, 3), num_samples=2)
    replica = Adapting(target, target, max_num_seqs=3, max_new_tokens=16)
    rates = []
    for num_pieces in (0, NUM_PIECES):
        replica.num_pieces = num_pieces
        replica.generate(requests)
        stats = replica.stats_recorder.close_shard(0)
        rates.append(stats.num_accepted_tokens / stats.num_draft_tokens)
    assert rates[0] == 1 > rates[1]


def test_the_rows_that_are_learned_from_are_the_target_s() -> None:
    """Prompts and completions but for their last tokens, also of sequences that share a prefix or were
    preempted."""
    target = tiny_model("llama", seed=3)
    prompts = prompts_of_lengths(20, 23, 9, 17, 12)
    requests = requests_for([*prompts, *(prompts[0] + prompt for prompt in prompts)], num_samples=2)
    replica = Adapting(target, noisy_copy(target, scale=0.02), max_num_seqs=3, num_pages=24)
    replica.num_pieces = 0
    completions = {tuple(c.request.prompt_ids): c.token_ids for c in replica.generate(requests)}
    assert replica.stats_recorder.close_shard(0).num_preemptions
    rows = list(replica.adaptation.rows._rows)
    assert len(rows) > len(requests) - 2 * replica.scheduling.num_slots
    for row in rows:
        ids = row.token_ids.tolist()
        said = completions[tuple(ids[: row.num_prompt_tokens])]
        assert (
            len(said) - 6 <= row.num_completion_tokens
            and said[: row.num_completion_tokens] == (ids[row.num_prompt_tokens :])
        )


class Swapping:
    """Another table in the draft's place after every round."""

    learned: Any

    def __init__(self, runner: Any, models: Sequence[MarkovModel]) -> None:
        self.rows, self.learned = RowBuffer(max_tokens=10, num_latest=1), Learned()
        self._runner, self._models = runner, models

    def pieces(self) -> Iterator[str]:
        yield "beginning"
        while True:
            for model in self._models:
                self._runner._logits_VVV = model.logits_VVV
                self.learned.num_adapt_switches += 1
                yield "replacing"

    def resize(self, factor: float) -> bool:
        return False


class SwappingReplica(Adapting):
    num_pieces = 1

    def learner(self) -> Any:
        runner = self.runners[1]
        assert isinstance(runner, MarkovRunner)
        return Swapping(runner, [markov_pair(seed=seed)[1] for seed in (3, 1)])


@pytest.mark.parametrize("ahead", AHEAD, ids=MODES)
def test_under_rejection_the_distribution_is_the_target_s(ahead: dict[str, Any]) -> None:
    """What was drafted by the one table is verified while the other is the draft."""
    target, draft = markov_pair()
    replica = markov_replica(PLAIN, pair=(target, draft), kind=SwappingReplica, **ahead)
    found = p_values(replica, target)
    assert min(found) > ALARM, found
    assert replica.stats_recorder.close_shard(0).num_adapt_switches > 10


class Counting(Swapping):
    def __init__(self) -> None:
        self.rows, self.learned = RowBuffer(max_tokens=10, num_latest=1), Learned()
        self.num_pieces = 0

    def pieces(self) -> Iterator[str]:
        while True:
            yield "counting"
            self.num_pieces += 1


class Idle(SpareTime):
    def may_take(self, seconds: float) -> bool:
        return True


def test_a_piece_that_took_long_once_is_tried_again() -> None:
    """With every wait that is too short for it, the time that it is thought to take becomes less."""
    learner = Counting()
    asked: list[float] = []
    replica = markov_replica(GREEDY, pair=markov_pair(), kind=Harness)
    worker = replica.assembly.draft_worker(replica.runners[1], replica.policy, learner=learner)
    assert isinstance(worker, AdaptingDraftWorker)
    here, there = socket.socketpair()
    with here, there:

        def may_take(seconds: float) -> bool:
            asked.append(seconds)
            there.send(b"x")
            return seconds < 0.1

        worker._spare.may_take = may_take  # type: ignore[method-assign]
        worker._seconds[worker._next] = 1.0
        while not learner.num_pieces and len(asked) < 100:
            worker._may_learn = True
            worker.wait(here)
            here.recv(1)
    assert 10 < len(asked) < 30


def test_nothing_is_learned_between_a_message_and_what_belongs_to_it() -> None:
    """Else the draft could be replaced in the middle of a round."""
    target, draft = markov_pair()
    learner = Counting()
    replica = markov_replica(GREEDY, pair=(target, draft), kind=Harness)
    worker = replica.assembly.draft_worker(replica.runners[1], replica.policy, learner=learner)
    assert isinstance(worker, AdaptingDraftWorker)
    worker._spare = Idle()
    here, there = socket.socketpair()
    with here, there:

        def arrive(after: int) -> None:
            """A message comes during this piece."""
            first = learner.num_pieces

            def may_take(seconds: float) -> bool:
                if learner.num_pieces == first + after:
                    there.send(b"x")
                return True

            worker._spare.may_take = may_take  # type: ignore[method-assign]
            worker.wait(here)

        arrive(after=3)
        assert learner.num_pieces == 4
        worker.wait(here)
        here.recv(1)

        def never(seconds: float) -> bool:
            raise AssertionError("the rest of the message is waited for")

        worker._spare.may_take = never  # type: ignore[method-assign]
        worker.wait(here)
        nothing = ProposalRequest(**_empty())
        worker.respond(nothing)
        worker.prefill_and_draft_ahead(nothing)
        arrive(after=2)
        assert learner.num_pieces == 7


def _empty() -> dict[str, Any]:
    from specdist.cache.pages import PageUpdates
    from specdist.engine.opened import NOTHING_OPENED
    from specdist.engine.proposals import NOTHING_MISSED

    none = np.zeros(0, np.int64)
    names = (
        "slots_R",
        "num_accepted_R",
        "next_token_ids_R",
        "draft_now_R",
        "num_redraft_R",
        "suspended_slots",
    )
    return {
        **dict.fromkeys(names, none), "page_updates": PageUpdates(none, none, none),
        "opened": NOTHING_OPENED, "context": NOTHING_MISSED,
    }  # fmt: skip
