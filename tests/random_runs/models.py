"""Target and draft of a case; each is built once per process."""

from __future__ import annotations

import functools
from typing import TypeAlias

from transformers import PreTrainedModel

from tests.engine.harness import decode
from tests.engine.markov import MarkovModel, markov_pair, repetitive_model
from tests.models.families import noisy_copy, tiny_model
from tests.random_runs.case import Case
from tests.sampling.constraints.letters import END, TOKENS, text_of

Model: TypeAlias = PreTrainedModel | MarkovModel
NOISE = 0.02


def pair_of(case: Case) -> tuple[Model, Model]:
    """The draft is the target itself where both are the same, or where there is none."""
    if not case.is_markov:
        target, noisy = _family(case.model, case.model_seed)
        return target, noisy if case.draft == "noisy" else target
    return _markov(case.model, case.model_seed, case.spread, case.difference, case.draft == "noisy")


def decode_of(case: Case, token_ids: list[int], skip_special: bool = True) -> str:
    """The text of tokens: of the Markov pair's letters, whose end token is special; else a letter per
    token."""
    if not case.is_markov:
        return decode(token_ids)
    return text_of(token_ids) if skip_special else "".join(TOKENS[token_id] for token_id in token_ids)


def special_ids_of(case: Case) -> frozenset[int]:
    return frozenset([END] if case.is_markov else [])


@functools.cache
def _family(family: str, seed: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny_model(family, seed=seed)
    return target, noisy_copy(target, NOISE)


@functools.lru_cache(maxsize=256)
def _markov(
    kind: str, seed: int, spread: float, difference: float, is_noisy: bool
) -> tuple[MarkovModel, MarkovModel]:
    target, draft = markov_pair(spread=spread, difference=difference, seed=seed, head_offset=1.0)
    if kind == "repetitive":
        target = repetitive_model()
        draft = MarkovModel(target.logits_VVV + difference * (draft.logits_VVV / 3), draft.estimates_VV)
    if not is_noisy:
        draft = MarkovModel(target.logits_VVV, draft.estimates_VV)
    return target, draft
