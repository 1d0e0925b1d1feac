"""What the engine emits follows the target's own law: a seeded chi-square over whole completions.

The vocabulary is so small that the law of every completion is known. Completions are thrown into buckets by a
fixed random function of all their tokens, so that a fault at any depth, or a dependence between positions,
moves mass between buckets.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specdist.engine import blocks
from specdist.sampling import distributions
from specdist.sampling.distributions import Dense, SamplingSettings, distributions_from_logits
from specdist.sampling.random import Purpose, uniforms
from tests.engine.harness import Replica, requests_for
from tests.engine.test_greedy import MODES
from tests.models.families import noisy_copy, tiny_model
from tests.statistics import chi_square_p_value

VOCAB_SIZE = 5
DEPTH = 6
NUM_BUCKETS = 48
NUM_SAMPLES = 2000
PROMPTS = [[1, 2, 3, 1], [4], [0, 4, 4, 2, 2, 1, 3, 0, 1]]
# About forty p-values are looked at below with fixed seeds: a sound engine stays above this in all of them
# (odds of a false alarm 1 in 250), and a wrong residual is below 1e-20.
ALARM = 1e-4

LARGE_BATCH = {
    "max_new_tokens": DEPTH,
    "max_batch_rows": 200,
    "max_batch_tokens": 2000,
    "max_seq_len": 24,
    "num_pages": 1600,
}

FILTERED = SamplingSettings(temperature=0.8, top_k=4, top_p=0.9)
PLAIN = SamplingSettings()


def small_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
    target = tiny_model("llama", seed=1, **shape)
    return target, noisy_copy(target, scale=0.1)


def completion_law(model: PreTrainedModel, prompt: list[int], settings: SamplingSettings) -> torch.Tensor:
    """Probability of each of the V^DEPTH completions, the last token running fastest."""
    law = torch.ones(1, dtype=torch.float64)
    for depth in range(DEPTH):
        tails = torch.tensor(list(product(range(VOCAB_SIZE), repeat=depth)), dtype=torch.int64)
        prefixes = torch.cat([torch.tensor(prompt).expand(len(tails), -1), tails], dim=1)
        with torch.inference_mode():
            logits = torch.cat([model(part).logits[:, -1] for part in prefixes.split(4096)])
        step = distributions_from_logits(logits, settings)
        assert isinstance(step, Dense)
        law = (law[:, None] * step.probabilities_NV.double()).flatten()
    return law


def bucket_p_values(
    replica: Replica,
    model: PreTrainedModel,
    num_samples: int = NUM_SAMPLES,
    law_of: Callable[[list[int]], torch.Tensor] | None = None,
) -> list[float]:
    """``law_of`` a prompt: by default the model's own of its completions."""
    buckets = torch.randint(NUM_BUCKETS, (VOCAB_SIZE**DEPTH,), generator=torch.Generator().manual_seed(9))
    completions = replica.generate(requests_for(PROMPTS, num_samples))
    place = VOCAB_SIZE ** torch.arange(DEPTH - 1, -1, -1)
    p_values = []
    for row, prompt in enumerate(PROMPTS):
        found = torch.tensor([c.token_ids for c in completions if c.request.row_id == row])
        assert found.shape == (num_samples, DEPTH)
        law = completion_law(model, prompt, replica.settings) if law_of is None else law_of(prompt)
        counts = torch.bincount(buckets[(found * place).sum(1)], minlength=NUM_BUCKETS)
        expected = torch.zeros(NUM_BUCKETS, dtype=torch.float64).index_add_(0, buckets, law)
        p_values.append(chi_square_p_value(counts, expected))
    return p_values


def small_replica(
    num_draft_tokens: int, settings: SamplingSettings, *, with_draft: bool = True, **options: Any
) -> Replica:
    target, draft = small_pair()
    return Replica(
        target,
        draft if with_draft else None,
        num_draft_tokens=num_draft_tokens,
        **options,
        settings=settings,
        seed=num_draft_tokens,
        **LARGE_BATCH,
    )


@pytest.mark.parametrize("settings", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5, 8])
def test_speculative_output_follows_the_target_law(num_draft_tokens: int, settings: SamplingSettings) -> None:
    replica = small_replica(num_draft_tokens, settings)
    p_values = bucket_p_values(replica, small_pair()[0])
    assert min(p_values) > ALARM, p_values
    stats = replica.ledger.close_shard(0)
    # Both branches of the rule must have been taken often, or nothing was tested.
    assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9


@pytest.mark.parametrize("settings", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize(("num_ahead_tokens", "num_branches"), [(1, 0), (2, 0), (4, 0), (2, 1), (4, 3)])
def test_output_of_draft_ahead_follows_the_target_law(
    num_ahead_tokens: int, num_branches: int, settings: SamplingSettings
) -> None:
    replica = small_replica(3, settings, num_ahead_tokens=num_ahead_tokens, num_branches=num_branches)
    p_values = bucket_p_values(replica, small_pair()[0])
    assert min(p_values) > ALARM, p_values
    stats = replica.ledger.close_shard(0)
    assert 0.1 < stats.num_ahead_hits / stats.num_ahead_judged < 0.9
    assert stats.num_drafts == 0 if num_ahead_tokens == 1 else stats.num_accepted_tokens > 100
    caught = sum(stats.num_branch_hits_per_rank) / stats.num_misses
    assert 0.1 < caught < 0.9 if num_branches else caught == 0


def test_target_only_output_follows_the_target_law() -> None:
    assert min(bucket_p_values(small_replica(1, FILTERED, with_draft=False), small_pair()[0])) > ALARM


def no_residual(self: Dense, draft: Dense) -> Dense:
    return self


def residual_of_the_wrong_row(self: Dense, draft: Dense) -> Dense:
    return RIGHT_RESIDUAL(self, Dense(draft.probabilities_NV.roll(1, 0)))


def one_number_for_two_purposes(keys: torch.Tensor, positions: torch.Tensor, attempts: torch.Tensor,
                                purpose: Purpose) -> torch.Tensor:  # fmt: skip
    return uniforms(keys, positions, attempts, Purpose.DRAFT)


RIGHT_RESIDUAL = Dense.residual


@pytest.mark.parametrize(
    "ahead", [{}, {"num_ahead_tokens": 4}, {"num_ahead_tokens": 4, "num_branches": 2}], ids=MODES
)
@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (distributions.Dense, "residual", no_residual),
        (distributions.Dense, "residual", residual_of_the_wrong_row),
        (blocks, "uniforms", one_number_for_two_purposes),
    ],
    ids=["no residual", "another row's residual", "one random number for draft and acceptance"],
)
def test_the_chi_square_sees_silent_faults(
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    fault: Callable[..., object],
    ahead: dict[str, int],
) -> None:
    """Guards the guard: each of these has biased a real engine without an error."""
    monkeypatch.setattr(owner, name, fault)
    replica = small_replica(3, PLAIN, **ahead)
    assert min(bucket_p_values(replica, small_pair()[0])) < 1e-8
