"""A policy is asked after every drafted token, with the features of that token."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from specdist.engine.draft.steps.draft_runs import LONGEST_RUN, RunLengths
from specdist.engine.draft.steps.draft_steps import taking_part
from specdist.policies import DraftSequences, LengthPolicy
from specdist.sampling.distributions import Dense, SamplingSettings, distributions_from_logits
from tests.engine.harness import Harness, requests_for
from tests.engine.test_greedy import prompts_of_lengths
from tests.models.families import noisy_copy, tiny_model

NUM_DRAFT_TOKENS = 4


@dataclass
class Spy(LengthPolicy):
    """Stops after a token of low probability, and records its arguments."""

    threshold: float = 0.0
    max_draft_tokens: int = NUM_DRAFT_TOKENS
    uses_features: bool = True
    asked: list[DraftSequences] = field(default_factory=list)

    def wants(self, rows: DraftSequences) -> np.ndarray:
        self.asked.append(rows)
        if rows.features is None:
            return np.full(len(rows.slots_R), self.max_draft_tokens)
        return rows.up_to_first(rows.features.probabilities >= self.threshold, self.max_draft_tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_features_are_those_of_the_distribution_each_token_was_drawn_from(temperature: float) -> None:
    target = tiny_model("llama", seed=3)
    settings = SamplingSettings(temperature=temperature)
    replica = Harness(target, target, settings=settings, num_draft_tokens=NUM_DRAFT_TOKENS, max_new_tokens=12)
    replica.policy = spy = Spy()
    [prompt] = prompts_of_lengths(9)
    [completion] = replica.generate(requests_for([prompt]))
    told = [rows.features for rows in spy.asked if rows.features is not None]
    # A draft that is the target drafts the completion itself, except one bonus token per block.
    with torch.inference_mode():
        logits = target(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
    distribution = distributions_from_logits(logits, SamplingSettings(temperature=temperature or 1.0))
    assert isinstance(distribution, Dense)
    expected = [
        (
            float(torch.special.entr(row.double()).sum()),
            float(row[token]),
            float(row.max()),
        )
        for index, (row, token) in enumerate(
            zip(distribution.probabilities_NV, completion.token_ids, strict=True)
        )
        # After the last token of a full block there is nothing to ask.
        if 0 < index % (NUM_DRAFT_TOKENS + 1) < NUM_DRAFT_TOKENS
    ]
    found = [
        [float(each[0, 0]) for each in (f.entropies, f.probabilities, f.top_probabilities)] for f in told
    ]
    # The last token of a completion cannot be a candidate.
    np.testing.assert_allclose(found, expected[: 2 * (NUM_DRAFT_TOKENS - 1)], atol=1e-5)


@pytest.mark.parametrize("num_branches", [0, 2])
def test_every_row_and_every_branch_stops_where_its_policy_says(num_branches: int) -> None:
    target = tiny_model("llama", seed=3)
    lengths = []
    for threshold in (0.0, 2.0):
        replica = Harness(
            target,
            noisy_copy(target),
            num_draft_tokens=NUM_DRAFT_TOKENS,
            num_ahead_tokens=NUM_DRAFT_TOKENS + 1,
            num_branches=num_branches,
        )
        replica.policy = spy = Spy(threshold)
        replica.generate(requests_for(prompts_of_lengths(5, 23, 12)))
        stats = replica.stats_recorder.close_shard(0)
        lengths.append(np.flatnonzero(stats.draft_length_histogram).max())
        chains = np.concatenate([rows.draft_slots_R for rows in spy.asked])
        slots = np.concatenate([rows.slots_R for rows in spy.asked])
        assert ((chains != slots).any()) == (num_branches > 0)
        assert set(slots.tolist()) == {0, 1, 2}
    assert lengths == [NUM_DRAFT_TOKENS, 1]


@pytest.mark.parametrize("steps", [[1], [20], [0, 0, 3], [1, 1, 1, 20], [4, 5, 6, 7], list(range(1, 21))])
def test_a_block_takes_two_runs_of_steps_on_average_whatever_its_length(steps: list[int]) -> None:
    """And one more for every eight steps; at most half as many steps are run for nothing as are needed."""
    lengths = RunLengths(20)
    num_runs = num_needed = num_run = num_blocks = 0
    for num_steps in np.random.default_rng(0).permutation(steps * 100):
        at = 0
        while at < num_steps:
            at += min(lengths.next(at), 20 - at)
            num_runs += 1
        lengths.observe(num_steps)
        num_blocks, num_needed, num_run = num_blocks + 1, num_needed + num_steps, num_run + at
    assert num_runs <= 2 * num_blocks + num_needed / LONGEST_RUN
    assert num_run <= 1.5 * num_needed + num_blocks
    # Blocks of one token are drafted by single steps.
    assert steps != [1] or num_run <= 1.02 * num_needed
    assert lengths.expects_any == (steps != [0, 0, 3])


def test_where_blocks_end_at_one_length_its_last_steps_are_no_longer_run() -> None:
    lengths = RunLengths(20)
    for _ in range(50):
        lengths.observe(LONGEST_RUN + 2)
    assert [lengths.next(0), lengths.next(LONGEST_RUN)] == [LONGEST_RUN, 2]
    assert lengths.next(LONGEST_RUN + 2) >= 1


def test_sequences_that_take_part_in_a_step_are_counted_among_those_of_the_first() -> None:
    actives = [np.array(each) for each in ([1, 3, 4, 7], [1, 3, 7], [7])]
    assert taking_part(actives).tolist() == [[True] * 4, [True, True, False, True], [False] * 3 + [True]]
