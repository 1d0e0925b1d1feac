"""Candidates of n-grams: what is emitted follows the target's distribution, whatever is proposed and when.

On a target whose next token depends on the last one most, n-grams propose in a third of the rounds, and its
first candidate is then accepted about every second time. Seen with these seeds, sound code: p = 0.02 to 0.98.
With faults planted, at a spread of 3.0 instead of 3.5, p of the transitions:

    candidates judged with a draft model's probability, 0.5                       1e-168
    recovered token drawn from P with the candidate in it                         1e-43
    the block's first candidate taken out of P, whichever was rejected            2e-6
"""

from typing import Any

import numpy as np
import pytest
import torch

from specdist.engine.messages.interfaces import Proposer
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.times.timeline import Timeline
from specdist.policies.costs import CostModel, Curve
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import MarkovModel, repetitive_model
from tests.engine.sampled import (
    ALARM,
    FILTERED,
    NUM_SAMPLES,
    PLAIN,
    PROMPTS,
    TOP_K,
    markov_replica,
    p_values,
)
from tests.engine.sliced import SlicedMarkovReplica

TARGET = repetitive_model()
ALWAYS: dict[str, Any] = {"ngrams": True, "num_draft_tokens": 4}
SHORT: dict[str, Any] = {"ngrams": True, "num_draft_tokens": 3}
LONG: dict[str, Any] = {"ngrams": True, "num_draft_tokens": 16}
GREEDY = SamplingSettings(temperature=0.0)
CROWDED: dict[str, Any] = {"max_num_seqs": 60, "num_pages": 130}


def paying(num_rows: int) -> dict[str, Any]:
    """With so many sequences a candidate is worth its time if its chance is some 0.4; others are found, too,
    and not verified."""
    few, token_ns = num_rows // 4, 5 * 10**6 // num_rows
    target = Curve([1, few, few + 10_000], [10**7, 10**7, 10**7 + 10_000 * token_ns])
    costs = CostModel(target, Curve([1], [0]))
    return {"ngrams": costs, "num_draft_tokens": 6}


def ngram_replica(rule: dict[str, Any], settings: SamplingSettings = PLAIN, **options: Any) -> Harness:
    return markov_replica(settings, pair=(options.pop("target", TARGET), None), **rule, **options)


def tokens_of(replica: Harness, num_samples: int = 60) -> list[list[int]]:
    completions = replica.generate(requests_for(PROMPTS, num_samples))
    assert all(completion.error is None for completion in completions)
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize(
    ("rule", "settings", "eos"),
    [
        (ALWAYS, PLAIN, []),
        (ALWAYS, FILTERED, [5]),
        (LONG, TOP_K, []),
        (paying(400) | {"max_num_seqs": 400, "num_pages": 700}, PLAIN, []),
    ],
    ids=["plain", "filtered", "long", "paying"],
)
def test_tokens_follow_the_target_s_distribution(
    rule: dict[str, Any], settings: SamplingSettings, eos: list[int]
) -> None:
    replica = ngram_replica(rule, settings, eos=eos)
    found = p_values(replica, TARGET, 2 * NUM_SAMPLES, eos=eos)
    assert min(found) > ALARM, found
    stats = replica.stats_recorder.close_shard(0)
    assert 0.03 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.7
    assert stats.num_draft_passes == 0 and stats.num_drafts > 0.08 * stats.num_row_steps


def test_tokens_depend_neither_on_the_batch_nor_on_preemptions_nor_on_slices() -> None:
    """Also under rejection, where a block's length decides between a bonus token and a verified one: the
    n-grams of a sequence that is admitted again, or in a slot that another had, are its own."""
    expected = tokens_of(ngram_replica(SHORT, FILTERED))
    crowded = ngram_replica(SHORT, FILTERED, max_num_seqs=60, num_pages=120)
    assert tokens_of(crowded) == expected
    assert crowded.stats_recorder.close_shard(0).num_preemptions > 5
    sliced = tokens_of(ngram_replica(SHORT, FILTERED, kind=SlicedMarkovReplica, max_num_seqs=400))
    # A probability that differs in the last bit may very rarely change a token.
    assert sum(one != other for one, other in zip(sliced, expected, strict=True)) < 3


class Repeating:
    """Compares the block of every sequence that goes on with that before it was preempted."""

    def __init__(self, inner: Proposer) -> None:
        self._inner, self.close = inner, inner.close
        self._blocks: dict[tuple[int, int], list[int]] = {}
        self.num_repeated = 0

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        request.meanwhile()
        keys = [(sequence.stream_key, len(sequence.token_ids)) for sequence in request.sequences]
        reply = self._inner.propose(request, clock)
        blocks = np.split(reply.candidate_ids_C, np.cumsum(reply.num_drafted_R))[: len(keys)]
        for key, block, is_again in zip(keys, blocks, request.num_redraft_R > 0, strict=True):
            assert not is_again or block.tolist() == self._blocks[key]
            self._blocks[key] = block.tolist()
            self.num_repeated += is_again
        return reply


class RepeatingReplica(Harness):
    def proposer(self) -> Proposer:
        self.repeating = Repeating(super().proposer())
        return self.repeating


def test_a_preempted_sequence_repeats_its_block() -> None:
    """Though another length may pay by now: the random numbers are the same, too."""
    replica = ngram_replica(paying(60), kind=RepeatingReplica, **CROWDED)
    tokens_of(replica, num_samples=100)
    assert replica.repeating.num_repeated > 5  # type: ignore[attr-defined]


def test_a_text_that_repeats_itself_is_accepted_as_a_whole() -> None:
    """And blocks grow to their limit, beyond the period: 7 tokens."""
    cycle = torch.full((7, 7, 7), -1e9)
    for token_id in range(7):
        cycle[token_id, :, (token_id + 3) % 7] = 0
    replica = ngram_replica(
        LONG, target=MarkovModel(cycle),
        max_new_tokens=120, max_seq_len=140, is_traced=True,
    )  # fmt: skip
    completions = replica.generate(requests_for([[0], [1, 4, 0]], 5))
    assert all(
        len(each.token_ids) == 120 and each.token_ids[7:] == each.token_ids[:-7] for each in completions
    )
    stats = replica.stats_recorder.close_shard(0)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0 and stats.num_misses == 0
    assert max(length for length, count in enumerate(stats.draft_length_histogram) if count) == 16
    # Seven tokens before anything has stood there before, then blocks.
    assert all(each.num_spec_steps < 14 for each in completions)
    traced = [token for each in completions for token in each.trace]
    assert sum(token.is_accepted for token in traced) == stats.num_accepted_tokens
    assert {token.draft_probability for token in traced} == {1.0}


def test_nothing_is_proposed_after_a_stop_token() -> None:
    """A block ends with it, though the prompt goes on."""
    prompt = [1, 2, 3, 5, 4, 6, 1, 2]
    follows = torch.full((7, 7, 7), -1e9)
    for token_id, next_id in zip([*prompt, 3], [*prompt[1:], 3, 5], strict=True):
        follows[token_id, :, next_id] = 0
    for eos, expected, num_drafted in (([5], [3, 5], 1), ([], [3, 5, 4, 6, 1, 2], 4)):
        replica = ngram_replica(ALWAYS, GREEDY, target=MarkovModel(follows), eos=eos, max_new_tokens=6)
        (completion,) = replica.generate(requests_for([prompt], 1))
        assert completion.token_ids == expected
        assert replica.stats_recorder.close_shard(0).num_draft_tokens == num_drafted
