"""What a lossy run must emit: the law of whole completions, from both models and the verifier.

Per prefix and token x: drafting goes on behind x if the verifier does not doubt it and the block has room;
x is then emitted with the draft's own probability Q(x). Else x ends the block and is judged: it is emitted
with min(P, Q)(x), and what is lost of it goes to the residual max(0, P - Q), normalised.

U prefixes of one length, V vocabulary.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.hidden import HiddenStateHead
from specdist.sampling.distributions import Dense, SamplingSettings, distributions_from_logits

# What comes next: a token that the target decides alone; one that was drafted in a decision's place, and is
# judged; and, from here on, a candidate of the block with so many before it.
BONUS, JUDGED_AHEAD, CANDIDATE = "bonus", "ahead", 0
State = str | int


def sprinter_law(
    models: tuple[PreTrainedModel, PreTrainedModel],
    head: HiddenStateHead,
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
    vocab_size = target.config.vocab_size
    cap = num_ahead_tokens - 1 if num_ahead_tokens else cap
    masses: dict[State, Tensor] = {
        (JUDGED_AHEAD if num_ahead_tokens else BONUS): torch.ones(1, dtype=torch.float64)
    }
    for place in range(depth):
        tails = torch.tensor(list(product(range(vocab_size), repeat=place)), dtype=torch.int64)
        prefixes = torch.cat([torch.tensor(prompt).expand(len(tails), -1), tails], dim=1)
        target_UV, draft_UV = (_next_laws(model, prefixes, settings) for model in models)
        # The last token of a row is always the target's, and the one before it is judged in any case.
        num_left = depth - 1 - place
        doubts_UV = torch.ones_like(draft_UV, dtype=torch.bool)
        if num_left > 1:
            doubts_UV = _estimates(draft, head, prefixes, vocab_size) < threshold
        found: dict[State, Tensor] = {}

        def add(state: State, mass_UV: Tensor, found: dict[State, Tensor] = found) -> None:
            found[state] = (
                found.get(state, torch.zeros(mass_UV.numel(), dtype=torch.float64)) + mass_UV.flatten()
            )

        for state, mass_U in masses.items():
            mass_U1 = mass_U[:, None]
            behind_miss: State = JUDGED_AHEAD if num_ahead_tokens else CANDIDATE
            if state == BONUS or num_left == 0:
                add(CANDIDATE, mass_U1 * target_UV)
                continue
            if state == JUDGED_AHEAD:
                is_judged_UV, num_before, behind_hit = torch.ones_like(doubts_UV), -1, CANDIDATE
            else:
                assert isinstance(state, int)
                is_last = num_left == 1 or state + 1 >= cap
                is_judged_UV, num_before = doubts_UV | is_last, state
                behind_hit = JUDGED_AHEAD if num_ahead_tokens else BONUS
            drafted_UV = draft_UV * is_judged_UV
            kept_UV = torch.minimum(draft_UV, target_UV) * is_judged_UV
            residual_UV = (target_UV - draft_UV).clamp(min=0)
            residual_UV = residual_UV / residual_UV.sum(dim=1, keepdim=True).clamp(min=1e-300)
            lost_U1 = (drafted_UV - kept_UV).sum(dim=1, keepdim=True)
            add(num_before + 1, mass_U1 * draft_UV * ~is_judged_UV)
            add(behind_hit, mass_U1 * kept_UV)
            add(behind_miss, mass_U1 * lost_U1 * residual_UV)
        masses = found
    return sum(masses.values(), torch.zeros(vocab_size**depth, dtype=torch.float64))


def _next_laws(model: PreTrainedModel, prefixes: Tensor, settings: SamplingSettings) -> Tensor:
    with torch.inference_mode():
        logits = torch.cat([model(part).logits[:, -1] for part in prefixes.split(4096)])
    law = distributions_from_logits(logits, settings)
    assert isinstance(law, Dense)
    return law.probabilities_NV.double()


def _estimates(draft: PreTrainedModel, head: HiddenStateHead, prefixes: Tensor, vocab_size: int) -> Tensor:
    """[U, V]: of each token behind each prefix, from the pass over it."""
    longer = torch.cat(
        [prefixes.repeat_interleave(vocab_size, 0), torch.arange(vocab_size).repeat(len(prefixes))[:, None]],
        1,
    )
    with torch.inference_mode():
        hidden = torch.cat([draft.model(part).last_hidden_state[:, -1] for part in longer.split(4096)])
        return head(hidden).sigmoid().double().view(len(prefixes), vocab_size)
