"""What a lossy run must emit: the distribution of whole completions, from both models and the verifier.

Per prefix and token x: drafting goes on after x if the verifier does not doubt it and the block has room;
x is then emitted with the draft's own probability Q(x). Else x ends the block and is verified: it is emitted
with min(P, Q)(x), and what is lost of it goes to the residual max(0, P - Q), normalised.

U prefixes of one length, V vocabulary.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from specdist.engine.request import Completion
from specdist.sampling.distributions import Dense, SamplingSettings, distributions_from_logits
from tests.engine.markov import MarkovModel
from tests.statistics import chi_square_p_value

NUM_BUCKETS = 48

# What comes next: a token from the target alone; one that was drafted in place of the next token and is
# verified; and, from here on, a candidate of the block with so many before it.
BONUS, VERIFIED_AHEAD, CANDIDATE = "bonus", "ahead", 0
State = str | int


def sprinter_distribution(
    models: tuple[MarkovModel, MarkovModel],
    prompt: list[int],
    settings: SamplingSettings,
    *,
    depth: int,
    threshold: float,
    cap: int,
    num_ahead_tokens: int = 0,
) -> Tensor:
    """Probability of each of the V^depth completions, the last token running fastest. No branches."""
    target, draft = models
    vocab_size = target.vocab_size
    cap = num_ahead_tokens - 1 if num_ahead_tokens else cap
    masses: dict[State, Tensor] = {
        (VERIFIED_AHEAD if num_ahead_tokens else BONUS): torch.ones(1, dtype=torch.float64)
    }
    for place in range(depth):
        tails = torch.tensor(list(product(range(vocab_size), repeat=place)), dtype=torch.int64)
        prefixes = torch.cat([torch.tensor(prompt).expand(len(tails), -1), tails], dim=1)
        target_UV, draft_UV = (_probabilities(model, prefixes, settings) for model in models)
        # The last token of a row always comes from the target, and the one before it is always verified.
        num_left = depth - 1 - place
        doubts_UV = torch.ones_like(draft_UV, dtype=torch.bool)
        if num_left > 1:
            doubts_UV = _estimates(draft, prefixes, draft_UV) < threshold
        found: dict[State, Tensor] = {}

        def add(state: State, mass_UV: Tensor, found: dict[State, Tensor] = found) -> None:
            found[state] = (
                found.get(state, torch.zeros(mass_UV.numel(), dtype=torch.float64)) + mass_UV.flatten()
            )

        for state, mass_U in masses.items():
            mass_U1 = mass_U[:, None]
            behind_miss: State = VERIFIED_AHEAD if num_ahead_tokens else CANDIDATE
            if state == BONUS or num_left == 0:
                add(CANDIDATE, mass_U1 * target_UV)
                continue
            if state == VERIFIED_AHEAD:
                is_verified_UV, num_before, behind_hit = torch.ones_like(doubts_UV), -1, CANDIDATE
            else:
                assert isinstance(state, int)
                is_last = num_left == 1 or state + 1 >= cap
                is_verified_UV, num_before = doubts_UV | is_last, state
                behind_hit = VERIFIED_AHEAD if num_ahead_tokens else BONUS
            drafted_UV = draft_UV * is_verified_UV
            kept_UV = torch.minimum(draft_UV, target_UV) * is_verified_UV
            residual_UV = (target_UV - draft_UV).clamp(min=0)
            residual_UV = residual_UV / residual_UV.sum(dim=1, keepdim=True).clamp(min=1e-300)
            lost_U1 = (drafted_UV - kept_UV).sum(dim=1, keepdim=True)
            add(num_before + 1, mass_U1 * draft_UV * ~is_verified_UV)
            add(behind_hit, mass_U1 * kept_UV)
            add(behind_miss, mass_U1 * lost_U1 * residual_UV)
        masses = found
    return sum(masses.values(), torch.zeros(vocab_size**depth, dtype=torch.float64))


def completion_distribution(
    model: MarkovModel, prompt: list[int], settings: SamplingSettings, depth: int
) -> Tensor:
    """Probability of each of the V^depth completions of the model alone, the last token running fastest."""
    found = torch.ones(1, dtype=torch.float64)
    for place in range(depth):
        tails = torch.tensor(list(product(range(model.vocab_size), repeat=place)), dtype=torch.int64)
        prefixes = torch.cat([torch.tensor(prompt).expand(len(tails), -1), tails], dim=1)
        found = (found[:, None] * _probabilities(model, prefixes, settings)).flatten()
    return found


def bucket_p_value(completions: list[Completion], expected: Tensor, depth: int) -> float:
    """Of completions that begin with ``depth`` tokens each, thrown into buckets by a fixed random function of
    all of these, since most of them are rare."""
    vocab_size = round(len(expected) ** (1 / depth))
    found = torch.tensor([completion.token_ids[:depth] for completion in completions])
    numbers = (found * vocab_size ** torch.arange(depth - 1, -1, -1)).sum(1)
    buckets = torch.randint(NUM_BUCKETS, (len(expected),), generator=torch.Generator().manual_seed(9))
    counts = torch.bincount(buckets[numbers], minlength=NUM_BUCKETS)
    masses = torch.zeros(NUM_BUCKETS, dtype=torch.float64).index_add_(0, buckets, expected)
    return chi_square_p_value(counts, masses)


def _probabilities(model: MarkovModel, prefixes: Tensor, settings: SamplingSettings) -> Tensor:
    found = distributions_from_logits(model.logits_after(prefixes), settings)
    assert isinstance(found, Dense)
    return found.probabilities_NV.double()


def _estimates(draft: MarkovModel, prefixes: Tensor, draft_UV: Tensor) -> Tensor:
    """[U, V]: of each token after each prefix, from the pass over it or from the state before it."""
    vocab_size = draft.vocab_size
    if draft.reads_drawing_state:
        logits_UV = torch.logit(draft.estimates_after(prefixes))[:, None].expand(-1, vocab_size)
        return (logits_UV + 2 * (draft_UV - 0.5) * draft.uses_features).sigmoid()
    longer = torch.cat(
        [prefixes.repeat_interleave(vocab_size, 0), torch.arange(vocab_size).repeat(len(prefixes))[:, None]],
        1,
    )
    return draft.estimates_after(longer).view(len(prefixes), vocab_size)
