"""A completion does not depend on the other rows, shown with many rows of the Markov pair.

``test_identity.py`` shows the same for transformers, whose keys also depend on the tokens before them.
"""

from __future__ import annotations

from typing import Any

import pytest

from specdist.data.stats.shard import Stats
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import requests_for
from tests.engine.sampled import COUPLED, FILTERED, PLAIN, PROMPTS, markov_replica
from tests.engine.test_greedy import MODES
from tests.engine.test_identity import outcome

AHEAD: list[dict[str, Any]] = [{}, {"num_ahead_tokens": 4}, {"num_ahead_tokens": 4, "num_branches": 2}]
# So that admitted rows run out of pages.
LONG: dict[str, Any] = {"max_new_tokens": 50, "max_seq_len": 64}
every_setting = pytest.mark.parametrize(
    "settings", [PLAIN, FILTERED, COUPLED], ids=["plain", "filtered", "coupled"]
)


@every_setting
@pytest.mark.parametrize("ahead", AHEAD, ids=MODES)
def test_a_completion_is_the_same_alone_in_any_batch_or_after_preemption(
    ahead: dict[str, Any], settings: SamplingSettings
) -> None:
    """Its tokens and its counts of speculation."""
    requests = requests_for(PROMPTS, 5)
    expected = outcome(markov_replica(settings, **LONG, **ahead).generate(requests))
    total = Stats()
    for limits in (
        {"max_num_seqs": 3},
        {"max_num_seqs": 20, "num_pages": 24},
        {"max_num_batched_tokens": 23},
    ):
        replica = markov_replica(settings, **LONG, **ahead, **limits)
        assert outcome(replica.generate(requests)) == expected, limits
        total.add(replica.stats_recorder.close_shard(0))
    assert total.num_preemptions > 0 and total.num_misses + total.num_accepted_tokens > 300


@every_setting
def test_ahead_no_length_and_no_branch_changes_a_token(settings: SamplingSettings) -> None:
    """Every next token but the last has a drafted token to verify, with the numbers of its position and of
    the misses before it."""
    requests = requests_for(PROMPTS, 5)
    found = []
    for num_draft_tokens, num_branches in ((1, 0), (2, 3), (5, 0), (5, 1), (8, 2)):
        replica = markov_replica(
            settings,
            num_draft_tokens=num_draft_tokens,
            num_ahead_tokens=num_draft_tokens + 1,
            num_branches=num_branches,
            max_num_seqs=7 * num_draft_tokens,
        )
        found.append([completion.token_ids for completion in replica.generate(requests)])
    assert all(token_ids == found[0] for token_ids in found)
