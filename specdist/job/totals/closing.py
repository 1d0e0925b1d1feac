"""The last lines of a run: how it went, whether it is exact, and what to do next."""

from __future__ import annotations

import shlex

from specdist.data.run.manifest import Manifest
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.shard import Stats
from specdist.job.totals.report import frozen_costs, loop_line, rollout_line
from specdist.job.totals.spending import options_of, price_text

SHOW, STATUS = "python jobs/show.py", "python jobs/status.py"
CHECK = "loading_check"


def exactness(manifest: Manifest) -> str:
    """Whether the run is exact, in a few words."""
    info, settings = manifest.info, manifest.fingerprint
    if settings.get("policy") == "sprinter" and settings.get("verify", "doubted") == "doubted":
        return "NOT exact: --policy sprinter keeps tokens that the target has not verified"
    if info["exact"]:
        cache = settings.get("cache_dtype")
        own = (
            "target's own distribution"
            if cache is None
            else f"distribution of the target with a {cache} cache"
        )
        chosen = ", of which --rollout keeps what it accepts" if settings.get("rollout") else ""
        return f"exact: the completions follow the {own}{chosen}"
    reason = (info.get(CHECK) or {}).get("reason", "no target has been loaded yet")
    return f"NOT known to be exact: the loaded target could not be compared with its files ({reason})"


def closing_lines(folder: RunFolder, total: Stats, *, num_devices: float) -> list[str]:
    """Five or six lines for people on what all rows add up to, and what to do next. ``total``: of finished
    shards."""
    next_step = "to resume, start the same command, or submit the same job, again"
    if not folder.missing_shards():
        next_step = f"{SHOW} {shlex.quote(str(folder.path))}"
    lines = summary_lines(folder, total, num_devices=num_devices)
    return [*lines, f"output      {folder.path}; {next_step}"]


def summary_lines(folder: RunFolder, total: Stats, *, num_devices: float) -> list[str]:
    """All of them but the last, of what is in the folder."""
    total, finished = Stats(), total
    total.add(finished)
    plan = folder.plan()
    missing = folder.missing_shards()
    num_expected = plan.num_completions
    num_finished = num_expected - sum(map(plan.num_completions_of, missing))
    path = shlex.quote(str(folder.path))
    if missing:
        logs = [folder.part_logs(shard) for shard in sorted({*missing} & {*folder.begun_shards()})]
        num_kept = sum(len(found) for found, _ in logs)
        for _, stats in logs:
            total.add(Stats.from_json(stats or {}))
        rows = (
            f"{num_finished + num_kept:,} of {num_expected:,} are kept: {num_finished:,} in finished shards, "
            f"{num_kept:,} in unfinished shards"
        )
    else:
        shards = "1 finished shard" if plan.num_shards == 1 else f"{plan.num_shards} finished shards"
        rows = f"{num_finished:,} of {num_expected:,}, in {shards}"
    errors, speed = "none", "nothing was generated"
    acceptance = f"nothing was drafted: {_why_not(folder) if total.num_completion_tokens else 'no tokens'}"
    figures = total.summary(num_devices)
    if total.num_error_rows:
        errors = (
            f"{total.num_error_rows} of {total.num_rows} rows have an error instead of a completion; "
            f"{STATUS} {path} says why"
        )
    if figures["tokens_per_s"] is not None:
        speed = (
            f"{figures['tokens_per_s']:,.1f} tokens/s, {figures['tokens_per_s_per_device']:,.1f} per device; "
            f"{total.num_completion_tokens:,} tokens"
        )
        price = price_text(options_of(folder.config_path), figures["tokens_per_s_per_device"])
        speed += f"; {price}" if price else ""
    if figures["time_to_first_token_s"] is not None:
        speed += f"; the first one {figures['time_to_first_token_s']:,.1f} s after a replica's start"
    if figures["draft_acceptance_rate"] is not None:
        acceptance = (
            f"{figures['draft_acceptance_rate']:.1%} of the draft tokens, "
            f"{figures['mean_acceptance_length']:.2f} tokens per speculative step"
        )
    looping = total.num_looping_completions
    return [
        f"rows        {rows}",
        f"errors      {errors}",
        f"speed       {speed}",
        f"acceptance  {acceptance}; {exactness(folder.manifest)}",
        *([f"loops       {loop_line(looping, total.num_completions)}"] if looping else []),
        *([f"rollout     {rollout_line(total)}"] if total.num_attempts else []),
    ]


def _why_not(folder: RunFolder) -> str:
    """Why nothing was drafted."""
    settings, costs = folder.manifest.fingerprint, frozen_costs(folder)
    if settings["policy"] == "none":
        is_given = options_of(folder.config_path).get("draft") is not None
        return "--policy none uses no draft" if is_given else "no --draft was given"
    if costs is None or not any(costs.draft.ns):
        return f"--policy {settings['policy']} asked for no token, or the draft had none"
    rows = costs.context.num_rows
    step, alone, longer = costs.drafting_ns(rows), float(costs.target(rows)), float(costs.target(2 * rows))
    return (
        f"by the run's costs it does not pay at {rows} sequences: a draft step of them takes "
        f"{step / 1e6:,.1f} ms, a pass of the target {alone / 1e6:,.1f} ms without candidates and "
        f"{longer / 1e6:,.1f} ms with one of each"
    )
