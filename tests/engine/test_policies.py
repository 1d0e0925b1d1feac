"""Every policy in every mode: the target's distribution, its greedy tokens, and rows that do not depend on
one another.

The thresholds are such that on these models blocks have many lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from specdist.data.stats.shard import Stats
from specdist.policies import (
    AdaEdl,
    ConfidenceThreshold,
    DraftSequences,
    FixedLength,
    GammaTune,
    GammaTunePlus,
    HfHeuristic,
    LengthPolicy,
    Svip,
    VerifiedBlocks,
)
from specdist.policies.lengths import thresholds
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import markov_pair
from tests.engine.sampled import ALARM, FEWER_SAMPLES, markov_replica, p_values
from tests.engine.test_coupling import COUPLED
from tests.engine.test_greedy import prompts_of_lengths
from tests.engine.test_identity import SAMPLED, check_preempted
from tests.models.families import noisy_copy, tiny_model

CAP = 6


def policies_by_name(
    *, stop_probability: float, stop_root_entropy: float, stop_bound: float
) -> dict[str, LengthPolicy]:
    gammatune = {"num_draft_tokens": 3, "max_draft_tokens": CAP, "length_rate": 0.5}
    return {
        "hf_heuristic": HfHeuristic(num_draft_tokens=3, max_draft_tokens=CAP),
        "confidence": ConfidenceThreshold(max_draft_tokens=CAP, stop_probability=stop_probability),
        "svip": Svip(max_draft_tokens=CAP, stop_root_entropy=stop_root_entropy),
        "adaedl": AdaEdl(max_draft_tokens=CAP, stop_bound=stop_bound, target_acceptance=0.6),
        "gammatune": GammaTune(**gammatune),
        "gammatune_plus": GammaTunePlus(**gammatune, stop_probability=stop_probability),
    }  # fmt: skip


# For a vocabulary of 96, over which these models are nearly uniform, and for the Markov pair.
POLICIES = policies_by_name(stop_probability=0.12, stop_root_entropy=1.75, stop_bound=0.2)
SMALL_POLICIES = policies_by_name(stop_probability=0.4, stop_root_entropy=1.0, stop_bound=0.5)
every_policy = pytest.mark.parametrize("name", POLICIES)
AHEAD: dict[str, dict[str, int]] = {
    "none": {},
    "branches": {"num_ahead_tokens": CAP + 1, "num_branches": 2},
}
every_mode = pytest.mark.parametrize("ahead", AHEAD.values(), ids=AHEAD)
# Ahead no policy changes a token, as is tested below: of those that look at tokens, each kind once.
CASES = [
    *(("none", name) for name in POLICIES),
    *(("branches", name) for name in ("confidence", "gammatune_plus")),
]


@pytest.fixture(autouse=True)
def adapts_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threshold of AdaEDL moves so far that a row's history matters."""
    monkeypatch.setattr(thresholds, "STEP", 0.2)
    monkeypatch.setattr(thresholds, "MOMENTUM", 0.5)


def num_lengths(stats: Stats) -> int:
    """How many lengths the blocks with candidates have."""
    return int(np.count_nonzero(stats.draft_length_histogram[1:]))


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_output_follows_the_target_s_distribution(mode: str, name: str) -> None:
    """A policy looks at drawn tokens before it stops: each of them has to be kept.

    24,000 tokens. With the token after which confidence stops thrown away, p is 0 (below 1e-300).
    """
    replica = markov_replica(policy=SMALL_POLICIES[name], **AHEAD[mode])
    found = p_values(replica, markov_pair()[0], FEWER_SAMPLES)
    assert min(found) > ALARM, found
    stats = replica.stats_recorder.close_shard(0)
    assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95
    assert num_lengths(stats) > 1


def check_coupled(**options: Any) -> None:
    """The tokens are those of the target alone, and blocks have several lengths."""
    target = tiny_model("llama", seed=3)
    requests = requests_for(prompts_of_lengths(5, 23, 2), num_samples=2)
    common: dict[str, Any] = {"settings": COUPLED, "eos": [7], "max_new_tokens": 24}
    alone = Harness(target, None, **common).generate(requests)
    replica = Harness(target, noisy_copy(target), **options, **common)
    assert [c.token_ids for c in replica.generate(requests)] == [c.token_ids for c in alone]
    assert num_lengths(replica.stats_recorder.close_shard(0)) > 1


@every_policy
@every_mode
def test_coupled_tokens_are_those_of_the_target_alone(name: str, ahead: dict[str, int]) -> None:
    check_coupled(policy=POLICIES[name], **ahead)


@dataclass(frozen=True)
class Countdown(LengthPolicy):
    """Blocks of five tokens, three, one, four, two, and so on: a length tells how many blocks came before."""

    max_draft_tokens: int = CAP
    initial_history = (5.0,)

    def wants(self, rows: DraftSequences) -> np.ndarray:
        return rows.histories_RH[:, 0].astype(np.int64)

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        return (blocks.histories_RH + 2) % 5 + 1


@every_policy
@every_mode
def test_a_row_drafts_the_same_in_any_batch_and_after_a_preemption(name: str, ahead: dict[str, int]) -> None:
    """Its history moves with it into another slot, and a repeated block is drafted as before."""
    target = tiny_model("llama", seed=3)
    draft = noisy_copy(target)
    requests = requests_for(prompts_of_lengths(5, 2, 11, 8))
    common: dict[str, Any] = {"settings": SAMPLED, "max_new_tokens": 40, "max_seq_len": 52, **ahead}
    common["policy"] = POLICIES[name]
    together = Harness(target, draft, **common).generate(requests)
    stats = check_preempted(target, draft, requests, together, 22, **common)
    assert num_lengths(stats) > 1


def test_ahead_the_policy_changes_no_token() -> None:
    """Under rejection too: every next token but the last has a drafted token to verify."""
    target = tiny_model("llama", seed=3)
    found = []
    for policy in (FixedLength(CAP), *POLICIES.values()):
        replica = Harness(target, noisy_copy(target), policy=policy, settings=SAMPLED,
                          num_ahead_tokens=CAP + 1, num_branches=2)  # fmt: skip
        found.append([c.token_ids for c in replica.generate(requests_for(prompts_of_lengths(5, 23, 11)))])
    assert all(token_ids == found[0] for token_ids in found)


@every_mode
def test_a_repeated_block_that_was_drafted_ahead_has_the_same_length(ahead: dict[str, int]) -> None:
    """Its length was chosen before the previous block was resolved; the row's history has changed since."""
    target = tiny_model("llama", seed=3)
    requests = requests_for(prompts_of_lengths(5, 2, 11, 8, 3, 6))
    common: dict[str, Any] = {"max_new_tokens": 40, "max_seq_len": 52, "policy": Countdown(), **ahead}
    together = Harness(target, target, **common).generate(requests)
    check_preempted(target, target, requests, together, 17, 22, **common)


@every_policy
@every_mode
def test_a_draft_that_is_the_target_is_accepted_always(name: str, ahead: dict[str, int]) -> None:
    target = tiny_model("llama", seed=3)
    replica = Harness(target, target, policy=POLICIES[name], **ahead, settings=SAMPLED, max_new_tokens=16)
    replica.generate(requests_for(prompts_of_lengths(5, 23, 2)))
    stats = replica.stats_recorder.close_shard(0)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    assert stats.num_misses == 0
