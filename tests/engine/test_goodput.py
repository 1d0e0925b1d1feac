"""Policies that look at the whole batch: exact in every mode; and the selection bias that they must avoid."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from specdist.engine.draft.steps import draft_loop
from specdist.engine.draft.steps.draft_loop import DraftLoop
from specdist.engine.draft.steps.draft_runs import RunLengths
from specdist.engine.draft.steps.draft_steps import DraftBatch
from specdist.policies import (
    DraftFeatures,
    DraftSequences,
    Goodput,
    LengthPolicy,
    RoundContext,
    VerifiedTokens,
)
from specdist.policies.costs import CostModel, Curve
from specdist.policies.payoff import RoundShape
from specdist.sampling.distributions import SamplingSettings
from tests.engine import harness
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import markov_pair
from tests.engine.sampled import ALARM, FILTERED, PLAIN, markov_replica, p_values
from tests.engine.test_greedy import prompts_of_lengths
from tests.models.families import noisy_copy, tiny_model

CAP = 4
# Every kind of round follows every other. Who says that the target may go on alone is not believed while
# anything is drafted.
SHAPES = [
    RoundShape(drafts_now=True, num_rounds_alone=1),
    RoundShape(num_ahead=5, num_branches=2, num_rounds_alone=1),
    RoundShape(num_rounds_alone=2),
    RoundShape(num_ahead=1),
    RoundShape(num_rounds_alone=3),
    RoundShape(drafts_now=True, num_rounds_alone=1),
    RoundShape(num_ahead=3, num_branches=1, num_rounds_alone=1),
    RoundShape(drafts_now=True, num_rounds_alone=1),
    RoundShape(),
    RoundShape(num_rounds_alone=4),
]
BRANCHED: dict[str, Any] = {"num_ahead_tokens": 5, "num_branches": 2}
AHEAD: list[dict[str, Any]] = [{}, {**BRANCHED, "shapes": SHAPES}, BRANCHED]
MODES = ["synchronous", "chosen", "branches"]
GREEDY = SamplingSettings(temperature=0.0)
UNLIKELY = 0.35


def goodput(settings: SamplingSettings, *, per_token: int = 1, scale: int = 1) -> Goodput:
    """Costs under which blocks of all lengths occur, in batches of about 100 rows times ``scale``."""
    target = Curve([1, 1 + 400 * scale], [2000, 2000 + 400 * per_token])
    costs = CostModel(target, Curve([1, 1 + 100 * scale], [20, 60]))
    return Goodput(max_draft_tokens=CAP, costs=costs, is_coupled=not settings.is_random)


@dataclass
class Picky(LengthPolicy):
    """Drafts as much as it may, and leaves unlikely tokens, with all that follow them, out of the pass."""

    max_draft_tokens: int = CAP
    uses_features = True
    is_for_batch = True
    num_left_out: int = field(default=0, init=False)

    def wants(self, rows: DraftSequences) -> np.ndarray:
        return np.full(len(rows.slots_R), self.max_draft_tokens)

    def num_to_verify(
        self, features: DraftFeatures, lengths_R: np.ndarray, round: RoundContext
    ) -> np.ndarray:
        kept = []
        for part in np.split(features.probabilities, np.cumsum(lengths_R)[:-1]):
            unlikely = np.flatnonzero(part < UNLIKELY)
            kept.append(unlikely[0] if len(unlikely) else len(part))
            self.num_left_out += len(part) - kept[-1]
        return np.array(kept, np.int64)

    def observe_tokens(self, tokens: VerifiedTokens) -> None:
        assert len(tokens.depths_C) == len(tokens.is_accepted_C) == len(tokens.features.entropies)


@pytest.mark.parametrize("settings", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("ahead", AHEAD, ids=MODES)
def test_goodput_follows_the_target_s_distribution(ahead: dict[str, Any], settings: SamplingSettings) -> None:
    policy, pair = goodput(settings, scale=5), markov_pair()
    replica = markov_replica(settings, pair=pair, policy=policy, max_num_seqs=500, **ahead)
    found = p_values(replica, pair[0])
    assert min(found) > ALARM, found
    stats = replica.stats_recorder.close_shard(0)
    lengths = np.flatnonzero(stats.draft_length_histogram)
    assert len(lengths) > 1 and stats.num_accepted_tokens > 100


@pytest.mark.parametrize("ahead", AHEAD, ids=MODES)
def test_goodput_changes_no_greedy_or_coupled_token(ahead: dict[str, Any]) -> None:
    target = tiny_model("llama", seed=3)
    requests = requests_for(prompts_of_lengths(5, 23, 40, 2, 11, 17))
    for settings in (GREEDY, SamplingSettings(temperature=0.9, top_p=0.95, is_coupled=True)):
        common = {"settings": settings, "eos": [7], "max_new_tokens": 24}
        expected = [c.token_ids for c in Harness(target, None, **common).generate(requests)]
        for max_num_seqs, num_pages in ((1, 512), (5, 512), (8, 30)):
            replica = Harness(
                target,
                noisy_copy(target),
                num_draft_tokens=CAP,
                max_num_seqs=max_num_seqs,
                num_pages=num_pages,
                **common,
                **ahead,
            )
            replica.policy = goodput(settings)
            assert [c.token_ids for c in replica.generate(requests)] == expected


@pytest.mark.parametrize("ahead", AHEAD, ids=MODES)
@pytest.mark.parametrize("num_steps", [2, CAP])
def test_asked_after_several_steps_it_drafts_the_same_blocks(
    monkeypatch: pytest.MonkeyPatch, ahead: dict[str, Any], num_steps: int
) -> None:
    """Where a device is given several steps at a time: with the same plans, one after the other, of which a
    sequence that has ended is not one."""
    target = tiny_model("llama", seed=3)

    def generated() -> tuple[Any, ...]:
        options: dict[str, Any] = {"eos": [7, 9], "max_new_tokens": 60, "max_num_seqs": 5, **ahead}
        replica = Harness(target, noisy_copy(target), num_draft_tokens=CAP, **options)
        asked: list[Any] = []
        replica.policy = policy = goodput(replica.settings, per_token=50)
        plan = policy._sequences_that_pay

        def noted(
            round: RoundContext, draft_slots_A: np.ndarray, survival_A: np.ndarray, num_drafted: int
        ) -> np.ndarray:
            asked.append((num_drafted, draft_slots_A.tolist(), survival_A.tolist()))
            return plan(round, draft_slots_A, survival_A, num_drafted)

        monkeypatch.setattr(policy, "_sequences_that_pay", noted)
        found = [
            c.token_ids for c in replica.generate(requests_for(prompts_of_lengths(5, 23, 40, 2, 11, 17, 8)))
        ]
        stats = replica.stats_recorder.close_shard(0)
        return found, stats.draft_length_histogram, asked

    expected = generated()
    assert len({length for length, *_ in expected[2]}) == CAP
    monkeypatch.setattr(draft_loop, "waits_after_each_step", lambda *_: False)
    monkeypatch.setattr(RunLengths, "next", lambda *_: num_steps)
    assert generated() == expected


@pytest.mark.parametrize("ahead", AHEAD, ids=MODES)
def test_goodput_accepts_a_draft_that_is_the_target(ahead: dict[str, Any]) -> None:
    target = tiny_model("llama", seed=3)
    replica = Harness(target, target, settings=PLAIN, num_draft_tokens=CAP, max_new_tokens=40, **ahead)
    replica.policy = goodput(PLAIN, per_token=0)
    replica.generate(requests_for(prompts_of_lengths(5, 23, 40, 2)))
    stats = replica.stats_recorder.close_shard(0)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


def test_nothing_is_drafted_where_the_target_has_no_time_to_spare() -> None:
    target = tiny_model("llama", seed=3)
    replica = Harness(target, noisy_copy(target), num_draft_tokens=CAP, max_new_tokens=20)
    replica.policy = goodput(GREEDY, per_token=100_000)
    replica.generate(requests_for(prompts_of_lengths(5, 23, 40, 2)))
    stats = replica.stats_recorder.close_shard(0)
    # But together with a prompt, in a pass that takes long anyway.
    assert stats.num_draft_tokens < stats.num_completion_tokens / 10


def test_dropping_drawn_tokens_by_their_value_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias: leaving tokens out for their own probability makes the kept ones too likely."""
    extend = DraftLoop.extend

    def picky_extend(self: DraftLoop, draft_batch: DraftBatch) -> np.ndarray:
        lengths = extend(self, draft_batch)
        for line, (row, tail) in enumerate(zip(draft_batch.draft_slots_R, draft_batch.tails_R, strict=True)):
            unlikely = np.flatnonzero(
                self._draft_state.probabilities[row, tail : tail + lengths[line]] < UNLIKELY
            )
            lengths[line] = unlikely[0] if len(unlikely) else lengths[line]
        return lengths

    monkeypatch.setattr(draft_loop.DraftLoop, "extend", picky_extend)
    monkeypatch.setattr(harness, "check_lemma", lambda *_: None)
    assert min(p_values(markov_replica(num_draft_tokens=CAP), markov_pair()[0])) < 1e-8


@pytest.mark.parametrize("ahead", [{"num_ahead_tokens": 5}, BRANCHED], ids=["ahead", "branches"])
def test_leaving_tokens_out_changes_no_token_of_a_draft_ahead(ahead: dict[str, Any]) -> None:
    """The same choice where the draft works ahead: the token stays a candidate for a later pass."""
    target = tiny_model("llama", seed=3)
    requests = requests_for(prompts_of_lengths(5, 23, 40, 2), num_samples=2)
    found, policy = [], Picky()
    for is_picky in (False, True):
        replica = Harness(
            target,
            noisy_copy(target),
            settings=SamplingSettings(top_p=0.95),
            num_draft_tokens=CAP,
            max_new_tokens=30,
            **ahead,
        )
        if is_picky:
            replica.policy = policy
        found.append([c.token_ids for c in replica.generate(requests)])
    assert found[0] == found[1] and policy.num_left_out > 50
