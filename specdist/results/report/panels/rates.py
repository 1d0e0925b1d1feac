"""Verification rate against discard rate: the run, the bound of all policies, and other policies.

Both are per completion token: target passes of a sequence, and draft tokens that were discarded (SpecDec++,
Huang et al. 2024, section 5.1). Lower is better.

B blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdist.config.speculation import SYNCHRONOUS
from specdist.data.stats.shard import Stats
from specdist.policies import DraftFeatures, DraftSequences, FixedLength, LengthPolicy, RoundContext
from specdist.policies.formulas import tokens_per_call
from specdist.policies.lengths.thresholds import ConfidenceThreshold, Svip
from specdist.policies.registry import TARGET_ONLY
from specdist.results.fronts import pareto_front
from specdist.results.report.formats import number
from specdist.results.report.markup import left_out, noted, paragraph, table
from specdist.results.report.panel import Panel, label_of
from specdist.results.report.panels.traces import Blocks, blocks_of
from specdist.results.report.runs import ReportedRun
from specdist.results.report.style import BLACK, GREY, RUN_COLOURS, RUN_MARKERS, legend_below, one_plot
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
    """Estimates for policies with shorter blocks, from a run of a fixed length, drafted synchronously; None
    for other runs.

    A policy that stops within the run's blocks sees what was drafted there. Its next block would begin
    elsewhere, which the trace does not have: blocks are assumed to be alike wherever they begin. An
    exhaustive trace (``jobs/tune.py``) needs no such assumption.
    """
    is_fixed = run.config.get("policy") == "fixed" and run.config.get("overlap") == SYNCHRONOUS
    if run.trace is None or not is_fixed or not run.is_exact:
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
                round=RoundContext(num_rows=1, num_pass_tokens=1, is_asynchronous=False),
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


# Of replayed policies; runs have larger markers.
POLICY_MARKERS = "o^svDPXp<>"
POLICY_COLOURS = (*RUN_COLOURS, "#882255", "#44aa99", "#999933", GREY)
HELP = (
    "Target passes of a sequence (left is better) and discarded draft tokens (down is better), both per "
    "completion token. Longer drafts move left and up. No policy can be below or left of the oracle, which "
    "drafts exactly as far as the target will accept."
)

AHEAD = " Tokens drafted ahead and not used, including branches, count as discarded."


def rates(runs: Sequence[ReportedRun], tuned: Tuned | None) -> Panel:
    replayed, remark = _replayed(runs, tuned)
    oracles = _oracles(runs, tuned)
    figure = _figure(runs, replayed, oracles)
    content = [_points(runs, oracles)]
    if replayed:
        content.append(_nearest(runs[0], replayed))
    content.append(remark)
    if oracles and (tuned is None or tuned.oracle is None):
        is_greedy = all(run.config.get("temperature") == 0 for run in runs)
        bound = "" if is_greedy else "; for random draws it is a bound in expectation"
        content.append(
            paragraph(f"The oracle is computed with the measured α (SpecDec++, Theorem 4.1{bound}).")
        )
    return Panel(
        name="rates",
        title="Verification rate against discard rate",
        help=HELP + (AHEAD if any(run.total.is_asynchronous for run in runs) else ""),
        figure=figure,
        alt="Verification rate against discard rate",
        content=content,
    )


def _oracles(runs: Sequence[ReportedRun], tuned: Tuned | None) -> list[tuple[str, Setting]]:
    """Oracles by label, without those of lossy runs, which the bound does not hold for."""
    if tuned is not None and tuned.oracle:
        return [("oracle", tuned.oracle)]
    found = [(run.label, oracle_of(run.total)) for run in runs if run.is_exact]
    return [
        ("oracle" if len(runs) == 1 else f"oracle of {label}", oracle) for label, oracle in found if oracle
    ]


def _replayed(runs: Sequence[ReportedRun], tuned: Tuned | None) -> tuple[Settings, Markup]:
    """Policies to draw with the runs, and their source."""
    if tuned is not None:
        settings = {name: found for name, found in tuned.settings.items() if name != TARGET_ONLY}
        differences = list(chain.from_iterable(tuned.differences(run) for run in runs))
        told = f"Policies: replayed by jobs/tune.py on the prompts of its calibration ({tuned.path})."
        if differences:
            told += " Different from this run: " + "; ".join(dict.fromkeys(differences)) + "."
        return settings, paragraph(told)
    if len(runs) == 1:
        estimated = replay_blocks(runs[0])
        if estimated is not None:
            told = (
                "Policies: estimated from this run's blocks, and no longer than those. python jobs/tune.py "
                "replays every policy exactly; give its folder with --tune."
            )
            return estimated, paragraph(told)
    told = (
        "Other policies are left out. Give the folder of jobs/tune.py with --tune; or generate with "
        "--trace and --policy fixed, synchronously, for an estimate from the run's own blocks."
    )
    return {}, left_out(told)


def _figure(
    runs: Sequence[ReportedRun], replayed: Settings, oracles: Sequence[tuple[str, Setting]]
) -> Figure:
    figure, axes = one_plot(
        "verification rate: target passes per token", "discard rate: discarded tokens per token", 4.4
    )
    for index, (policy, settings) in enumerate(sorted(replayed.items())):
        _draw_policy(axes, policy, settings, POLICY_MARKERS[index], POLICY_COLOURS[index])
    for index, run in enumerate(runs):
        formula = formula_settings(run.total) if run.is_exact else []
        if formula and not replayed:
            label = "fixed K = 1 to 10 by formula" + (f", {run.label}" if len(runs) > 1 else "")
            points = [(item.verification_rate, item.discard_rate) for item in formula]
            axes.plot(*zip(*points, strict=True), ".:", color=RUN_COLOURS[index], label=label, linewidth=1.2)
    for index, run in enumerate(runs):
        colour, label = RUN_COLOURS[index] if len(runs) > 1 else BLACK, label_of(run, runs, "this run")
        axes.plot(
            run.total.verification_rate or 0.0, run.total.discard_rate or 0.0, linestyle="none", color=colour,
            marker=RUN_MARKERS[index], markersize=11, markeredgecolor="white", label=label, zorder=5,
        )  # fmt: skip
    for index, (label, oracle) in enumerate(oracles):
        axes.plot(
            oracle.verification_rate, oracle.discard_rate, "*", markersize=15, linestyle="none", label=label,
            color=RUN_COLOURS[index] if len(oracles) > 1 else BLACK, clip_on=False, zorder=6,
        )  # fmt: skip
    axes.margins(0.08)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    # Long fixed lengths discard so much that the other policies could not be distinguished.
    most = max(run.total.discard_rate or 0.0 for run in runs)
    axes.set_ylim(top=min(axes.get_ylim()[1], max(0.6, 3 * most)))
    legend_below(figure)
    return figure


def _draw_policy(axes: Axes, policy: str, settings: Sequence[Setting], marker: str, colour: str) -> None:
    points = [(item.verification_rate, item.discard_rate) for item in settings]
    axes.plot(*zip(*points, strict=True), marker, color=colour, alpha=0.25, markersize=4, linestyle="none")
    front = pareto_front(points)
    axes.plot(
        *zip(*front, strict=True), marker=marker, color=colour, markersize=5, linewidth=1.3, label=policy
    )


def _points(runs: Sequence[ReportedRun], oracles: Sequence[tuple[str, Setting]]) -> Markup:
    found = [
        (label_of(run, runs, "this run"), run.total.verification_rate, run.total.discard_rate) for run in runs
    ]
    found += [(label, oracle.verification_rate, oracle.discard_rate) for label, oracle in oracles]
    rows = [[label, *(number(rate, 3) for rate in both)] for label, *both in found]
    return table(["", "verification rate", "discard rate"], rows)


def _nearest(run: ReportedRun, replayed: Mapping[str, Sequence[Setting]]) -> Markup:
    """For each policy, the setting with the verification rate nearest to the run's."""
    rate = run.total.verification_rate or 0.0
    rows = []
    for policy, settings in sorted(replayed.items()):
        nearest = min(settings, key=lambda item: abs(item.verification_rate - rate))
        shown = noted(policy, nearest.label if nearest.label != policy else "")
        rows.append([shown, number(nearest.verification_rate, 3), number(nearest.discard_rate, 3)])
    caption = "For each policy, the setting with the nearest verification rate"
    return table(["policy", "verification rate", "discard rate"], rows, caption=caption)
