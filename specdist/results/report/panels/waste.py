"""SpecDec++'s Figure 3: how often the target verifies, and how many draft tokens are discarded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdist.policies.registry import TARGET_ONLY
from specdist.results.fronts import pareto_front
from specdist.results.report.formats import number
from specdist.results.report.markup import left_out, noted, paragraph, table
from specdist.results.report.panel import Panel, label_of
from specdist.results.report.panels.rates import (
    Setting,
    Settings,
    Tuned,
    formula_settings,
    oracle_of,
    replay_blocks,
)
from specdist.results.report.runs import ReportedRun
from specdist.results.report.style import BLACK, GREY, RUN_COLOURS, RUN_MARKERS, legend_below, one_plot

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
        help=HELP + (AHEAD if any(run.total.works_ahead for run in runs) else ""),
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
        "--trace and --policy fixed, in turns, for an estimate from the run's own blocks."
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
