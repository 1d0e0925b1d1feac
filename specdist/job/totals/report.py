"""The totals of a run's finished shards, and a comparison of theory and practice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdist.data.run.run_folder import RunFolder
from specdist.data.run.segments import COSTS, EARLIER_COSTS
from specdist.data.stats.shard import Stats
from specdist.job.totals.predictions import Comparison, Predictions, predictions_of
from specdist.job.totals.totals import total_of
from specdist.policies.costs import CostModel
from specdist.utils.errors import UserError

# Label and format, by name.
THEORY = {
    "tokens_per_row_pass": ("tokens of a sequence per target pass", "{:.2f}"),
    "draft_acceptance_rate": ("draft tokens accepted", "{:.1%}"),
    "verification_rate": ("target passes of a sequence per token", "{:.3f}"),
    "discard_rate": ("draft tokens discarded per token", "{:.3f}"),
    "wall_time_factor": ("wall-time factor, of the whole replica", "{:.2f}"),
    "ready_rate": ("passes of a sequence with candidates", "{:.1%}"),
}
DRIFT = {
    "target_pass_s": ("seconds of a target pass", "{:.5f}"),
    "draft_step_s": ("seconds of a draft step", "{:.5f}"),
    "rounds_s": ("seconds of all rounds", "{:.2f}"),
}
# A run and its evaluation warn if more than this share of the completions was cut.
CUT_SHARE = 0.1
REGRESSIONS = {
    "measured": "timed",
    "fitted": "fitted to completions",
    "fitted_over_shards": "fitted to shards",
}


def total_stats(folder: RunFolder) -> Stats:
    """The statistics of all complete shards. Raises :class:`UserError` for damaged ones."""
    return total_of(folder, folder.complete_shards()).stats


def is_often_cut(num_cut: int, num_completions: int) -> bool:
    """Whether so many completions ended at a length limit that a warning is due."""
    return num_cut > CUT_SHARE * num_completions


def cut_line(num_cut: int, num_completions: int, settings: Mapping[str, Any]) -> str:
    """A sentence on completions that a length limit has cut. ``settings``: the manifest's fingerprint, or
    empty."""
    limits = [f"--{name} {settings.get(name, '')}".rstrip() for name in ("max_new_tokens", "max_seq_len")]
    share = num_cut / max(1, num_completions)
    line = (
        f"{num_cut:,} of {num_completions:,} completions ({share:.0%}) were cut by {' or '.join(limits)} "
        "(finish_reason length)"
    )
    if is_often_cut(num_cut, num_completions):
        line += ": raise --max_new_tokens for complete ones"
    return line


def frozen_costs(folder: RunFolder) -> CostModel | None:
    """The latest of :func:`all_costs`, if there are any."""
    found = all_costs(folder)
    return found[-1] if found else None


def all_costs(folder: RunFolder) -> list[CostModel]:
    """The manifest's costs of passes: those that were corrected, and those in use. Raises :class:`UserError`
    for damaged ones."""
    info = folder.manifest.info
    try:
        return [CostModel.from_json(each) for each in (*info.get(EARLIER_COSTS, ()), info.get(COSTS)) if each]
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{folder.manifest_path}: costs is damaged ({error}): delete this field and {EARLIER_COSTS}, and "
            "start the run's command again"
        ) from error


def totals_document(
    folder: RunFolder, total: Stats, *, num_devices: float, is_complete: bool
) -> dict[str, Any]:
    """The document in the last line that a run prints: its totals, and the predictions for them."""
    return {
        "output": str(folder.path),
        "exact": folder.manifest.info["exact"],
        "draft_placement": folder.manifest.info.get("draft_placement"),
        "complete": is_complete,
        **total.summary(num_devices),
        "predictions": run_predictions(folder, total).to_json(),
    }


def run_predictions(folder: RunFolder, total: Stats) -> Predictions:
    """Predictions for a run's total, by the costs that the manifest has frozen."""
    return predictions_of(total, frozen_costs(folder))


def check_results(folder: RunFolder) -> None:
    """Raises :class:`UserError` for damage that would keep the run from reporting its totals at its end."""
    frozen_costs(folder)
    total_stats(folder)


def comparison_lines(folder: RunFolder, total: Stats) -> list[str]:
    """Tables of what was predicted and measured; empty if nothing was drafted."""
    predictions, costs = run_predictions(folder, total), total.costs()
    lines = []
    if predictions.theory:
        lines += _table("theory and measurement", predictions.theory, THEORY)
        acceptance, ratio = _shown(predictions.acceptance, "{:.3f}"), _shown(predictions.cost_ratio, "{:.3f}")
        best = _shown(predictions.best_num_draft_tokens, "{}")
        lines.append(f"  acceptance {acceptance}, cost ratio {ratio}: best fixed length {best}")
    if predictions.drift:
        lines += _table("frozen costs beside this run", predictions.drift, DRIFT)
        share = _shown(predictions.target_share_in_curve, "{:.0%}")
        lines.append(f"  (target passes of measured sizes only: {share} of the time of all)")
    if predictions.theory:
        lines += [_regression(label, costs.get(name)) for name, label in REGRESSIONS.items()]
    return lines


def _table(title: str, figures: Mapping[str, Comparison], labels: Mapping[str, tuple[str, str]]) -> list[str]:
    lines = [f"{title:<40} {'predicted':>10} {'measured':>10} {'ratio':>7}"]
    for name, figure in figures.items():
        label, style = labels[name]
        predicted, measured = _shown(figure.predicted, style), _shown(figure.measured, style)
        lines.append(f"  {label:<38} {predicted:>10} {measured:>10} {_shown(figure.ratio, '{:.3f}'):>7}")
    return lines


def _regression(label: str, fit: Mapping[str, float] | None) -> str:
    if fit is None:
        return f"{f'time per pass, {label}':<40} unknown: too few passes, or too similar ones"
    return (
        f"{f'time per pass, {label}':<40} draft {fit['t_draft_s']:.5f} s, target {fit['t_target_s']:.5f} s, "
        f"R2 {fit['r_squared']:.3f}"
    )


def _shown(value: float | None, style: str) -> str:
    return "-" if value is None else style.format(value)
