"""Policies in turns and ahead: the target's distribution, and rows that do not depend on one another. The
tokens of every policy are compared with an oracle in the random runs.

The thresholds are such that on the Markov pair blocks have many lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from specdist.data.stats.shard import Stats
from specdist.policies import DraftSequences, LengthPolicy, VerifiedBlocks
from specdist.policies.lengths import thresholds
from specdist.policies.lengths.counted import GammaTune, GammaTunePlus, HfHeuristic
from specdist.policies.lengths.thresholds import AdaEdl, ConfidenceThreshold, Svip
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import VOCAB_SIZE, markov_pair
from tests.engine.sampled import ALARM, markov_replica, p_values
from tests.engine.test_greedy import prompts_of_lengths
from tests.engine.test_identity import SAMPLED, check_preempted

CAP = 6


WINDOW: dict[str, Any] = {"num_draft_tokens": 3, "max_draft_tokens": CAP, "length_rate": 0.5}
POLICIES: dict[str, LengthPolicy] = {
    "hf_heuristic": HfHeuristic(num_draft_tokens=3, max_draft_tokens=CAP),
    "confidence": ConfidenceThreshold(max_draft_tokens=CAP, stop_probability=0.4),
    "svip": Svip(max_draft_tokens=CAP, stop_root_entropy=1.0),
    "adaedl": AdaEdl(max_draft_tokens=CAP, stop_bound=0.5, target_acceptance=0.6),
    "gammatune": GammaTune(**WINDOW),
    "gammatune_plus": GammaTunePlus(**WINDOW, stop_probability=0.4),
}
AHEAD: dict[str, dict[str, int]] = {
    "none": {},
    "branches": {"num_ahead_tokens": CAP + 1, "num_branches": 2},
}
every_mode = pytest.mark.parametrize("ahead", AHEAD.values(), ids=AHEAD)
PROMPTS = [[token % VOCAB_SIZE for token in prompt] for prompt in prompts_of_lengths(5, 2, 11, 8, 3, 6)]


@pytest.fixture(autouse=True)
def adapts_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threshold of AdaEDL moves so far that a row's history matters."""
    monkeypatch.setattr(thresholds, "STEP", 0.2)
    monkeypatch.setattr(thresholds, "MOMENTUM", 0.5)


def num_lengths(stats: Stats) -> int:
    """How many lengths the blocks with candidates have."""
    return int(np.count_nonzero(stats.draft_length_histogram[1:]))


@pytest.mark.parametrize(
    ("mode", "name"), [("none", "confidence"), ("none", "adaedl"), ("branches", "gammatune_plus")]
)
def test_output_follows_the_target_s_distribution(mode: str, name: str) -> None:
    """A policy looks at drawn tokens before it stops: each of them has to be kept.

    24,000 tokens. With the token after which confidence stops thrown away, p is 0 (below 1e-300).
    """
    replica = markov_replica(policy=POLICIES[name], **AHEAD[mode])
    found = p_values(replica, markov_pair()[0])
    assert min(found) > ALARM, found
    stats = replica.stats_recorder.close_shard(0)
    assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95
    assert num_lengths(stats) > 1


@dataclass(frozen=True)
class Countdown(LengthPolicy):
    """Blocks of five tokens, three, one, four, two, and so on: a length tells how many blocks came before."""

    max_draft_tokens: int = CAP
    initial_history = (5.0,)

    def wants(self, rows: DraftSequences) -> np.ndarray:
        return rows.histories_RH[:, 0].astype(np.int64)

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        return (blocks.histories_RH + 2) % 5 + 1


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("none", "svip"),
        ("none", "adaedl"),
        ("none", "gammatune"),
        ("branches", "hf_heuristic"),
        ("branches", "confidence"),
        ("branches", "gammatune_plus"),
    ],
)
def test_a_row_drafts_the_same_in_any_batch_and_after_a_preemption(mode: str, name: str) -> None:
    """Its history moves with it into another slot, and a repeated block is drafted as before."""
    requests = requests_for(PROMPTS[:4])
    common: dict[str, Any] = {"settings": SAMPLED, "max_new_tokens": 40, "max_seq_len": 52}
    common |= {"policy": POLICIES[name], **AHEAD[mode]}
    together = Harness(*markov_pair(), **common).generate(requests)
    stats = check_preempted(*markov_pair(), requests, together, 22, **common)
    assert num_lengths(stats) > 1


@every_mode
def test_a_repeated_block_that_was_drafted_ahead_has_the_same_length(ahead: dict[str, int]) -> None:
    """Its length was chosen before the previous block was resolved; the row's history has changed since."""
    target, requests = markov_pair()[0], requests_for(PROMPTS)
    common: dict[str, Any] = {"max_new_tokens": 40, "max_seq_len": 52, "policy": Countdown(), **ahead}
    together = Harness(target, target, **common).generate(requests)
    check_preempted(target, target, requests, together, 17, 22, **common)
