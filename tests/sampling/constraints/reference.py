"""What llguidance allows, of matchers that have only ever gone forward, and the distributions that follow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import llguidance.hf
import numpy as np
import torch

from specdist.sampling.distributions import Dense, SamplingSettings, distributions_from_logits
from tests.engine.markov import MarkovModel
from tests.sampling.constraints.letters import END, TOKENS, letters_tokenizer


def token_ids_of(mask_W: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")).tolist()


@cache
def _tokenizer() -> Any:
    return llguidance.hf.from_tokenizer(letters_tokenizer(), n_vocab=32, eos_token=END)


@cache
def _matcher(grammar: str) -> Any:
    return llguidance.LLMatcher(_tokenizer(), grammar)


@cache
def allowed_by_llguidance(grammar: str, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Token ids of the letters that may come next."""
    matcher = _matcher(grammar).deep_copy()
    assert matcher.consume_tokens(list(token_ids)) if token_ids else True
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return tuple(token_id for token_id in token_ids_of(mask) if token_id < len(TOKENS))


def completions_of(
    model: MarkovModel, prompt: Sequence[int], grammar: str, settings: SamplingSettings
) -> dict[tuple[int, ...], float]:
    """Every completion that the grammar allows, with its end token, and its probability under the model's
    masked distribution."""
    dense = SamplingSettings(
        temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, is_coupled=False
    )
    found: dict[tuple[int, ...], float] = {}
    open_ones: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_ones:
        token_ids, chance = open_ones.pop()
        logits_V = model.logits_after(torch.tensor([[*prompt, *token_ids]]))[0].double()
        is_allowed_V = torch.zeros(len(logits_V), dtype=torch.bool)
        is_allowed_V[list(allowed_by_llguidance(grammar, token_ids))] = True
        distribution = distributions_from_logits(logits_V.where(is_allowed_V, -torch.inf)[None], dense)
        if isinstance(distribution, Dense):
            chances = distribution.probabilities_NV[0].tolist()
        else:
            chances = torch.nn.functional.one_hot(distribution.token_ids_N[0], len(logits_V)).tolist()
        for token_id, part in enumerate(chances):
            if part > 0 and token_id == END:
                found[(*token_ids, END)] = chance * part
            elif part > 0:
                open_ones.append(((*token_ids, token_id), chance * part))
    return found
