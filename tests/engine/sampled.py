"""How far an engine's completions on a Markov pair are from the distribution that they must have.

Two views of the same completions. *Transitions*: given what stands before it, every token must follow the
model's own distribution there; this has most power against a bias of single draws. *Buckets*: completions are
thrown into buckets by a random sum over all their tokens; this sees dependence between positions too, which
leaves every single draw's distribution alone.

V vocabulary, B buckets, L tokens of a prompt and its completion, n completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specdist.sampling.distributions import Dense, SamplingSettings, distributions_from_logits
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import MarkovModel, markov_pair, weights
from tests.statistics import chi_square_p_value, chi_square_p_value_of_rows

# Prompts of several lengths; two of them share a page.
PROMPTS = [[1, 2, 3, 1, 6, 0], [4], [1, 2, 3, 1, 4, 4, 2, 2, 1, 3, 0, 1]]
NUM_TOKENS = 20
NUM_SAMPLES = 400
NUM_BUCKETS = 47
END = -1
# The tests look at about 400 p-values with fixed seeds: odds of a false alarm 1 in 250.
ALARM = 1e-5

PLAIN = SamplingSettings()
FILTERED = SamplingSettings(temperature=0.8, top_k=5, top_p=0.9)
TOP_K = SamplingSettings(temperature=1.2, top_k=4)
COUPLED = SamplingSettings(is_coupled=True)
COUPLED_FILTERED = SamplingSettings(temperature=0.8, top_k=5, top_p=0.9, is_coupled=True)
# In turns, ahead, and with branches: ``tests.engine.test_greedy.MODES``.
AHEAD: list[dict[str, Any]] = [{}, {"num_ahead_tokens": 4}, {"num_ahead_tokens": 4, "num_branches": 2}]


def markov_replica(
    settings: SamplingSettings = PLAIN,
    *,
    pair: tuple[MarkovModel, MarkovModel | None] | None = None,
    num_draft_tokens: int = 3,
    kind: type[Harness] = Harness,
    **options: Any,
) -> Harness:
    """A large batch on the Markov pair."""
    target, draft = pair or markov_pair()
    defaults: dict[str, Any] = {
        "max_new_tokens": NUM_TOKENS,
        "max_num_seqs": 1000,
        "max_num_batched_tokens": 12_000,
        "max_seq_len": 48,
        "num_pages": 16_000,
    }
    options = defaults | options
    return kind(target, draft, settings=settings, num_draft_tokens=num_draft_tokens, **options)


def probabilities_VVV(model: MarkovModel, settings: SamplingSettings) -> np.ndarray:
    """float64: probabilities of the next token, by last token and checksum."""
    dense = SamplingSettings(
        temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, is_coupled=False
    )
    found = distributions_from_logits(model.logits_VVV.flatten(0, 1), dense)
    assert isinstance(found, Dense)
    return found.probabilities_NV.double().view(model.logits_VVV.shape).numpy()


def p_values(
    replica: Harness, model: MarkovModel, num_samples: int = NUM_SAMPLES, *, eos: Sequence[int] = ()
) -> list[float]:
    """Of the transitions, and of each prompt's buckets, with the model as the one to follow."""
    completions = replica.generate(requests_for(PROMPTS, num_samples))
    assert len(completions) == num_samples * len(PROMPTS)
    assert all(completion.error is None for completion in completions)
    probabilities = probabilities_VVV(model, replica.settings)
    vocab_size = len(probabilities)
    counts = np.zeros((vocab_size, vocab_size, vocab_size), np.int64)
    of_buckets = []
    for row, prompt in enumerate(PROMPTS):
        mine = [list(c.token_ids) for c in completions if c.request.row_id == row]
        tokens_nL = np.full((len(mine), len(prompt) + NUM_TOKENS), END)
        for line, token_ids in enumerate(mine):
            assert len(token_ids) == NUM_TOKENS or (token_ids and token_ids[-1] in eos)
            tokens_nL[line, : len(prompt) + len(token_ids)] = prompt + token_ids
        _count_transitions(tokens_nL, len(prompt), counts)
        hashes = np.random.default_rng(9).integers(NUM_BUCKETS, size=(NUM_TOKENS, vocab_size))
        emitted = tokens_nL[:, len(prompt) :]
        values = np.where(emitted == END, 0, hashes[np.arange(NUM_TOKENS), np.maximum(emitted, 0)])
        found = np.bincount(values.sum(axis=1) % NUM_BUCKETS, minlength=NUM_BUCKETS)
        expected = _bucket_distribution(probabilities, prompt, hashes, eos)
        of_buckets.append(chi_square_p_value(torch.from_numpy(found), torch.from_numpy(expected)))
    flat = (vocab_size**2, vocab_size)
    transitions = chi_square_p_value_of_rows(
        torch.from_numpy(counts).view(flat), torch.from_numpy(probabilities).view(flat)
    )
    return [transitions, *of_buckets]


def _count_transitions(tokens_nL: np.ndarray, num_prompt_tokens: int, counts: np.ndarray) -> None:
    vocab_size = len(counts)
    positions = np.arange(tokens_nL.shape[1])
    sums_nL = np.cumsum(tokens_nL * weights(positions, vocab_size), axis=1)
    for position in range(num_prompt_tokens, tokens_nL.shape[1]):
        here = tokens_nL[:, position] != END
        checksums = sums_nL[here, position - 2] % vocab_size if position > 1 else np.zeros(here.sum(), int)
        np.add.at(counts, (tokens_nL[here, position - 1], checksums, tokens_nL[here, position]), 1)


def _bucket_distribution(
    probabilities: np.ndarray, prompt: list[int], hashes: np.ndarray, eos: Sequence[int]
) -> np.ndarray:
    """By dynamic programming over the last token, the checksum and the bucket."""
    vocab_size = len(probabilities)
    prompt_array = np.array(prompt)
    checksum = int(prompt_array[:-1] @ weights(np.arange(len(prompt) - 1), vocab_size)) % vocab_size
    masses = np.zeros((vocab_size, vocab_size, NUM_BUCKETS))
    masses[prompt[-1], checksum, 0] = 1
    ended = np.zeros(NUM_BUCKETS)
    last, sums, token = np.indices((vocab_size, vocab_size, vocab_size))
    buckets = np.arange(NUM_BUCKETS)
    for depth in range(len(hashes)):
        weight = int(weights(np.array(len(prompt) + depth - 1), vocab_size))
        moved = masses[:, :, None, :] * probabilities[..., None]
        masses = np.zeros_like(masses)
        to_bucket = (buckets + hashes[depth][token][..., None]) % NUM_BUCKETS
        to_sum = (sums + weight * last) % vocab_size
        np.add.at(masses, (token[..., None], to_sum[..., None], to_bucket), moved)
        for token_id in eos:
            ended += masses[token_id].sum(axis=0)
            masses[token_id] = 0
    return ended + masses.sum(axis=(0, 1))
