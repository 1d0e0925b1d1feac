"""Where the time goes: shares of each kind of work, a trace of a short run, and lower bounds of pass times.

    python -m tests.lab.profile --synthetic 20m --acceptance 0.8 --placements separate --output runs/profile

The shares are those of an ordinary run. Then every method runs again for a few tokens under
``torch.profiler``, which slows it: the trace shows the phases of a round in each process, and the kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import logging
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdist.cli import Command
from specdist.data.stats.fields import DraftTimes, TargetTimes
from specdist.data.stats.shard import NS_PER_S
from specdist.data.store.files import write_atomically
from specdist.lab.benchmark.methods import shortened
from specdist.lab.benchmark.results import Circumstances
from specdist.lab.benchmark.run import Timed, measure
from specdist.utils.table import Table, decimals
from tests.lab.benchmark.config import ComparisonConfig
from tests.lab.benchmark.lineup import ComparedLineup, PlacedSpecdist
from tests.lab.benchmark.passes import FloorResult, measure_floors
from tests.lab.benchmark.setting import ComparedSetting, set_up_comparison
from tests.lab.draft_rank import torch_threads

FILE_NAME = "profile.json"
NUM_TRACED_TOKENS = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProfiledRun:
    """One way of running the draft at one batch size.

    Attributes:
        target_shares, draft_shares: of each side's time over the whole run, by kind of work.
        target_pass_s, draft_step_s: means over the run, without prompts; None where there was none.
        trace: name of the file, in the same folder.
    """

    name: str
    batch_size: int
    tokens_per_s: float
    target_shares: dict[str, float]
    draft_shares: dict[str, float]
    target_pass_s: float | None
    draft_step_s: float | None
    trace: str


@dataclass(frozen=True, kw_only=True)
class ProfileResult(Circumstances):
    """The content of ``profile.json``. ``num_threads`` are those of each process, also for the floors."""

    num_threads: int
    runs: list[ProfiledRun]
    floors: list[FloorResult]
    kind: str = field(default="specdist profile")


def run_profile(config: ComparisonConfig, command: str) -> ProfileResult:
    """Run every method and write the folder ``--output``. Raises :class:`UserError` as a comparison does."""
    assert config.batch_sizes
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    setting = set_up_comparison(config)
    num_threads = torch.get_num_threads()
    runs = []
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(setting.start_draft_rank()) if config.is_separate else None
        if rank is not None:
            num_threads = rank.num_threads
        methods = ComparedLineup(config, setting, rank).methods
        items = [Timed(method, setting.rows) for method in methods if isinstance(method, PlacedSpecdist)]
        list(measure(items, 1, setting.device))
        for item in items:
            method = item.method
            assert isinstance(method, PlacedSpecdist)
            logger.info("tracing %s, batch %d", method.name, method.batch_size)
            name = re.sub(r"[^a-z0-9]+", "-", method.name.lower()).strip("-")
            trace = f"{name}-batch-{method.batch_size}.json.gz"
            _trace(method, setting, folder / trace)
            stats = item.generated[0].stats
            runs.append(
                ProfiledRun(
                    name=method.name,
                    batch_size=method.batch_size,
                    tokens_per_s=item.tokens_per_s,
                    target_shares=_shares(stats.target_ns),
                    draft_shares=_shares(stats.draft_ns),
                    target_pass_s=_mean_s(stats.target_ns.verify, stats.num_target_passes),
                    draft_step_s=_mean_s(stats.draft_ns.draft, stats.num_draft_passes),
                    trace=trace,
                )
            )
    floors: list[FloorResult] = []
    if config.overhead_repeats:
        logger.info("timing single passes and the device")
        with torch_threads(num_threads):
            floors = measure_floors(
                setting.paged,
                batch_sizes=config.batch_sizes,
                num_context_tokens=setting.work.longest_prompt,
                num_draft_tokens=config.num_draft_tokens,
                num_passes=config.overhead_repeats,
                seed=config.seed,
            )
    result = ProfileResult(
        **setting.circumstances(config, command), num_threads=num_threads, runs=runs, floors=floors
    )
    result.write(folder / FILE_NAME)
    return result


def profile_report(result: ProfileResult) -> str:
    """The shares and the floors, in plain text."""
    blocks = ["Shares of each rank's time:", _shares_table(result).console()]
    if result.floors:
        threads = f"{result.num_threads} thread{'s' * (result.num_threads > 1)}"
        blocks += [f"Single passes beside lower bounds of this device, {threads}:"]
        blocks += [_floors_table(result).console()]
    return "\n\n".join(blocks)


def merge_traces(traces: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Merge Chrome traces of several processes of one machine, on the clock of the first.

    Args:
        traces: by the name that each process gets.
    """
    [(_, first), *_] = traces.items()
    base_ns = first["baseTimeNanoseconds"]
    events = []
    for name, trace in traces.items():
        later_us = (trace["baseTimeNanoseconds"] - base_ns) / 1e3
        for event in trace["traceEvents"]:
            if event.get("name") == "process_name" and "name" in event.get("args", {}):
                event = event | {"args": {"name": f"{name}: {event['args']['name']}"}}
            events.append(event | {"ts": event["ts"] + later_us} if "ts" in event else event)
    return first | {"traceEvents": events}


