"""Penalties, biases and options of single rows under speculation: what the engine emits follows the target's
distribution, processed with all tokens before each.

Every token is compared with its own conditional distribution. Its *place* in that distribution, with the
tokens that the processors favour least first, is uniform if it follows the distribution; a processor that is
left out, or that does not know some of the tokens before it, moves all places to one side. The processors
themselves are compared with transformers' in ``tests/sampling/test_processors.py``.

Per run 6,000 tokens. Seen with sound code: p = 0.02 to 0.97. With faults of ``tests/mutants`` planted: below
1e-12.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specdist.engine.request import Completion
from specdist.sampling.distributions import SamplingSettings
from specdist.sampling.processing.row_table import Processing, TokenOptions
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import VOCAB_SIZE, MarkovModel, markov_pair
from tests.engine.sampled import AHEAD, ALARM, PROMPTS, markov_replica
from tests.engine.sliced import SlicedMarkovReplica
from tests.engine.test_greedy import MODES
from tests.random_runs.checking import place_of
from tests.random_runs.oracle import Rules, logits_of, probabilities_of, scores_of, softmax
from tests.statistics import chi_square_p_value

NUM_SAMPLES, NUM_TOKENS, NUM_BINS = 100, 20, 20
TARGET = markov_pair()[0]
COUNTS = TokenOptions(presence_penalty=0.5, frequency_penalty=0.4)
CASES = {
    "penalties": Processing(defaults=dataclasses.replace(COUNTS, repetition_penalty=1.6)),
    "words": Processing(
        bad_words=((1, 2), (3,), (0, 0, 5)), logit_bias=((6, 1.0),), min_new_tokens=6, end_ids=(5,)
    ),
    "all": Processing(
        defaults=TokenOptions(
            temperature=1.3, top_k=5, top_p=0.95, min_p=0.05, repetition_penalty=0.7, frequency_penalty=0.6
        ),
        bad_words=((2, 4),),
        suppressed_ids=(3,),
    ),
    # Without any history, and without what gathers whole logits on vocabulary-parallel ranks.
    "min-p": Processing(defaults=TokenOptions(temperature=1.2, top_k=6, min_p=0.15)),
}


def settings_of(processing: Processing, *, is_coupled: bool = False) -> SamplingSettings:
    temperature = processing.defaults.temperature
    return SamplingSettings(temperature=temperature, is_coupled=is_coupled, processing=processing)


def processed_replica(settings: SamplingSettings, **options: Any) -> Harness:
    return markov_replica(
        settings, **{"eos": [5], "max_new_tokens": NUM_TOKENS, "max_num_seqs": 60} | options
    )


def uniform_p_value(completions: Sequence[Completion], processing: Processing) -> float:
    """The p-value of the places of all tokens in their distributions, which the oracle of the random runs
    computes."""
    rng, places = np.random.default_rng(3), list[float]()
    for completion in completions:
        size, token_ids = len(completion.request.prompt_ids), completion.token_ids
        token_ids = [*completion.request.prompt_ids, *token_ids]
        rules = Rules(
            options=dataclasses.asdict(processing.defaults),
            num_prompt_tokens=size,
            logit_bias=processing.logit_bias,
            bad_words=processing.bad_words,
            suppressed_ids=processing.suppressed_ids,
            min_new_tokens=processing.min_new_tokens,
            end_ids=processing.end_ids,
        )
        logits_LV = logits_of(TARGET, token_ids)[size - 1 :]
        for position, logits_V in zip(range(size, len(token_ids)), logits_LV, strict=False):
            scores_V = scores_of(logits_V, token_ids[:position], rules)
            found_V = probabilities_of(scores_V, rules.options)
            assert found_V[token_ids[position]] > 0, "a token without probability"
            places += place_of(found_V, softmax(logits_V), token_ids[position], rng)
    counts = torch.from_numpy(np.histogram(places, NUM_BINS, (0, 1))[0])
    return chi_square_p_value(counts, torch.full((NUM_BINS,), 1 / NUM_BINS))


@pytest.mark.parametrize(
    ("mode", "case"), [*(("none", case) for case in CASES), ("asynchronous", "all"), ("branches", "words")]
)
def test_processed_tokens_follow_the_target(mode: str, case: str) -> None:
    replica = processed_replica(settings_of(CASES[case]), **AHEAD[MODES.index(mode)])
    completions = replica.generate(requests_for(PROMPTS, NUM_SAMPLES))
    assert uniform_p_value(completions, CASES[case]) > ALARM
    stats = replica.stats_recorder.close_shard(0)
    assert 0.05 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9


@pytest.mark.parametrize(
    ("is_coupled", "case"),
    [(False, "min-p"), (False, "all"), (True, "words"), (True, "penalties")],
    ids=["rejection-min-p", "rejection-all", "gumbel-words", "gumbel-penalties"],
)
def test_a_vocabulary_parallel_target_emits_the_same(is_coupled: bool, case: str) -> None:
    settings, requests = settings_of(CASES[case], is_coupled=is_coupled), requests_for(PROMPTS, 20)
    sliced, whole = (
        processed_replica(settings, kind=kind, max_num_seqs=16).generate(requests)
        for kind in (SlicedMarkovReplica, Harness)
    )
    # A probability that differs in the last bit may very rarely change a token.
    assert sum(one.token_ids == other.token_ids for one, other in zip(sliced, whole, strict=True)) >= 59


@pytest.mark.parametrize("ahead", [AHEAD[0], AHEAD[2]], ids=[MODES[0], MODES[2]])
def test_a_draft_that_is_the_target_is_processed_like_it(ahead: dict[str, int]) -> None:
    """It draws from the very distribution that verifies it: every token is accepted."""
    replica = processed_replica(settings_of(CASES["all"]), pair=(TARGET, TARGET), max_num_seqs=50, **ahead)
    replica.generate(requests_for(PROMPTS, 40))
    stats = replica.stats_recorder.close_shard(0)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


def test_branches_are_processed_like_what_they_branch_off() -> None:
    """Greedy, with a draft that is the target but for its first token: a branch that is adopted is what the
    target says, if its tokens before it were known."""
    processing = Processing(defaults=TokenOptions(temperature=0.0, repetition_penalty=3.0))
    draft = MarkovModel(TARGET.logits_VVV.clone())
    # Where the checksum is 0 the two likeliest change places.
    places = draft.logits_VVV[:, 0].topk(2, dim=1).indices
    swapped = draft.logits_VVV[:, 0].gather(1, places.flip(1))
    draft.logits_VVV[:, 0] = draft.logits_VVV[:, 0].scatter(1, places, swapped)
    replica = processed_replica(
        settings_of(processing), pair=(TARGET, draft), num_ahead_tokens=4, num_branches=2, eos=[]
    )
    prompts = np.random.default_rng(4).integers(VOCAB_SIZE, size=(40, 9)).tolist()
    replica.generate(requests_for(prompts))
    stats = replica.stats_recorder.close_shard(0)
    # Seen: 0.91; with branches that do not know the tokens before them, 0.85.
    assert stats.num_accepted_tokens > 0.88 * stats.num_draft_tokens


def test_prompts_whose_pages_are_shared_are_known() -> None:
    """The third sequence runs in the slot of another prompt, and no token of its own first pages."""
    processing = Processing(defaults=TokenOptions(temperature=0.0, repetition_penalty=4.0))
    first, second = [1, 2, 3, 1, 2, 3, 1, 2, 3], [6, 5, 4, 6, 5, 4, 6, 5, 4, 0]
    requests = requests_for([first, second, first])
    sizes = {"max_num_seqs": 1, "max_new_tokens": 4, "eos": []}
    replica = processed_replica(settings_of(processing), **sizes)
    found = [c.token_ids for c in replica.generate(requests)]
    assert replica.stats_recorder.close_shard(0).num_shared_prompt_tokens >= 8
    assert found[2] == found[0]
    assert (
        found[1] == processed_replica(settings_of(processing), **sizes).generate(requests[1:2])[0].token_ids
    )
