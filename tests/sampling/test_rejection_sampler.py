"""The rejection sampler by itself: 10^6 draws of a Markov pair follow the target's distribution.

Target and draft are tables of next-token distributions, one row per last token, so that the distribution of
every emitted stretch is known. Nothing but the sampler and the random numbers takes part.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from specdist.sampling import distributions as rejection_sampler
from specdist.sampling.distributions import (
    Dense,
    acceptance_probabilities,
    accepted,
    count_accepted,
    sample_next_tokens,
    verify_candidates,
)
from specdist.sampling.random import Purpose, RandomKeys
from tests.statistics import chi_square_p_value

VOCAB_SIZE = 5
NUM_SEQUENCES = 250_000
# A block emits at least one token and at most K + 1: with K = 3 these four are decided by every step of it.
NUM_CANDIDATES, DEPTH = 3, 4
START = 2
# Seen: sound code 0.11 to 0.93 over five seeds, the weakest fault 1e-200.
SOUND, FAULTY = 1e-4, 1e-30


def tables() -> tuple[Tensor, Tensor]:
    """Target and draft [V, V], float32: two tokens that only one of the two can emit, and unequal others."""
    generator = torch.Generator().manual_seed(4)
    logits = 1.5 * torch.randn(2, VOCAB_SIZE, VOCAB_SIZE, generator=generator)
    logits[0, :, 0] = -torch.inf
    logits[1, :, 1] = -torch.inf
    target, draft = logits.softmax(dim=2)
    return target, draft


def emitted(seed: int) -> Tensor:
    """[10^6 tokens as NUM_SEQUENCES, DEPTH]: block after block, until each sequence has DEPTH tokens."""
    target_VV, draft_VV = tables()
    tokens = np.full((NUM_SEQUENCES, 1 + DEPTH + NUM_CANDIDATES + 1), START, np.int64)
    lengths = np.ones(NUM_SEQUENCES, np.int64)
    num_misses = np.zeros(NUM_SEQUENCES, np.int64)
    stream_keys = np.arange(NUM_SEQUENCES, dtype=np.int64) * 7_919 + seed
    while len(rows := np.flatnonzero(lengths <= DEPTH)):
        begin = lengths[rows]
        draft_probabilities = []
        for depth in range(NUM_CANDIDATES):
            keys = RandomKeys(stream_keys[rows], begin + depth, num_misses[rows])
            draft = Dense(draft_VV[tokens[rows, begin + depth - 1]])
            drawn = draft.draw(keys.uniforms(Purpose.DRAFT))
            tokens[rows, begin + depth] = drawn
            draft_probabilities.append(draft.probabilities_of(drawn))
        places = begin[:, None] + np.arange(NUM_CANDIDATES)
        candidates, before = tokens[rows[:, None], places], tokens[rows[:, None], places - 1]
        accepted_C = verify_candidates(
            target_VV[before, candidates].double().flatten(),
            torch.stack(draft_probabilities, dim=1).flatten(),
            RandomKeys(
                stream_keys[rows].repeat(NUM_CANDIDATES),
                places.flatten(),
                num_misses[rows].repeat(NUM_CANDIDATES),
            ),
        )
        count = count_accepted(accepted_C.numpy(), np.full(len(rows), NUM_CANDIDATES))
        ends = begin + count
        is_rejected = count < NUM_CANDIDATES
        last = tokens[rows, ends - 1]
        draft_WV = draft_VV[last] * torch.from_numpy(is_rejected)[:, None]
        keys = RandomKeys(stream_keys[rows], ends, num_misses[rows])
        tokens[rows, ends] = sample_next_tokens(Dense(target_VV[last]), keys, Dense(draft_WV))
        lengths[rows] = ends + 1
        num_misses[rows] += is_rejected
    return torch.from_numpy(tokens[:, 1 : 1 + DEPTH])


def p_value(seed: int = 0) -> float:
    """Of the emitted stretches of DEPTH tokens, each a cell."""
    target_VV = tables()[0].double()
    probabilities = target_VV[START]
    for _ in range(DEPTH - 1):
        last = torch.arange(len(probabilities)) % VOCAB_SIZE
        probabilities = (probabilities[:, None] * target_VV[last]).flatten()
    place = VOCAB_SIZE ** torch.arange(DEPTH - 1, -1, -1)
    counts = torch.bincount((emitted(seed) * place).sum(dim=1), minlength=len(probabilities))
    possible = probabilities > 0
    assert int(counts[~possible].sum()) == 0, "a stretch without probability was emitted"
    return chi_square_p_value(counts[possible], probabilities[possible])


def test_a_million_tokens_follow_the_target() -> None:
    assert p_value() > SOUND


def recovered_from_the_target(target_W: Dense, draft_W: Dense) -> Dense:
    return target_W


def recovered_by_the_next_sequence(target_W: Dense, draft_W: Dense) -> Dense:
    return RIGHT_RECOVERED(target_W, Dense(draft_W.probabilities_NV.roll(1, 0)))


def drawn_again_with_the_number_of_acceptance(keys: RandomKeys, asked: Purpose) -> Tensor:
    return RIGHT_UNIFORMS(keys, Purpose.ACCEPT if asked is Purpose.NEXT_TOKEN else asked)


def probability_of_q_forgotten(target_C: Tensor, draft_C: Tensor, uniforms_C: Tensor) -> Tensor:
    return uniforms_C < target_C


RIGHT_RECOVERED, RIGHT_UNIFORMS = rejection_sampler.recovered_distributions, RandomKeys.uniforms


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (rejection_sampler, "recovered_distributions", recovered_from_the_target),
        (rejection_sampler, "recovered_distributions", recovered_by_the_next_sequence),
        (rejection_sampler, "accepted", probability_of_q_forgotten),
        (RandomKeys, "uniforms", drawn_again_with_the_number_of_acceptance),
    ],
    ids=[
        "the recovered token from the target",
        "the draft's row of another sequence",
        "acceptance with P alone",
        "the recovered token with the number that rejected its candidate",
    ],
)
def test_a_planted_fault_is_seen(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, fault: Callable[..., object]
) -> None:
    monkeypatch.setattr(owner, name, fault)
    try:
        assert p_value() < FAULTY
    except AssertionError as error:
        assert "without probability" in str(error), error


def test_a_token_that_the_target_never_emits_is_never_accepted() -> None:
    """Not even with the smallest number, 0."""
    zero = torch.zeros(1, dtype=torch.float64)
    assert not bool(accepted(zero, torch.ones(1, dtype=torch.float64), zero))


def test_equal_distributions_accept_everything_and_nan_nothing() -> None:
    largest = torch.tensor([1 - 2.0**-52], dtype=torch.float64)
    half = torch.tensor([0.5], dtype=torch.float64)
    assert bool(accepted(half, half, largest))
    assert not bool(accepted(half * torch.nan, half, torch.zeros(1, dtype=torch.float64)))


def test_probability_of_acceptance() -> None:
    target = torch.tensor([0.2, 0.6, 0.0, 0.0], dtype=torch.float64)
    draft = torch.tensor([0.4, 0.3, 0.5, 0.0], dtype=torch.float64)
    assert acceptance_probabilities(target, draft).tolist() == [0.5, 1.0, 0.0, 0.0]
