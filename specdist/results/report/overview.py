"""What a run was, its progress, and its most important numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from specdist.config.generate import GenerateConfig
from specdist.config.seeds import SEED_FIXES, seed_fixes
from specdist.data.run.manifest import UP_TO_ROUNDING
from specdist.data.stats.regression import NS_PER_S
from specdist.job.totals.spending import price_per_million
from specdist.results.report.formats import NOTHING, count, duration, number, percent, speed
from specdist.results.report.markup import banner, box, details, paragraph, table, tiles
from specdist.results.report.panel import Panel, label_of, table_by_run
from specdist.results.report.runs import ReportedRun, tokens_per_pass

DEFAULTS = {item.name: item.default for item in dataclasses.fields(GenerateConfig)}
NOT_COMPARED = ("output", "overwrite")


def banners(runs: Sequence[ReportedRun]) -> list[Markup]:
    """Warnings about runs that are not exact or not finished."""
    found = []
    for run in runs:
        if not run.is_exact:
            told = (
                "Its policy sprinter committed tokens that its verifier trusts, unverified by the target: "
                f"{count(run.total.num_trusted_tokens)} tokens, so the completions "
                "do not follow the target's distribution. (“exact: false” in the manifest.)"
            )
            found.append(banner(f"{run.label} is NOT exact.", told, class_="lossy", role="alert"))
        if run.status is not None:
            status = run.status
            told = (
                f"{status.num_done} of {status.num_shards} shards and {status.num_rows:,} of "
                f"{status.num_expected_rows:,} rows are done; shards running: {len(status.running)}, failed: "
                f"{len(status.failed)}, waiting: {status.num_waiting}. All figures below cover finished "
                "shards only. Start the run's command again to go on."
            )
            found.append(banner(f"{run.label} is not finished.", told, class_="unfinished", role="status"))
    return found


def summary_tiles(run: ReportedRun) -> Markup:
    """The most important figures of a single run, each with its meaning."""
    figures, total = run.summary, run.total
    found = [
        ("tokens/s", speed(figures["tokens_per_s"]), "completion tokens per second of one replica's work"),
        (
            f"tokens/s per {run.device_name}",
            speed(figures["tokens_per_s_per_device"]),
            f"over the replica's {run.num_devices:g} {run.device_name}{'s' if run.num_devices > 1 else ''}",
        ),
        (
            "tokens per target pass",
            number(tokens_per_pass(run.total)),
            "per sequence; 1 without a draft" if run.has_drafts else "per sequence; no draft was used",
        ),
    ]
    if run.has_drafts:
        accepted = percent(figures["draft_acceptance_rate"])
        found.append(("draft tokens accepted", accepted, f"of {count(total.num_draft_tokens)} drafted"))
    found += [
        ("rows", count(total.num_rows), f"{count(total.num_completion_tokens)} completion tokens"),
        ("error rows", count(total.num_error_rows), "rows without a completion"),
        (
            "cut completions",
            count(total.num_cut_completions),
            f"of {count(total.num_completions)}, by max_new_tokens or max_seq_len",
        ),
        (
            "work",
            duration(total.wall_ns / NS_PER_S),
            f"in {count(len(run.shards))} shard{'s' * (len(run.shards) > 1)}, all replicas together",
        ),
    ]
    price = price_per_million(run.config.get("gpu_price"), figures["tokens_per_s_per_device"])
    if price is not None:
        found.append(("price of a million tokens", f"{price:.3g}", "of completions, by --gpu_price"))
    return tiles(found)


def side_by_side(runs: Sequence[ReportedRun]) -> Panel:
    """The same figures of several runs."""
    rows = [
        ("exact", lambda run: "yes" if run.is_exact else "NO"),
        (
            "complete",
            lambda run: "yes" if run.status is None else f"{len(run.shards)} of {run.num_shards} shards",
        ),
        ("first token of a replica", lambda run: duration(run.summary["time_to_first_token_s"])),
        ("tokens/s of a replica", lambda run: speed(run.summary["tokens_per_s"])),
        ("tokens/s per rank or GPU", lambda run: speed(run.summary["tokens_per_s_per_device"])),
        ("ranks of a replica", lambda run: run.ranks),
        ("tokens per target pass and sequence", lambda run: number(tokens_per_pass(run.total))),
        ("draft tokens accepted", lambda run: percent(run.summary["draft_acceptance_rate"])),
        ("target passes per token", lambda run: number(run.total.verification_rate, 3)),
        ("draft tokens discarded per token", lambda run: number(run.total.discard_rate, 3)),
        ("rows", lambda run: count(run.total.num_rows)),
        ("error rows", lambda run: count(run.total.num_error_rows)),
        ("cut completions", lambda run: count(run.total.num_cut_completions)),
        ("completion tokens", lambda run: count(run.total.num_completion_tokens)),
        ("work", lambda run: duration(run.total.wall_ns / NS_PER_S)),
    ]
    return Panel(
        name="side-by-side",
        title="Side by side",
        help="The same figures of every run. Compare speeds only of runs on the same machine.",
        content=[table_by_run("", runs, rows)],
    )


def configuration(runs: Sequence[ReportedRun]) -> Panel:
    """Exactness and options; for several runs, first the options that differ."""
    rows = [
        ("exactness", lambda run: "exact" if run.is_exact else "NOT exact"),
        ("reproducibility", lambda run: str(run.info.get("reproducibility", NOTHING))),
        ("device", lambda run: str(run.info.get("device", NOTHING))),
        ("ranks of a replica", lambda run: run.ranks),
        *(
            (name, lambda run, name=name: str(run.info.get("versions", {}).get(name, NOTHING)))
            for name in ("specdist", "torch", "transformers", "deepspeed")
        ),
    ]
    content = [table_by_run("this run" if len(runs) == 1 else "", runs, rows)]
    options = dict.fromkeys(name for run in runs for name in run.config if name not in NOT_COMPARED)
    if len(runs) > 1:
        differing = [name for name in options if len({_shown(run.config, name) for run in runs}) > 1]
        content.insert(0, _options(runs, differing, "Options that differ"))
    else:
        given = [name for name in options if runs[0].config[name] not in (DEFAULTS.get(name), [])]
        content = [box([*content, _options(runs, given, "Options that are not the defaults")], "columns")]
    content.append(paragraph(_reproducibility(runs)))
    everything = [
        table(["option", "value"], [[name, _shown(run.config, name)] for name in run.config], num_texts=2,
              class_="free", caption=label_of(run, runs))
        for run in runs
    ]  # fmt: skip
    content.append(details("All options", everything))
    return Panel(
        name="configuration",
        title="Configuration and exactness",
        help="The options that the run was started with (config.yaml), and how far its tokens can be "
        "reproduced.",
        content=content,
    )


def _reproducibility(runs: Sequence[ReportedRun]) -> str:
    told = []
    if any(run.is_exact for run in runs):
        told.append("Exact: the completions follow the target's own distribution, whatever the draft.")
    for name in SEED_FIXES:
        of_class = [run for run in runs if run.info.get("reproducibility") == name]
        if of_class:
            is_rough = any(run.info.get(UP_TO_ROUNDING) for run in of_class)
            told.append(f"“{name}”: {seed_fixes(name, is_up_to_rounding=is_rough)}")
    return " ".join(told)


def _options(runs: Sequence[ReportedRun], names: Sequence[str], caption: str) -> Markup:
    if not names:
        return paragraph("All options are the same.")
    header = ["option", *(label_of(run, runs, "value") for run in runs)]
    rows = [[name, *(_shown(run.config, name) for run in runs)] for name in names]
    return table(header, rows, num_texts=1 + len(runs), caption=caption, class_="free")


def _shown(config: Mapping[str, Any], name: str) -> str:
    value = config.get(name)
    if value is None or value == []:
        return NOTHING
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
