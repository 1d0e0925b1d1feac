"""The output of a tuning run: a table, the Pareto plot, and the options of the best policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from specdist.config.groups import (
    BatchOptions,
    ModelOptions,
    QuantizationOptions,
    SamplingOptions,
    TrustOptions,
    values_of,
)
from specdist.data.store.files import write_atomically, write_json
from specdist.lab.tune.config import TuneConfig
from specdist.lab.tune.run import Outcome, TuningResult, run_tuning
from specdist.policies.costs import CostModel
from specdist.policies.registry import TARGET_ONLY
from specdist.results.fronts import pareto_front, relative_waste
from specdist.utils.table import Table

TABLE_FILE, PLOT_FILE, BEST_FILE = "table.txt", "pareto.png", "best.yaml"
SUMMARY_FILE, SETTINGS_FILE = "summary.json", "settings.json"
MARKERS = "os^vDPXp<>"
DOTS_PER_INCH = 150
# Options that settings, and a run, must have in common for their rates to be comparable.
COMPARED_OPTIONS = (
    "target", "target_quantization", "draft", "draft_quantization", "cache_dtype", "acceptance",
    "temperature", "top_k", "top_p", "max_num_seqs",
)  # fmt: skip


def tune(config: TuneConfig) -> tuple[str, dict[str, Any]]:
    """Run the job; the text and the document to print. Raises :class:`UserError`."""
    result = run_tuning(config)
    write_report(result)
    return console_report(result), summary(result)


def write_report(result: TuningResult) -> None:
    """Write all settings, the plot, and the options of the best setting into the output folder."""
    output = Path(result.config.output)
    table = _conditions(result) + "\n\n" + _table(result, result.outcomes) + "\n"
    write_atomically(output / TABLE_FILE, lambda file: file.write(table.encode()))
    write_atomically(output / BEST_FILE, lambda file: file.write(best_yaml(result).encode()))
    write_json(output / SUMMARY_FILE, summary(result))
    write_json(output / SETTINGS_FILE, settings_document(result))
    plot_pareto(result, output / PLOT_FILE)


def console_report(result: TuningResult) -> str:
    """The best setting of every policy, and the bound."""
    best = [found[0] for found in result.by_policy().values()]
    output = Path(result.config.output)
    files = [
        f"all {len(result.outcomes)} settings: {output / TABLE_FILE}",
        f"plot: {output / PLOT_FILE}",
        f"options of the best setting: {output / BEST_FILE}",
    ]
    wastes = {policy: _waste(result, found) for policy, found in result.by_policy().items()}
    shown = ", ".join(f"{policy} {waste:.2f}" for policy, waste in wastes.items() if waste is not None)
    waste = f"discarded draft tokens relative to fixed lengths at the same verification rate: {shown}"
    parts = [_conditions(result), _table(result, best), _heads_table(result), waste, "\n".join(files)]
    return "\n\n".join(part for part in parts if part)


def best_yaml(result: TuningResult) -> str:
    """Options for ``jobs/generate.py --config``, without prompts and output."""
    config, best = result.config, result.best
    options = {
        "acceptance": config.acceptance,
        **values_of(config, ModelOptions, SamplingOptions, BatchOptions, TrustOptions),
    }
    quantization = values_of(config, QuantizationOptions)
    options |= {name: kind for name, kind in quantization.items() if kind is not None}
    # The calibration's lengths are not limits of the run.
    del options["max_new_tokens"], options["max_seq_len"]
    run = config.run_config(best.candidate.policy, **best.candidate.run_options)
    options |= best.candidate.run_options
    options |= {"policy": best.candidate.policy, **run.policy_options}
    if best.candidate.policy == TARGET_ONLY:
        del options["draft"]
        options.pop("draft_quantization", None)
    remark = (
        f"# Chosen by jobs/tune.py on {result.num_prompts} prompts: {best.batched.tokens_per_s:.0f} tokens/s "
        f"predicted at batch {config.max_num_seqs},\n# {gain(result, best):.2f} times the target alone. "
        "Run with --config THIS --prompts FILE --output FOLDER.\n"
    )
    return remark + yaml.safe_dump(options, sort_keys=False)


def summary(result: TuningResult) -> dict[str, Any]:
    """The job's last line."""
    best = result.best
    return {
        "output": result.config.output,
        "policy": best.candidate.policy,
        "options": best.candidate.run_options,
        "num_prompts": result.num_prompts,
        "num_completion_tokens": result.num_tokens,
        "num_candidates": len(result.outcomes),
        "verification_rate": best.batched.verification_rate,
        "discard_rate": best.batched.discard_rate,
        "tokens_per_round": best.batched.tokens_per_round,
        "predicted_tokens_per_s": best.batched.tokens_per_s,
        "predicted_tokens_per_s_batch_1": best.alone.tokens_per_s,
        "ratio_to_target_only": gain(result, best),
        "policies": {policy: _best_of(result, found) for policy, found in result.by_policy().items()},
        "heads": heads_summary(result),
        "auc": dict(result.auc),
        "oracle_tokens_per_s": result.oracle.batched.tokens_per_s if result.oracle else None,
        "costs": dataclasses.asdict(result.costs),
    }


