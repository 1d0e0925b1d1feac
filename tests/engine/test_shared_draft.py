"""Several target groups share a draft: the tokens of each are those that it has with a draft of its own, and
follow the target's distribution, also where the link to the draft breaks again and again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdist.engine.draft_scores import StepScores
from specdist.engine.faults import DraftChanged
from specdist.engine.interfaces import Proposer
from specdist.engine.no_draft import NoDraft
from specdist.engine.proposals import ProposalReply, ProposalRequest
from specdist.engine.timeline import Timeline
from specdist.policies import DraftSequences, GammaTune, Goodput, RoundContext, VerifiedBlocks
from specdist.policies.costs import CostModel, Curve
from specdist.sampling.distributions import SamplingSettings
from specdist.theory.rounds import RoundShape
from tests.engine.groups import SharedReplicas
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import markov_pair
from tests.engine.sampled import ALARM, COUPLED, PLAIN, PROMPTS, markov_replica, p_values
from tests.engine.test_greedy import MODES

TARGET, DRAFT = markov_pair()
AHEAD: list[dict[str, Any]] = [{}, {"num_ahead_tokens": 4}, {"num_ahead_tokens": 4, "num_branches": 2}]
GREEDY = SamplingSettings(temperature=0.0)
# In turns, and with branches.
both_modes = pytest.mark.parametrize("ahead", AHEAD[::2], ids=MODES[::2])
CASES = [(AHEAD[0], GREEDY), (AHEAD[0], PLAIN), (AHEAD[1], COUPLED), (AHEAD[2], COUPLED), (AHEAD[2], PLAIN)]
CASE_NAMES = ["none-greedy", "none-rejection", "ahead-gumbel", "branches-gumbel", "branches-rejection"]
# Preemption and shared prefixes happen; several waves of sequences.
SMALL: dict[str, Any] = {"max_num_seqs": 12, "num_pages": 36}
ENDING: dict[str, Any] = {"max_num_seqs": 12, "num_pages": 70, "eos": [5]}
REQUESTS = requests_for(PROMPTS, 16)


class Listening(Goodput):
    """Costs under which blocks of all lengths occur."""

    def __init__(self, settings: SamplingSettings) -> None:
        costs = CostModel(Curve([1, 401], [2000, 2400]), Curve([1, 101], [20, 60]))
        super().__init__(max_draft_tokens=4, costs=costs, is_coupled=not settings.is_random)
        self.rounds: list[RoundContext] = []

    def wants_more(self, rows: DraftSequences) -> np.ndarray:
        self.rounds.append(rows.round)
        return super().wants_more(rows)


class CountingBlocks(GammaTune):
    num_blocks = 0

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        self.num_blocks += len(blocks.num_drafted_R)
        return super().next_histories(blocks)


class ThreeGroups(SharedReplicas):
    num_groups = 3


class ThreeGroupsApart(ThreeGroups):
    replies_apart = True


class BreakingLinks(SharedReplicas):
    broken_share, unanswered_share = 0.2, 0.7


class BreakingLinksApart(BreakingLinks):
    replies_apart = True


class BreakingLinksOfTwoDrafts(BreakingLinks):
    num_drafts = 2


class BreakingLinksThatAreWaitedFor(BreakingLinksOfTwoDrafts):
    broken_share, unanswered_share = 0.05, 0.5
    decodes_alone = False


class LosesItsDraft(Harness):
    """After two rounds, for good."""

    def proposer(self) -> Proposer:
        return LostDraft(super().proposer(), num_rounds=2 + (self.ahead.num_tokens > 0))


class LostDraft:
    def __init__(self, draft: Proposer, num_rounds: int) -> None:
        self._draft: Proposer = draft
        self._num_rounds = num_rounds

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        self._num_rounds -= 1
        if self._num_rounds == -1:
            self._draft = NoDraft()
            raise DraftChanged("lost by the test", starts_over=False)
        return self._draft.propose(request, clock)

    def close(self) -> None:
        self._draft.close()


def tokens(replica: Harness) -> list[list[int]]:
    return [completion.token_ids for completion in replica.generate(REQUESTS)]


@pytest.mark.parametrize(("ahead", "settings"), CASES, ids=CASE_NAMES)
def test_tokens_do_not_depend_on_who_else_is_served(
    ahead: dict[str, int], settings: SamplingSettings
) -> None:
    policy = CountingBlocks(max_draft_tokens=6)
    expected = tokens(markov_replica(settings, policy=policy, **SMALL, **ahead))
    # All groups are served together; or each has its reply before the work ahead of all.
    for kind in (ThreeGroups, ThreeGroupsApart) if ahead.get("num_branches") else (ThreeGroups,):
        policy.num_blocks = 0
        replica = markov_replica(settings, kind=kind, policy=policy, **SMALL, **ahead)
        assert isinstance(replica, SharedReplicas)
        assert tokens(replica) == expected
        assert replica.server.bursts[3] > 10
        assert set(replica.server.replies) == {1} or kind is ThreeGroups
        assert not ahead or policy.num_blocks == replica.total.num_drafts
    # A draft that works ahead is given room before.
    assert ahead or replica.total.num_preemptions > 0


@pytest.mark.parametrize("kind", [SharedReplicas, BreakingLinks, BreakingLinksApart])
@both_modes
def test_a_draft_that_is_the_target_is_accepted_always(
    ahead: dict[str, int], kind: type[SharedReplicas]
) -> None:
    """Detects a group whose slots or pages another one writes to, and a draft that is back and lacks what it
    missed."""
    replica = markov_replica(PLAIN, kind=kind, pair=(TARGET, TARGET), **ENDING, **ahead)
    tokens(replica)
    assert isinstance(replica, SharedReplicas)
    stats = replica.total
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    assert stats.num_misses == 0


def test_a_group_that_is_late_keeps_the_scores_of_its_candidates() -> None:
    """A burst for others drops what they need no longer, and nothing of a group that is not served in it."""
    scores = StepScores(np.array([0, 0, 1, 1]), 8, 3, torch.device("cpu"))
    slots, positions = np.array([0, 1, 2, 3]), np.array([4, 4, 4, 4])
    first, second = torch.rand(4, 3), torch.rand(2, 3)
    scores.keep(slots, positions, first)
    scores.keep(slots[:2], positions[:2] + 1, second)
    nothing = np.zeros(0, np.int64)
    scores.forget_but((nothing, nothing), [0])
    assert scores.at(slots[2:], positions[2:]).equal(first[2:])
    with pytest.raises(KeyError):
        scores.at(slots[:1], positions[:1] + 1)
    scores.forget_but((slots[3:], positions[3:]), [1])
    assert scores.at(slots[3:], positions[3:]).equal(first[3:])
    scores.forget_but((nothing, nothing), [1])
    with pytest.raises(KeyError):
        scores.at(slots[3:], positions[3:])


@both_modes
def test_greedy_and_coupled_tokens_are_the_same_where_links_break(ahead: dict[str, int]) -> None:
    for settings in (GREEDY, COUPLED):
        expected = tokens(markov_replica(settings, **ENDING, **ahead))
        replica = markov_replica(settings, kind=BreakingLinksOfTwoDrafts, **ENDING, **ahead)
        assert tokens(replica) == expected
        assert isinstance(replica, SharedReplicas) and replica.lost and replica.returned


@both_modes
def test_sampled_tokens_are_the_same_where_a_group_waits_for_its_draft(ahead: dict[str, int]) -> None:
    """Under rejection, in a run whose seed fixes its tokens."""
    options: dict[str, Any] = {"policy": GammaTune(max_draft_tokens=6)} | ENDING | ahead
    expected = tokens(markov_replica(PLAIN, **options))
    replica = markov_replica(PLAIN, kind=BreakingLinksThatAreWaitedFor, **options)
    assert tokens(replica) == expected
    assert isinstance(replica, SharedReplicas) and replica.lost and replica.returned


def test_links_that_break_do_not_bias_the_output() -> None:
    """With goodput, whose blocks depend on all groups of a burst."""
    pair, policy = markov_pair(uses_features=True), Listening(PLAIN)
    replica = markov_replica(
        PLAIN, kind=BreakingLinks, pair=pair, policy=policy, max_num_seqs=150, eos=[5], **AHEAD[2]
    )
    found = p_values(replica, pair[0], eos=[5])
    assert min(found) > ALARM, found
    assert {round.num_targets for round in policy.rounds} == {1, 2}


@both_modes
def test_of_a_block_that_is_lost_nothing_is_kept_not_even_an_end(ahead: dict[str, int]) -> None:
    """All sequences lose their draft when it is to resolve their first blocks."""
    pair = markov_pair(difference=0.5)
    replica = markov_replica(
        PLAIN, kind=LosesItsDraft, pair=pair, num_draft_tokens=8, max_num_seqs=3000, num_pages=40_000,
        max_num_batched_tokens=40_000, eos=[5], **ahead,
    )  # fmt: skip
    found = p_values(replica, pair[0], eos=[5])
    assert min(found) > ALARM, found
    assert replica.stats_recorder.close_shard(0).num_accepted_tokens > 1000


def test_rounds_alone_are_told_to_a_shared_draft_too() -> None:
    shapes = [RoundShape(drafts_now=True), RoundShape(num_rounds_alone=2)]
    options: dict[str, Any] = {"num_ahead_tokens": 1, "shapes": shapes} | SMALL
    expected = tokens(markov_replica(COUPLED, **options))
    assert tokens(markov_replica(COUPLED, kind=SharedReplicas, **options)) == expected


@both_modes
def test_policies_are_told_whose_sequences_they_are(ahead: dict[str, int]) -> None:
    """Of goodput the blocks depend on the whole burst, and no greedy token does."""
    policy = Listening(GREEDY)
    expected = tokens(markov_replica(GREEDY, **SMALL, **ahead))
    options: dict[str, Any] = {"pair": markov_pair(uses_features=True), "policy": policy} | SMALL | ahead
    assert tokens(markov_replica(GREEDY, kind=ThreeGroups, **options)) == expected
    # The groups meet in every burst.
    bursts = {(round.num_targets, round.num_bursts) for round in policy.rounds}
    assert (3, 1.0) in bursts and {count for targets, count in bursts if targets == 3} == {1.0}