def _trace(method: PlacedSpecdist, setting: ComparedSetting, path: Path) -> None:
    """Write one trace of all processes, which ``chrome://tracing`` and ui.perfetto.dev show."""
    rows = shortened(setting.rows[: method.batch_size], NUM_TRACED_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        traced = method.following(dataclasses.replace(method.order, trace_folder=folder))
        traced.prepare()
        traced.generate(rows)
        traces = {part.stem: json.loads(part.read_bytes()) for part in sorted(Path(folder).iterdir())}
    content = gzip.compress(json.dumps(merge_traces(traces)).encode())
    write_atomically(path, lambda file: file.write(content))


def _shares(times: TargetTimes | DraftTimes) -> dict[str, float]:
    return {kind: amount / max(1, times.total) for kind, amount in dataclasses.asdict(times).items()}


def _mean_s(total_ns: int, count: int) -> float | None:
    return total_ns / count / NS_PER_S if count else None


def _shares_table(result: ProfileResult) -> Table:
    kinds = ("prefill", "draft", "verify", "transfer", "idle", "host")
    return Table.of(
        [
            {
                "run": run.name.removeprefix("specdist, "),
                "batch": run.batch_size,
                "tokens/s": f"{run.tokens_per_s:.1f}",
                "rank": role,
                **{kind: decimals(shares.get(kind)) for kind in kinds},
                "ms per pass": decimals(None if pass_s is None else 1e3 * pass_s),
            }
            for run in result.runs
            for role, shares, pass_s in (
                ("target", run.target_shares, run.target_pass_s),
                ("draft", run.draft_shares, run.draft_step_s),
            )
        ]
    )


def _floors_table(result: ProfileResult) -> Table:
    return Table.of(
        [
            {
                "model": item.model,
                "rows x new tokens": f"{item.batch_size} x {item.num_new_tokens}",
                "context": item.num_context_tokens,
                "MB": f"{item.num_bytes / 1e6:.1f}",
                "GFLOP": f"{item.num_flop / 1e9:.2f}",
                "GB/s": f"{item.bytes_per_s / 1e9:.1f}",
                "GFLOP/s": f"{item.flop_per_s / 1e9:.0f}",
                "floor ms": f"{1e3 * item.floor_s:.2f}",
                "median ms": f"{1e3 * item.measured_s:.2f}",
                "best ms": f"{1e3 * item.best_s:.2f}",
                "median / floor": f"{item.ratio:.2f}",
            }
            for item in result.floors
        ]
    )


def profile(config: ComparisonConfig, command: str) -> tuple[str, dict[str, Any]]:
    """The text and the document to print. Raises :class:`UserError`."""
    result = run_profile(config, command)
    text = f"{profile_report(result)}\n\ntraces and numbers: {config.output}"
    return text, {"profile": config.output, "traces": [run.trace for run in result.runs]}


main = Command(
    "profile", "trace rounds, and time passes beside their bounds",
    "tests.lab.benchmark.config:ComparisonConfig", "tests.lab.profile:profile",
    program="python -m tests.lab.profile", logs=True,
)  # fmt: skip

if __name__ == "__main__":
    main.end()