def settings_document(result: TuningResult) -> dict[str, Any]:
    """The rates and predicted speed of every setting and the oracle in the batch, for other programs."""
    return {
        "config": {name: getattr(result.config, name) for name in COMPARED_OPTIONS},
        "settings": [_setting(outcome) for outcome in result.outcomes],
        "oracle": _setting(result.oracle) if result.oracle else None,
    }


def _setting(outcome: Outcome) -> dict[str, Any]:
    return {
        "policy": outcome.candidate.policy,
        "options": outcome.candidate.run_options,
        "label": outcome.candidate.label(),
        "verification_rate": outcome.batched.verification_rate,
        "discard_rate": outcome.batched.discard_rate,
        "predicted_tokens_per_s": outcome.batched.tokens_per_s,
    }


def heads_summary(result: TuningResult) -> dict[str, dict[str, Any]]:
    """By path: the head's training, and its result at its best threshold, as SpecDec++'s Table 3."""
    return {
        path: {
            "kind": head.info.kind,
            "depth": head.info.depth,
            "rejected_weight": head.rejected_weight,
            "auc": result.auc.get(path),
            **_best_of(result, outcomes),
        }
        for path, (head, outcomes) in result.by_head().items()
    }


def _heads_table(result: TuningResult) -> str:
    """Empty without heads."""
    if not result.by_head():
        return ""
    rows: list[dict[str, str | int | None]] = []
    for path, figures in heads_summary(result).items():
        best = result.by_head()[path][1][0]
        rows.append(
            {
                "head": path,
                "depth": figures["depth"],
                "w_rej": _rounded(figures["rejected_weight"]),
                "AUC": _rounded(figures["auc"]),
                "discarded / fixed": _rounded(figures["waste_relative_to_fixed"]),
                "best options": " ".join(f"{k}={v:g}" for k, v in best.candidate.options.items()),
                "tokens/s": f"{best.batched.tokens_per_s:.1f}",
            }
        )
    aucs = {name: auc for name, auc in result.auc.items() if auc is not None and name not in result.by_head()}
    features = ", ".join(f"{name} {auc:.3f}" for name, auc in aucs.items())
    return f"{Table.of(rows, num_names=2).console()}\nAUC of the draft's own features: {features}"


def _best_of(result: TuningResult, found: Sequence[Outcome]) -> dict[str, Any]:
    """The settings of a policy with the most predicted tokens/s, in the batch and at batch size 1."""
    best_alone = max(found, key=lambda outcome: outcome.alone.tokens_per_s)
    return {
        "options": found[0].candidate.run_options,
        "predicted_tokens_per_s": found[0].batched.tokens_per_s,
        "options_batch_1": best_alone.candidate.run_options,
        "predicted_tokens_per_s_batch_1": best_alone.alone.tokens_per_s,
        "waste_relative_to_fixed": _waste(result, found),
    }


