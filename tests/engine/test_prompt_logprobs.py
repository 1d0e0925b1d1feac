"""Log-probabilities of prompts are those of a plain forward pass over them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from specdist.engine.request import Completion, Request
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness
from tests.engine.sampled import COUPLED, PLAIN, markov_replica
from tests.engine.sliced import SlicedMarkovReplica
from tests.engine.test_logprobs import PENALISED
from tests.engine.test_processing import AHEAD, TARGET

NUM_TOP = 3
GREEDY = SamplingSettings(temperature=0.0)
# Pages have four tokens: the prompts share two of them, or are alike, or have one token.
COMMON = [1, 2, 3, 0, 2, 1, 4, 3]
PROMPTS = [[*COMMON, *tail] for tail in ([1, 2, 3, 4, 5, 0], [2], [1, 2, 3, 4, 5, 0], [3] * 21)] + [[4]]


def requests() -> list[Request]:
    return [Request(row_id=row, sample_index=0, prompt_ids=prompt) for row, prompt in enumerate(PROMPTS)]


def check(completion: Completion) -> None:
    """Against the model's own logits at every position, to 1e-5 in float32."""
    found, prompt_ids = completion.prompt_logprobs, completion.request.prompt_ids
    assert found is not None
    assert len(found.raw) == len(found.top_ids) == len(found.top_raw) == len(prompt_ids)
    assert found.raw[0] is found.top_ids[0] is found.top_raw[0] is None
    for index in range(1, len(prompt_ids)):
        raw_V = TARGET.logits_after(torch.tensor([prompt_ids[:index]]))[0].double().log_softmax(dim=0)
        assert found.raw[index] == pytest.approx(float(raw_V[prompt_ids[index]]), abs=1e-5)
        best, top_raw = raw_V.topk(NUM_TOP), found.top_raw[index]
        assert found.top_ids[index] == best.indices.tolist() and top_raw is not None
        np.testing.assert_allclose(top_raw, best.values.numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", [Harness, SlicedMarkovReplica], ids=["whole", "sliced"])
@pytest.mark.parametrize(
    "settings",
    [GREEDY, PLAIN, COUPLED, SamplingSettings(temperature=0.8, processing=PENALISED)],
    ids=["greedy", "plain", "coupled", "penalties"],
)
def test_prompts_are_scored_as_by_a_plain_pass(settings: SamplingSettings, kind: type[Harness]) -> None:
    """In chunks beside blocks, with prefixes in common, and so few pages that sequences are
    preempted, some within their prompts; together with the log-probabilities of emitted tokens."""
    asked = dataclasses.replace(settings, num_prompt_logprobs=NUM_TOP, num_logprobs=1)
    options: dict[str, Any] = {"max_new_tokens": 16, "num_pages": 12, "max_num_seqs": 4}
    options |= {"max_num_batched_tokens": 17, "kind": kind, **AHEAD[0]}
    replica = markov_replica(asked, **options)
    completions = replica.generate(requests())
    assert replica.stats_recorder.close_shard(0).num_preemptions
    for completion in completions:
        check(completion)
        assert completion.logprobs is not None
        assert len(completion.logprobs.raw) == len(completion.token_ids)
    # Asking for them changes no token.
    plain = markov_replica(settings, **options).generate(requests())
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]


def test_a_prompt_in_the_cache_is_run_once_more() -> None:
    """Pages have no logits. Nothing else is asked for, so emitted tokens have no log-probabilities."""
    asked = dataclasses.replace(GREEDY, num_prompt_logprobs=NUM_TOP)
    replica = markov_replica(asked, max_new_tokens=3, max_num_seqs=1)
    for completion in replica.generate(requests()):
        check(completion)
        assert completion.logprobs is None
    assert replica.stats_recorder.close_shard(0).num_shared_prompt_tokens == 0
    replica = markov_replica(GREEDY, max_new_tokens=3, max_num_seqs=1)
    assert all(completion.prompt_logprobs is None for completion in replica.generate(requests()))
    assert replica.stats_recorder.close_shard(0).num_shared_prompt_tokens > 0
