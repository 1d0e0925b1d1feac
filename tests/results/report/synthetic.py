"""Run folders without any model: rows of coins that the draft wins or loses, and the statistics of that."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from specdist.data.leases.opening import open_run_folder
from specdist.data.run.manifest import Manifest
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.rows import RowResult, shard_table
from specdist.data.stats.shard import Stats
from specdist.data.stats.traces import TracedToken, trace_table

MS = 1_000_000
NUM_TOKENS = 40
BEGIN_UNIX_NS = 1_700_000_000 * 10**9
BAD_PROMPT = "<script>document.title = 'taken over'</script> & more"
BAD_REASON = "the prompt has <b>9000</b> tokens"


@dataclass(frozen=True, kw_only=True)
class SyntheticRun:
    """What kind of run; ``num_finished`` shards of ``num_shards`` are done."""

    num_shards: int = 4
    num_finished: int = 4
    rows_per_shard: int = 6
    num_draft_tokens: int = 4
    is_exact: bool = True
    is_traced: bool = True
    has_draft: bool = True
    num_error_rows: int = 0
    num_replicas: int = 1
    world_size: int = 3


def write_run(path: Path, run: SyntheticRun) -> Path:
    """The folder of such a run; the same every time."""
    folder = open_run_folder(path, _manifest(run), yaml.safe_dump(_config(run)), overwrite=False)
    for shard in range(run.num_finished):
        _finish_shard(folder, shard, run)
    return path


def _config(run: SyntheticRun) -> dict[str, Any]:
    policy = "fixed" if run.is_exact else "sprinter"
    return {
        "prompts": "data/prompts.parquet", "output": "runs/synthetic", "target": "models/target",
        "draft": "models/draft" if run.has_draft else None, "policy": policy if run.has_draft else "none",
        "num_draft_tokens": run.num_draft_tokens,
        "overlap": "synchronous",
        "acceptance": "rejection", "temperature": 0.7, "max_new_tokens": NUM_TOKENS, "stop": [],
        "rows_per_shard": run.rows_per_shard, "trace": run.is_traced,
    }  # fmt: skip


def _manifest(run: SyntheticRun) -> Manifest:
    return Manifest(
        fingerprint={
            "num_rows": run.num_shards * run.rows_per_shard,
            "rows_per_shard": run.rows_per_shard,
            "num_samples": 1,
            "num_draft_tokens": run.num_draft_tokens if run.has_draft else None,
        },
        info={
            "exact": run.is_exact, "reproducibility": "tokens", "target": "models/target",
            "draft": "models/draft" if run.has_draft else None, "world_size": run.world_size, "device": "cpu",
            "draft_placement": ("own" if run.world_size > 1 else "shared") if run.has_draft else None,
            "versions": {"specdist": "0.1.0", "torch": "2.13.0"},
        },
    )  # fmt: skip


def _finish_shard(folder: RunFolder, shard: int, run: SyntheticRun) -> None:
    generator = random.Random(shard)
    stats, results = Stats(), []
    for row in range(run.rows_per_shard):
        row_id = shard * run.rows_per_shard + row
        if row < run.num_error_rows:
            results.append(error_row(row_id))
        else:
            results.append(coin_row(row_id, generator, stats, run))
    stats.num_rows = run.rows_per_shard
    stats.num_error_rows = run.num_error_rows
    stats.num_completions = run.rows_per_shard - run.num_error_rows
    stats.num_completion_tokens = sum(result.num_completion_tokens for result in results)
    stats.num_prompt_tokens = 9 * stats.num_completions
    if stats.num_completions:
        _add_times(stats, shard, generator, run)
    inputs = pa.table({"reference": [f"reference {row}" for row in range(run.rows_per_shard)]})
    table = shard_table(
        inputs, results, first_row=shard * run.rows_per_shard, num_samples=1, is_exact=run.is_exact
    )
    trace = trace_table((result.row_id, 0, result.trace) for result in results) if run.is_traced else None
    document = {
        "exact": run.is_exact,
        "replica": f"replica-{shard % run.num_replicas}",
        **stats.to_json(),
    }
    folder.finish_shard(shard, table, document, trace)


def coin_row(row_id: int, generator: random.Random, stats: Stats, run: SyntheticRun) -> RowResult:
    """A completion: its first token from the prompt's pass, then round after round."""
    num_tokens, round_, trace = 1, 0, []
    while num_tokens < NUM_TOKENS:
        round_ += 1
        room = NUM_TOKENS - num_tokens - 1
        num_drafted = min(run.num_draft_tokens, room) if run.has_draft else 0
        entropies = [generator.uniform(0, 3) for _ in range(num_drafted)]
        num_accepted = 0
        while num_accepted < num_drafted and generator.random() < chance(entropies[num_accepted]):
            num_accepted += 1
        trusted = num_accepted if not run.is_exact else 0
        stats.observe_block(num_drafted=num_drafted, num_accepted=num_accepted, num_trusted=trusted)
        trace += [
            TracedToken(
                round_, depth, num_tokens + depth, 7, entropy, 1 - entropy / 4, 1 - entropy / 5,
                chance(entropy), depth <= num_accepted, depth < num_accepted,
            )
            for depth, entropy in enumerate(entropies)
        ]  # fmt: skip
        num_tokens += num_accepted + 1
    return RowResult(
        row_id=row_id, sample_index=0, prompt=f"prompt {row_id}", completion="text",
        completion_ids=(7,) * num_tokens, finish_reason="length", error=None, num_prompt_tokens=9,
        num_completion_tokens=num_tokens, num_spec_steps=round_, num_draft_tokens=len(trace),
        num_accepted_draft_tokens=num_tokens - round_ - 1, trace=tuple(trace),
    )  # fmt: skip


def chance(entropy: float) -> float:
    """Of a token to be accepted."""
    return 0.95 - 0.2 * entropy


def error_row(row_id: int) -> RowResult:
    return RowResult(
        row_id=row_id, sample_index=0, prompt=BAD_PROMPT, completion="", completion_ids=(),
        finish_reason="error", error=BAD_REASON, num_prompt_tokens=0, num_completion_tokens=0,
        num_spec_steps=0, num_draft_tokens=0, num_accepted_draft_tokens=0,
    )  # fmt: skip


def _add_times(stats: Stats, shard: int, generator: random.Random, run: SyntheticRun) -> None:
    """Passes of four rows each, and what they took; a replica's shards one after the other."""
    for _ in range(stats.num_row_steps // 4 + 1):
        stats.observe_target_pass(num_tokens=20, time_ns=int(20 * MS * generator.uniform(0.9, 1.1)))
    if run.has_draft:
        stats.observe_draft_passes([4] * (stats.num_draft_tokens // 4 + generator.randrange(1, 40)))
        stats.draft_ns.draft = int(4 * MS * stats.num_draft_passes * generator.uniform(0.9, 1.1))
        stats.draft_ns.transfer = MS * stats.num_target_passes
    stats.target_ns.verify = sum(stats.target_pass_ns_per_size.values())
    stats.target_ns.prefill, stats.target_ns.host = 30 * MS, 20 * MS
    stats.target_ns.idle = stats.draft_ns.draft
    stats.draft_ns.idle = stats.target_ns.verify if run.has_draft else 0
    stats.wall_ns = stats.target_ns.total
    stats.peak_memory_bytes.target = 500 * 2**20
    begin_ns = BEGIN_UNIX_NS + shard // run.num_replicas * stats.wall_ns
    stats.work_span.extend(begin_ns, begin_ns + stats.wall_ns)
