"""The target alone, one row at a time: what a completion has to be.

Nothing here is shared with the engine but the definition of random numbers. The tokens of a completion are
given to one plain forward pass of the model (or looked up in its table), and each is compared with what the
target, the options and the seed make of all tokens before it; by induction the whole completion is then the
target's own.

V vocabulary, L tokens of prompt and completion, T tokens of the completion.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdist.sampling.keys import stream_key
from tests.engine.markov import MarkovModel
from tests.sampling.constraints.reference import allowed_by_llguidance

GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = 2**64 - 1
COUPLE = 3


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What shapes distributions. ``options``: those of the row that are not the defaults."""

    options: Mapping[str, float]
    num_prompt_tokens: int
    grammar: str | None = None
    logit_bias: Sequence[tuple[int, float]] = ()
    bad_words: Sequence[Sequence[int]] = ()
    suppressed_ids: Sequence[int] = ()
    min_new_tokens: int = 0
    end_ids: Sequence[int] = ()

    @property
    def is_greedy(self) -> bool:
        return self.options.get("temperature", 1.0) == 0


def logits_of(model: Any, token_ids: Sequence[int]) -> np.ndarray:
    """float64 [L, V]: the logits after each token, of a plain pass over all of them."""
    if isinstance(model, MarkovModel):
        size = model.vocab_size
        ids = np.array(token_ids)
        parts = ids * (np.arange(len(ids)) % (size - 1) + 1)
        sums = (np.cumsum(parts) - parts) % size
        return np.asarray(model.logits_VVV[ids, sums].double().numpy())
    with torch.inference_mode():
        ids_1L = torch.tensor([list(token_ids)])
        found = model(input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L), use_cache=False).logits[0]
    return np.asarray(found.double().numpy())


def scores_of(logits_V: np.ndarray, before: Sequence[int], rules: Rules) -> np.ndarray:
    """float64 [V]: processed logits, -inf where a token cannot be."""
    scores = logits_V.astype(np.float64).copy()
    options, new = rules.options, list(before[rules.num_prompt_tokens :])
    for token_id, bias in rules.logit_bias:
        scores[token_id] += bias
    penalty = options.get("repetition_penalty", 1.0)
    for token_id in set(before):
        scores[token_id] = scores[token_id] * penalty if scores[token_id] < 0 else scores[token_id] / penalty
    for token_id in set(new):
        scores[token_id] -= options.get("presence_penalty", 0.0)
        scores[token_id] -= options.get("frequency_penalty", 0.0) * new.count(token_id)
    for *prefix, last in rules.bad_words:
        if len(before) >= len(prefix) and list(before[len(before) - len(prefix) :]) == prefix:
            scores[last] = -np.inf
    if len(new) < rules.min_new_tokens:
        scores[list(rules.end_ids)] = -np.inf
    if rules.grammar:
        allowed = list(allowed_by_llguidance(rules.grammar, tuple(new)))
        is_allowed = np.zeros(len(scores), bool)
        is_allowed[allowed] = True
        scores[~is_allowed] = -np.inf
    scores[list(rules.suppressed_ids)] = -np.inf
    return scores


def probabilities_of(scores_V: np.ndarray, options: Mapping[str, float], slack: float = 0.0) -> np.ndarray:
    """float64 [V]: temperature, top-k, top-p, min-p. ``slack``: how much more mass the filters keep."""
    scores = scores_V / options.get("temperature", 1.0)
    top_k = int(options.get("top_k", 0))
    if 0 < top_k < len(scores):
        scores[scores < np.sort(scores)[-top_k] - slack] = -np.inf
    found = softmax(scores)
    top_p = options.get("top_p", 1.0)
    if top_p < 1:
        lesser = np.array([found[found <= own].sum() for own in found])
        is_out = lesser <= 1 - top_p - slack
        is_out[found.argmax()] = False
        found = softmax(np.where(is_out, -np.inf, scores))
    min_p = options.get("min_p", 0.0)
    if min_p:
        found = np.where(found < min_p * found.max() * (1 - slack), 0, found)
        found = found / found.sum()
    return np.asarray(found)


def softmax(scores_V: np.ndarray) -> np.ndarray:
    weights = np.exp(scores_V - scores_V.max())
    return np.asarray(weights / weights.sum())


def waiting_times(seed: int, row: int, sample: int, position: int, vocab_size: int) -> np.ndarray:
    """float64 [V]: the exponential waiting times that target and draft share at this position."""
    key = stream_key(seed, row, sample) & MASK
    counter = (position << 32 | COUPLE) & MASK
    word = _mixed(_mixed((counter * GAMMA + key) & MASK) ^ key)
    words = [_mixed((word + (token_id + 1) * GAMMA) & MASK) for token_id in range(vocab_size)]
    return -np.log((np.array([each >> 12 for each in words], float) + 0.5) * 2.0**-52)


def _mixed(word: int) -> int:
    word = (word ^ word >> 30) * FIRST & MASK
    word = (word ^ word >> 27) * SECOND & MASK
    return word ^ word >> 31


def choices(
    scores_V: np.ndarray, options: Mapping[str, float], waiting_V: np.ndarray, slack: float
) -> set[int]:
    """The token that greedy or coupled decoding takes; several where rounding within ``slack`` decides."""
    if options.get("temperature", 1.0) == 0:
        return _near_best(scores_V, slack)
    found: set[int] = set()
    for each in (-slack, slack):
        with np.errstate(divide="ignore"):
            raced = np.log(probabilities_of(scores_V, options, each)) - np.log(waiting_V)
        found |= _near_best(raced, slack)
    return found


def _near_best(scores_V: np.ndarray, slack: float) -> set[int]:
    best = scores_V.max()
    # Equal scores: the lowest id.
    near = np.flatnonzero((scores_V >= best - slack) & (scores_V != best)).tolist()
    return {int(scores_V.argmax()), *near}


def end_of(
    token_ids: Sequence[int],
    text_of: Any,
    *,
    special_ids: Container[int],
    end_ids: Sequence[int],
    strings: Sequence[str],
    room: int,
) -> tuple[int, str, str]:
    """How many of these tokens belong to the completion, why it ends there (or the empty string: it goes on),
    and its text. Stop strings are those of the text with special tokens, and the text has none."""
    for count in range(1, len(token_ids) + 1):
        own = list(token_ids[:count])
        text, whole = text_of(own), text_of(own, False)
        found = [place for string in strings if (place := whole.find(string)) >= 0]
        if found:
            before = max(size for size in range(count) if len(text_of(own[:size], False)) <= min(found))
            part = whole[len(text_of(own[:before], False)) : min(found)]
            return count, "stop", text_of(own[:before]) + ("" if own[before] in special_ids else part)
        if token_ids[count - 1] in end_ids:
            return count, "stop", text
        if count == room:
            return count, "length", text
    return len(token_ids), "", text_of(list(token_ids))
