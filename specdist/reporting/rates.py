"""Verification rate against discard rate: the run, the bound of all policies, and what others would do.

Both are per token of the completions: target passes of a row, and draft tokens that came to nothing
(SpecDec++, Huang et al. 2024, section 2). Fewer of both is better.

B blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdist.policies import DraftedRows, DraftFeatures, FixedLength, LengthPolicy, RoundContext
from specdist.policies.confidence import ConfidenceThreshold
from specdist.policies.svip import Svip
from specdist.reporting.runs import ReportedRun
from specdist.reporting.traces import Blocks, blocks_of
from specdist.stats.shard import Stats
from specdist.theory.formulas import tokens_per_call
from specdist.utils.errors import UserError

FORMULA_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10)
TUNED_FILE = "settings.json"


@dataclass(frozen=True)
class Setting:
    """Where a setting of a policy stands; ``label`` tells its options."""

    label: str
    verification_rate: float
    discard_rate: float


# The settings of every policy, by its name.
Settings = Mapping[str, Sequence[Setting]]


@dataclass(frozen=True)
class Tuned:
    """What ``jobs/tune.py`` has replayed: every setting, and the oracle, which random draws do not have."""

    path: Path
    config: Mapping[str, Any]
    settings: Settings
    oracle: Setting | None

    def differences(self, run: ReportedRun) -> list[str]:
        """Options that the replays and the run do not have in common, as people read them."""
        return [
            f"{name} {value} (this run: {run.config[name]})"
            for name, value in self.config.items()
            if name in run.config and run.config[name] != value
        ]


def read_tuned(folder: Path) -> Tuned:
    """Raises :class:`UserError` for a folder without the replays of ``jobs/tune.py``."""
    path = folder / TUNED_FILE
    try:
        document = json.loads(path.read_bytes())
        settings: dict[str, list[Setting]] = {}
        for item in document["settings"]:
            settings.setdefault(item["policy"], []).append(_setting(item))
        oracle = document["oracle"]
        return Tuned(folder, dict(document["config"]), settings, _setting(oracle) if oracle else None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--tune {folder} has no readable {TUNED_FILE} ({error!r}): name the --output folder of "
            "jobs/tune.py; if an older version wrote it, run that again with --replay_only"
        ) from error


def _setting(item: Mapping[str, Any]) -> Setting:
    label = item["label"] if item["label"] else item["policy"]
    return Setting(str(label), float(item["verification_rate"]), float(item["discard_rate"]))


def oracle_of(stats: Stats) -> Setting | None:
    """Theorem 4.1 of SpecDec++: N_target = |S| + 1 of every completion, and nothing is discarded.

    S counts the positions between a completion's first and last token where the draft's token is not
    accepted. A run sees this at positions that were verified; how many there are in all is worked out with
    the chance α that it measured.
    """
    acceptance, num_tokens = stats.verified_acceptance_rate, stats.num_completion_tokens
    if acceptance is None or not num_tokens:
        return None
    num_between = max(0, num_tokens - 2 * stats.num_completions)
    num_target = (1 - acceptance) * num_between + stats.num_completions
    return Setting("oracle", num_target / num_tokens, 0.0)


def formula_settings(stats: Stats) -> list[Setting]:
    """Fixed lengths, if every verified token were accepted with the run's α (Leviathan et al. 2023, Eq. 1).

    As in a run, a completion's tokens from outside of any round count too.
    """
    acceptance, per_token = stats.verified_acceptance_rate, _round_tokens_per_token(stats)
    if acceptance is None or per_token is None:
        return []
    found = []
    for length in FORMULA_LENGTHS:
        tokens = tokens_per_call(acceptance, length)
        found.append(Setting(f"K = {length}", per_token / tokens, per_token * (length + 1 - tokens) / tokens))
    return found


def replay_blocks(run: ReportedRun) -> Settings | None:
    """What shorter blocks would have given, estimated from the blocks of a run that drafted a fixed length in
    turns; None of any other run.

    A policy that stops within the run's own blocks sees just what was drafted there. What it would have met
    after a block that it had cut is not in the trace: blocks are taken to begin at places that are alike.
    An exhaustive trace (``jobs/tune.py``) needs no such assumption.
    """
    fixed_in_turns = run.config.get("policy") == "fixed" and run.config.get("overlap") == "none"
    if run.trace is None or not fixed_in_turns or not run.is_exact:
        return None
    blocks = blocks_of(run.trace)
    longest = int(blocks.num_drafted_B.max())
    policies: dict[str, list[tuple[str, LengthPolicy]]] = {
        "fixed": [(f"K = {length}", FixedLength(length)) for length in range(1, longest + 1)],
        "confidence": [
            (
                f"stop_probability {threshold:g}",
                ConfidenceThreshold(max_draft_tokens=longest, stop_probability=threshold),
            )
            for threshold in ConfidenceThreshold.grid["stop_probability"]
        ],
        "svip": [
            (f"stop_root_entropy {threshold:g}", Svip(max_draft_tokens=longest, stop_root_entropy=threshold))
            for threshold in Svip.grid["stop_root_entropy"]
        ],
    }
    return {
        name: [_estimate(label, policy, blocks, run.total) for label, policy in settings]
        for name, settings in policies.items()
    }


def _estimate(label: str, policy: LengthPolicy, blocks: Blocks, stats: Stats) -> Setting:
    lengths_B = _cut_lengths(policy, blocks)
    num_accepted = int(np.minimum(lengths_B, blocks.num_accepted_B).sum())
    # Rounds of rows that had no room for a block: as many to a block as in the whole run.
    num_rounds = len(lengths_B) * stats.num_row_steps / stats.num_drafts
    per_token = _round_tokens_per_token(stats) or 1.0
    num_tokens = (num_rounds + num_accepted) / per_token
    return Setting(label, num_rounds / num_tokens, (int(lengths_B.sum()) - num_accepted) / num_tokens)


def _cut_lengths(policy: LengthPolicy, blocks: Blocks) -> np.ndarray:
    """[B]: where the policy would have ended each block, at the latest where the run did."""
    lengths_B = np.zeros(len(blocks.num_drafted_B), np.int64)
    active_B = np.arange(len(lengths_B))
    for depth in range(blocks.features_3BD.shape[2]):
        active_B = active_B[blocks.num_drafted_B[active_B] > depth]
        features = DraftFeatures(*blocks.features_3BD[:, active_B, depth - 1]) if depth else None
        wants_B = policy.wants_more(
            DraftedRows(
                slots_R=active_B,
                draft_rows_R=active_B,
                histories_RH=np.zeros((len(active_B), 0)),
                num_drafted=depth,
                features=features if policy.uses_features else None,
                reach_R=np.ones(len(active_B)),
                round=RoundContext(num_rows=1, num_pass_tokens=1, is_ahead=False),
            )
        )
        active_B = active_B[wants_B]
        lengths_B[active_B] = depth + 1
    return lengths_B


def _round_tokens_per_token(stats: Stats) -> float | None:
    """Tokens that rounds committed, over those of the completions: the first come from prompts' passes."""
    if not stats.num_completion_tokens:
        return None
    return (stats.num_row_steps + stats.num_accepted_tokens) / stats.num_completion_tokens
