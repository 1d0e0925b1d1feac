"""Log-probabilities of emitted tokens are those of a plain forward pass over the same text, whatever was
drafted, before and after processing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from specdist.engine.request import Completion
from specdist.sampling.distributions import SamplingSettings
from specdist.sampling.processing.row_table import Processing, TokenOptions
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import VOCAB_SIZE
from tests.engine.sampled import COUPLED, FILTERED, PLAIN, PROMPTS, TOP_K, markov_replica
from tests.engine.sliced import SlicedMarkovReplica
from tests.engine.test_processing import AHEAD, TARGET, mixed_requests
from tests.sampling.reference import reference_probabilities

NUM_TOP = 3
PENALISED = Processing(
    defaults=TokenOptions(temperature=0.8, top_k=5, repetition_penalty=1.5), logit_bias=((2, 0.5),)
)
MIXED = Processing(defaults=TokenOptions(temperature=1.1, top_p=0.9))
CASES = {
    "greedy": SamplingSettings(temperature=0.0),
    "plain": PLAIN,
    "filtered": FILTERED,
    "top-k": TOP_K,
    "coupled": COUPLED,
    "penalties": SamplingSettings(temperature=0.8, processing=PENALISED),
    "mixed": SamplingSettings(temperature=1.1, processing=MIXED),
}


def check(completion: Completion, settings: SamplingSettings) -> None:
    """Against the model's logits at every position, to 1e-5 in float32."""
    found, request = completion.logprobs, completion.request
    assert found is not None and len(found.raw) == len(completion.token_ids) > 0
    processing = settings.processing or Processing(
        defaults=TokenOptions(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
    )
    options = request.options or processing.defaults
    if options.temperature == 0:
        # Of a greedy token: of the softmax of its processed logits.
        options = TokenOptions(repetition_penalty=options.repetition_penalty)
    token_ids = [*request.prompt_ids, *completion.token_ids]
    for index, token_id in enumerate(completion.token_ids):
        before = token_ids[: len(request.prompt_ids) + index]
        logits_V = TARGET.logits_after(torch.tensor([before]))[0]
        raw_V = logits_V.double().log_softmax(dim=0)
        drawn_V = reference_probabilities(
            logits_V.double(), before, processing, options, len(request.prompt_ids)
        )
        assert found.raw[index] == pytest.approx(float(raw_V[token_id]), abs=1e-5)
        assert found.processed[index] == pytest.approx(float(drawn_V[token_id].log()), abs=1e-5)
        best = raw_V.topk(NUM_TOP)
        assert found.top_ids[index] == best.indices.tolist()
        np.testing.assert_allclose(found.top_raw[index], best.values.numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", [Harness, SlicedMarkovReplica], ids=["whole", "sliced"])
@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_are_those_of_a_plain_pass(case: str, kind: type[Harness]) -> None:
    """Synchronous and with branches; so few pages that sequences are preempted and repeat tokens."""
    settings = dataclasses.replace(CASES[case], num_logprobs=NUM_TOP)
    requests = requests_for(PROMPTS, 2) if case != "mixed" else mixed_requests()[:7]
    num_preemptions = 0
    for ahead in AHEAD[:1] if kind is SlicedMarkovReplica else (AHEAD[0], AHEAD[2]):
        options: dict[str, Any] = {"max_new_tokens": 20, "num_pages": 13, "max_num_seqs": 4}
        replica = markov_replica(settings, kind=kind, **options, **ahead)
        for completion in replica.generate(requests):
            check(completion, settings)
        num_preemptions += replica.stats_recorder.close_shard(0).num_preemptions
    assert num_preemptions
    with_none = dataclasses.replace(settings, num_logprobs=0)
    replica = markov_replica(with_none, kind=kind, max_new_tokens=4)
    (completion,) = replica.generate(requests[:1])
    assert completion.logprobs is not None and completion.logprobs.top_ids == [[]] * 4


@pytest.mark.parametrize("case", ["plain", "penalties"])
def test_asking_for_them_changes_no_token(case: str) -> None:
    settings, requests = CASES[case], requests_for(PROMPTS, 10)
    asked = dataclasses.replace(settings, num_logprobs=VOCAB_SIZE)
    found = [
        [c.token_ids for c in markov_replica(each, max_num_seqs=8).generate(requests)]
        for each in (settings, asked)
    ]
    assert found[0] == found[1]