def _waste(result: TuningResult, found: Sequence[Outcome]) -> float | None:
    """Discarded tokens on the policy's Pareto front relative to fixed lengths; None without a draft."""
    if found[0].candidate.policy == TARGET_ONLY:
        return None
    fixed = [outcome.rates for outcome in result.by_policy()["fixed"]]
    return relative_waste([outcome.rates for outcome in found], fixed)


def gain(result: TuningResult, outcome: Outcome) -> float:
    """Predicted tokens/s of the batch over those of the target alone."""
    alone = next(each for each in result.outcomes if each.candidate.policy == TARGET_ONLY)
    return outcome.batched.tokens_per_s / alone.batched.tokens_per_s


def _conditions(result: TuningResult) -> str:
    config, costs = result.config, result.costs
    sampling = f"temperature {config.temperature:g}" if config.temperature else "greedy"
    num_rows = config.max_num_seqs
    return (
        f"{config.target} with draft {config.draft}: {result.num_prompts} prompts, {result.num_tokens} "
        f"completion tokens, {sampling}\n"
        f"batch 1: {_passes(costs, 1)}; batch {num_rows}: {_passes(costs, num_rows)}"
    )


def _passes(costs: CostModel, num_rows: int) -> str:
    draft, plain, block = (
        f"{float(ns) / 1e6:.2f} ms"
        for ns in (costs.draft(num_rows), costs.target(num_rows), costs.target(6 * num_rows))
    )
    return f"a draft step {draft}, a target pass {plain}, with 5 candidates per sequence {block}"


def _table(result: TuningResult, outcomes: Sequence[Outcome]) -> str:
    """Rates are those of the batch; only goodput's differ at batch size 1."""
    num_rows = result.config.max_num_seqs
    rows = [
        {
            "policy": outcome.candidate.policy,
            "options": outcome.candidate.label(),
            "N_target/N": f"{outcome.batched.verification_rate:.3f}",
            "N_discarded/N": f"{outcome.batched.discard_rate:.3f}",
            "tokens/round": f"{outcome.batched.tokens_per_round:.2f}",
            "tokens/s, batch 1": f"{outcome.alone.tokens_per_s:.1f}",
            f"tokens/s, batch {num_rows}": f"{outcome.batched.tokens_per_s:.1f}",
            "x target alone": f"{gain(result, outcome):.2f}",
        }
        for outcome in ([result.oracle] if result.oracle else []) + list(outcomes)
    ]
    return Table.of(rows, num_names=2).console()


def _rounded(number: float | None) -> str | None:
    return None if number is None else f"{number:.3g}"


def plot_pareto(result: TuningResult, path: Path) -> None:
    """SpecDec++'s Figure 3 (Huang et al. 2024): a curve per policy through its Pareto front."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot()
    outcomes = result.by_policy()
    outcomes.pop(TARGET_ONLY)
    for index, policy in enumerate(sorted(outcomes)):
        found = [outcome.rates for outcome in outcomes[policy]]
        front = pareto_front(found)
        marker, color = MARKERS[index % len(MARKERS)], f"C{index}"
        axes.plot(*zip(*found, strict=True), marker, color=color, alpha=0.25, markersize=4, linestyle="none")
        axes.plot(*zip(*front, strict=True), marker=marker, color=color, markersize=6, label=policy)
    if result.oracle is not None:
        oracle = result.oracle.batched
        axes.plot(
            oracle.verification_rate, oracle.discard_rate, "*", color="black", markersize=16, label="oracle",
            clip_on=False, linestyle="none",
        )  # fmt: skip
    best = result.best
    if best.candidate.policy != TARGET_ONLY:
        axes.plot(
            best.batched.verification_rate, best.batched.discard_rate, "o", markersize=15, fillstyle="none",
            color="black", linestyle="none", label=f"most tokens/s at batch {result.config.max_num_seqs}",
        )  # fmt: skip
    axes.set_xlabel("verification rate: target passes of a sequence per token")
    axes.set_ylabel("discard rate: rejected draft tokens per token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    sampling = f"temperature {result.config.temperature:g}" if result.config.temperature else "greedy"
    axes.set_title(
        f"{Path(result.config.target).name} with draft {Path(result.config.draft).name}, {sampling}"
    )
    write_atomically(path, lambda file: figure.savefig(file, format="png"))
