"""What the engine emits follows the target's distribution: chi-square tests on a Markov pair.

Per run 24,000 tokens, 1,200 completions of 20 tokens, and twice as many with three branches of plain draws.
``sampled.py`` says what is tested of them; the first p-value, of transitions, is the one that sees most. Seen
with 48,000 tokens, sound code: 0.067 to 0.65. With faults of ``tests/mutants`` planted, also with 48,000
(with fewer the exponents fall):

    recovered token drawn with the number that rejected its candidate, synchronous      0 (below 1e-300)
    candidate verified with the number that drew it, synchronous                        0
    candidate verified with the number of the recovered token, synchronous              0
    token drafted ahead verified with the number that drew it, asynchronous             1e-257
    all rows verified with one stream's numbers, synchronous                            1e-41
    recovered token from the target's whole distribution, or another row's residual     0
    residual filtered again (the three largest stay), synchronous                       0
    draft's probability from before temperature and filters, filtered                   2e-58
    draft's scores from before temperature and filters, filtered                        9e-62
    adopted branch with the probabilities of the lost chain, or with its scores         3e-19, 5e-18
    bonus token drawn one position early, synchronous                                   0
    one noise for all positions under coupling                                          0 (buckets too: 2e-45)
"""

import pytest

from tests.engine.harness import Harness, requests_for
from tests.engine.markov import markov_pair
from tests.engine.sampled import (
    ALARM,
    COUPLED,
    COUPLED_FILTERED,
    FILTERED,
    NUM_SAMPLES,
    PLAIN,
    PROMPTS,
    TOP_K,
    markov_replica,
    p_values,
)
from tests.engine.sliced import SlicedMarkovReplica

TARGET = markov_pair()[0]
SETTINGS = {
    "plain": PLAIN,
    "filtered": FILTERED,
    "top-k": TOP_K,
    "coupled": COUPLED,
    "coupled, filtered": COUPLED_FILTERED,
}
# Every setting in turns, and every shape of a round ahead; lengths and settings by pairs.
TURNS = [(3, "plain"), (3, "filtered"), (8, "top-k"), (3, "coupled"), (1, "coupled, filtered")]
ROUNDS_AHEAD = [
    (1, 0, "plain"), (4, 0, "plain"), (4, 3, "plain"), (2, 1, "filtered"), (2, 0, "top-k"),
    (4, 3, "coupled, filtered"),
]  # fmt: skip


@pytest.mark.parametrize(("num_draft_tokens", "name"), TURNS)
def test_synchronous_drafting_follows_the_target_s_distribution(num_draft_tokens: int, name: str) -> None:
    replica = markov_replica(SETTINGS[name], num_draft_tokens=num_draft_tokens)
    found = p_values(replica, TARGET)
    assert min(found) > ALARM, found
    stats = replica.stats_recorder.close_shard(0)
    # Acceptance and rejection must both have been frequent, or nothing was tested.
    assert 0.05 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9


@pytest.mark.parametrize(("num_ahead_tokens", "num_branches", "name"), ROUNDS_AHEAD)
def test_asynchronous_drafting_follows_the_target_s_distribution(
    num_ahead_tokens: int, num_branches: int, name: str
) -> None:
    replica = markov_replica(SETTINGS[name], num_ahead_tokens=num_ahead_tokens, num_branches=num_branches)
    # Of an adopted branch little is wrong at a time: that takes more tokens to be seen.
    found = p_values(replica, TARGET, NUM_SAMPLES * (2 if (num_branches, name) == (3, "plain") else 1))
    assert min(found) > ALARM, found
    stats = replica.stats_recorder.close_shard(0)
    assert 0.3 < stats.num_ahead_hits / stats.num_ahead_verified < 0.9
    assert stats.num_drafts == 0 if num_ahead_tokens == 1 else stats.num_accepted_tokens > 1000
    caught = stats.num_branch_hits / stats.num_misses
    assert 0.03 < caught < 0.95 if num_branches else caught == 0


def test_the_target_alone_follows_its_distribution() -> None:
    found = p_values(markov_replica(FILTERED, pair=(TARGET, None)), TARGET)
    assert min(found) > ALARM, found


@pytest.mark.parametrize("name", ["plain", "top-k", "coupled, filtered"])
def test_a_vocabulary_parallel_target_emits_the_tokens_of_the_whole_one(name: str) -> None:
    sliced, whole = (
        markov_replica(SETTINGS[name], kind=kind, max_num_seqs=200).generate(requests_for(PROMPTS, 100))
        for kind in (SlicedMarkovReplica, Harness)
    )
    # A probability that differs in the last bit may very rarely change a token.
    num_same = sum(one.token_ids == other.token_ids for one, other in zip(sliced, whole, strict=True))
    assert num_same > 0.99 * len(whole)
