"""A policy that reads a trained head: exact in every mode, asked in time, and no pass is run twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from specdist.engine.times.reports import PassCounts
from specdist.models.heads.info import HiddenState
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.hidden import HiddenStateHead
from specdist.policies import DraftSequences, LengthPolicy
from specdist.policies.lengths.thresholds import SpecDecPlusPlus, Sprinter
from specdist.sampling.distributions import Dense, SamplingSettings, distributions_from_logits
from tests.engine.harness import Harness, requests_for
from tests.engine.heads import constant_head, random_head
from tests.engine.markov import markov_pair
from tests.engine.sampled import ALARM, FILTERED, PLAIN, markov_replica, p_values
from tests.engine.test_greedy import prompts_of_lengths
from tests.engine.test_identity import GREEDY, SAMPLED, check_preempted
from tests.engine.test_policies import PROMPTS, num_lengths
from tests.models.families import noisy_copy, tiny_model
from tests.models.tape import TapeCapturer

CAP = 6
AHEAD: list[dict[str, int]] = [{}, {"num_ahead_tokens": CAP + 1, "num_branches": 2}]


def policy_of(name: str) -> LengthPolicy:
    """A new policy: it accumulates estimates over a block."""
    if name == "specdecpp":
        return SpecDecPlusPlus(max_draft_tokens=CAP, stop_threshold=0.7)
    return Sprinter(max_draft_tokens=CAP, verifier_threshold=0.5)


@pytest.mark.parametrize(
    ("name", "ahead", "settings"),
    [("sprinter", AHEAD[0], PLAIN), ("specdecpp", AHEAD[0], FILTERED), ("specdecpp", AHEAD[1], PLAIN)],
    ids=["sprinter", "specdecpp, filtered", "specdecpp, branches"],
)
def test_the_output_follows_the_target_s_distribution(
    name: str, ahead: dict[str, int], settings: SamplingSettings
) -> None:
    pair = markov_pair(head_offset=1.0, uses_features=settings is FILTERED)
    replica = markov_replica(settings, pair=pair, policy=policy_of(name), **ahead)
    found = p_values(replica, pair[0])
    assert min(found) > ALARM, found
    stats = replica.stats_recorder.close_shard(0)
    assert num_lengths(stats) > 2 and 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95


@pytest.mark.parametrize(
    ("name", "ahead", "trusts_draft"),
    [("specdecpp", AHEAD[0], False), ("sprinter", AHEAD[0], True), ("specdecpp", AHEAD[1], False)],
)
def test_a_row_is_the_same_in_any_batch_and_after_a_preemption(
    name: str, ahead: dict[str, int], trusts_draft: bool
) -> None:
    """Also where the draft is trusted: what ends a block depends on that row alone."""
    pair, requests = markov_pair(head_offset=1.0, uses_features=name == "specdecpp"), requests_for(PROMPTS)
    common: dict[str, Any] = {"settings": SAMPLED, "max_new_tokens": 40, "max_seq_len": 52, **ahead}
    together = Harness(*pair, policy=policy_of(name), trusts_draft=trusts_draft, **common).generate(requests)
    common |= {"policy": policy_of(name), "trusts_draft": trusts_draft}
    stats = check_preempted(*pair, requests, together, 22, **common)
    assert num_lengths(stats) > 1


@dataclass
class Spy(LengthPolicy):
    """Never stops, and records the estimates that it is given."""

    max_draft_tokens: int = 5
    uses_features: bool = False
    asked: list[DraftSequences] = field(default_factory=list)
    needs_last_estimate: bool = True
    reads_head = True

    def wants(self, rows: DraftSequences) -> np.ndarray:
        self.asked.append(rows)
        return np.full(len(rows.slots_R), self.max_draft_tokens)


@pytest.mark.parametrize(
    ("kind_of_pass", "uses_features", "needs_last_estimate"),
    [
        ("ragged", False, True),
        ("ragged", False, False),
        ("static", True, False),
        ("replayed", False, True),
        ("replayed", True, False),
    ],
)
def test_the_policy_gets_the_head_s_estimate_of_the_drawn_token(
    kind_of_pass: str, uses_features: bool, needs_last_estimate: bool
) -> None:
    """The hidden state is that of the pass over the token, and the features are those of its draw, in a
    recorded pass as well. A policy that takes no features may have a head that does. If the next token is
    drawn first, the estimate is of the token before it."""
    target = tiny_model("llama", seed=3)
    head = random_head(target, uses_features=not uses_features)
    acceleration = Acceleration(
        is_static=kind_of_pass != "ragged", capturer=TapeCapturer() if kind_of_pass == "replayed" else None
    )
    spy = Spy(uses_features=uses_features, needs_last_estimate=needs_last_estimate)
    replica = Harness(target, target, policy=spy, head=head, max_new_tokens=15, acceleration=acceleration)
    [prompt] = prompts_of_lengths(9)
    [completion] = replica.generate(requests_for([prompt]))
    with torch.inference_mode():
        expected = estimates_from_scratch(head, target, prompt + completion.token_ids)[len(prompt) :]
    estimates = [
        (rows.num_drafted, rows.features and rows.features.estimates) if needs_last_estimate
        else (rows.num_drafted - 1, rows.earlier_estimates_DR)
        for rows in spy.asked
        if rows.num_drafted > (not needs_last_estimate)
    ]  # fmt: skip
    assert [number for number, _ in estimates[:3]] == [1, 2, 3]
    for number, estimates_DR in estimates[:3]:
        # The first token of the row comes from the prompt's pass.
        np.testing.assert_allclose(estimates_DR, [[float(expected[number])]], atol=1e-5)
    entropies = [rows.features.entropies for rows in spy.asked if rows.features is not None]
    assert np.isnan(entropies).all() == (not uses_features)
    assert len(entropies) > 0 or not (needs_last_estimate or uses_features)


@pytest.mark.parametrize("kind_of_pass", ["ragged", "replayed"])
def test_an_estimate_from_the_drawing_state_comes_with_the_draw(kind_of_pass: str) -> None:
    """To the policy, before a pass is run over the token."""
    target = tiny_model("llama", seed=3)
    head = random_head(target, uses_features=True, hidden_state="drawing")
    acceleration = Acceleration(
        is_static=kind_of_pass != "ragged", capturer=TapeCapturer() if kind_of_pass == "replayed" else None
    )
    spy = Spy()
    replica = Harness(target, noisy_copy(target, scale=0.004), policy=spy, head=head, max_new_tokens=15,
                      acceleration=acceleration, is_traced=True, settings=SAMPLED)  # fmt: skip
    [prompt] = prompts_of_lengths(9)
    [completion] = replica.generate(requests_for([prompt]))
    stats = replica.stats_recorder.close_shard(0)
    assert stats.num_empty_draft_steps == 0
    draft = noisy_copy(target, scale=0.004)
    told = [rows.features.estimates for rows in spy.asked if rows.features is not None]
    # Of the first block, but for the token at the cap.
    first = [token for token in completion.trace if token.round == completion.trace[0].round]
    drafted = prompt + completion.token_ids[: first[0].position] + [token.token_id for token in first]
    expected = estimates_from_scratch(head, draft, drafted, SAMPLED)[-len(first) :].tolist()
    assert [float(each[0, 0]) for each in told[: len(first) - 1] if each is not None] == pytest.approx(
        expected[:-1], abs=1e-5
    )
    assert len(first) > 3


@pytest.mark.parametrize(
    ("name", "hidden_state", "logit", "num_steps", "num_drawn"),
    [("specdecpp", "own", -20.0, 2, 2), ("sprinter", "own", -20.0, 2, 1),
     ("sprinter", "drawing", -20.0, 1, 1), ("specdecpp", "own", 20.0, CAP, CAP),
     ("sprinter", "own", 20.0, CAP, CAP)],
)  # fmt: skip
def test_every_draft_pass_is_counted_and_none_is_run_twice(
    name: str,
    hidden_state: HiddenState,
    logit: float,
    num_steps: int,
    num_drawn: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both run a token to doubt its own state. SpecDec++ draws the next one then, and keeps it; SPRINTER need
    not run it where it reads the state that the token was drawn from."""
    sizes, count = Counter[int](), PassCounts.count

    def counted(own: PassCounts, num_tokens: int, num_row_steps: int) -> None:
        sizes[num_tokens] += num_tokens > 0
        count(own, num_tokens, num_row_steps)

    monkeypatch.setattr(PassCounts, "count", counted)
    target = tiny_model("llama", seed=3)
    num_blocks = 3
    replica = Harness(target, target, policy=policy_of(name), head=constant_head(target, logit, hidden_state),
                      max_new_tokens=2 + num_blocks * (num_drawn + 1))  # fmt: skip
    replica.generate(requests_for(prompts_of_lengths(9)))
    stats = replica.stats_recorder.close_shard(0)
    assert stats.draft_length_histogram[num_drawn] == stats.num_drafts == num_blocks
    assert stats.num_draft_passes == stats.num_draft_row_steps == num_steps * num_blocks
    assert stats.num_empty_draft_steps == stats.num_discarded == (num_steps - num_drawn) * num_blocks
    # Nothing that the cap or the draw ends has run its last token: the next block catches up.
    expected = {1: (num_steps - 1) * num_blocks + 1, 2: num_blocks - 1}
    if num_drawn < num_steps:
        expected = {1: num_steps * num_blocks}
    assert sizes == expected


def estimates_from_scratch(
    head: HiddenStateHead, draft: PreTrainedModel, token_ids: list[int], settings: SamplingSettings = GREEDY
) -> torch.Tensor:
    """[N - 1] of all tokens but the first: one plain pass; each token's features are those of the softmax in
    front of it, as temperature and filters have shaped it."""
    with torch.inference_mode():
        output = draft(torch.tensor([token_ids]), output_hidden_states=True)
    undecided = SamplingSettings() if settings.is_greedy else settings
    distribution = distributions_from_logits(output.logits[0, :-1], undecided)
    assert isinstance(distribution, Dense)
    distribution_NV = distribution.probabilities_NV
    drawn_N = distribution_NV[torch.arange(len(distribution_NV)), token_ids[1:]]
    features_3N = torch.stack([torch.special.entr(distribution_NV).sum(1), drawn_N, distribution_NV.amax(1)])
    read = slice(0, -1) if head.reads_drawing_state else slice(1, None)
    estimates = head(output.hidden_states[-1][0, read], features_3N).sigmoid()
    return torch.cat([torch.full((1,), torch.nan), estimates])
