"""Verification rate against discard rate: the run, the bound of all policies, and other policies.

Both are per completion token: target passes of a sequence, and draft tokens that were discarded (SpecDec++,
Huang et al. 2024, section 5.1). Lower is better.

B blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdist.data.stats.shard import Stats
from specdist.policies import DraftFeatures, DraftSequences, FixedLength, LengthPolicy, RoundContext
from specdist.policies.formulas import tokens_per_call
from specdist.policies.lengths.thresholds import ConfidenceThreshold, Svip
from specdist.results.report.panels.traces import Blocks, blocks_of
from specdist.results.report.runs import ReportedRun
from specdist.utils.errors import UserError

FORMULA_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10)
TUNED_FILE = "settings.json"


@dataclass(frozen=True)
class Setting:
    """The rates of a policy's setting; ``label`` names its options."""

    label: str
    verification_rate: float
    discard_rate: float


# The settings of every policy, by its name.
Settings = Mapping[str, Sequence[Setting]]


@dataclass(frozen=True)
class Tuned:
    """The replays of ``jobs/tune.py``: every setting, and the oracle, None for random draws."""

    path: Path
    config: Mapping[str, Any]
    settings: Settings
    oracle: Setting | None

    def differences(self, run: ReportedRun) -> list[str]:
        """Options in which the replays and the run differ, as text."""
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
    return Setting(
        str(item["label"] or item["policy"]), float(item["verification_rate"]), float(item["discard_rate"])
    )


def oracle_of(stats: Stats) -> Setting | None:
    """Theorem 4.1 of SpecDec++: each completion takes N_target = |S| + 1 passes, and nothing is discarded.

    S are the positions between a completion's first and last token where the draft's token is not accepted.
    A run knows this only for verified positions; the total is estimated with its acceptance rate α.
    """
    acceptance, num_tokens = stats.verified_acceptance_rate, stats.num_completion_tokens
    if acceptance is None or not num_tokens:
        return None
    num_between = max(0, num_tokens - 2 * stats.num_completions)
    num_target = (1 - acceptance) * num_between + stats.num_completions
    return Setting("oracle", num_target / num_tokens, 0.0)


def formula_settings(stats: Stats) -> list[Setting]:
    """Fixed lengths, if each verified token were accepted with the run's α (Leviathan et al. 2023, Eq. 1).

    As in a run, tokens of a completion that no round committed count too.
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
    """Estimates for policies with shorter blocks, from a run that drafted a fixed length in turns; None for
    other runs.

    A policy that stops within the run's blocks sees what was drafted there. Its next block would begin
    elsewhere, which the trace does not have: blocks are assumed to be alike wherever they begin. An
    exhaustive trace (``jobs/tune.py``) needs no such assumption.
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
    # Rounds without room for a block: as many per block as in the whole run.
    num_rounds = len(lengths_B) * stats.num_row_steps / stats.num_drafts
    per_token = _round_tokens_per_token(stats) or 1.0
    num_tokens = (num_rounds + num_accepted) / per_token
    return Setting(label, num_rounds / num_tokens, (int(lengths_B.sum()) - num_accepted) / num_tokens)


def _cut_lengths(policy: LengthPolicy, blocks: Blocks) -> np.ndarray:
    """[B] lengths at which the policy would have ended each block, at most those of the run."""
    lengths_B = np.zeros(len(blocks.num_drafted_B), np.int64)
    active_B = np.arange(len(lengths_B))
    for depth in range(blocks.features_3BD.shape[2]):
        active_B = active_B[blocks.num_drafted_B[active_B] > depth]
        features = DraftFeatures(*blocks.features_3BD[:, active_B, depth - 1]) if depth else None
        wants_B = policy.wants_more(
            DraftSequences(
                slots_R=active_B,
                draft_slots_R=active_B,
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
    """The share of the completions' tokens that rounds committed; others come from passes over prompts."""
    if not stats.num_completion_tokens:
        return None
    return (stats.num_row_steps + stats.num_accepted_tokens) / stats.num_completion_tokens
