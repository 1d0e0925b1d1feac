"""Generation from Python over all GPUs of a machine: the main job's replicas, in processes of their own.

    import specdist

    for row in specdist.generate(prompts, target="Qwen/Qwen3-8B", draft="Qwen/Qwen3-0.6B"):
        print(row["row_id"], row["completion"])

The rows are those of ``jobs/generate.py`` over the same prompts, and so is the folder: with ``output``
another call goes on where the last one ended, and the commands for runs read it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.ipc
import yaml
from tqdm.auto import tqdm

from specdist.config.arguments import URL
from specdist.config.calls import check_names, check_types, plain_values
from specdist.config.generate import GenerateConfig, parse_generate_config
from specdist.data.run.reading import open_shard
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.rows import output_schema, results_table
from specdist.job.ranks.signals import EXIT_STOPPED, GRACE_S, LAUNCHER_VARIABLES
from specdist.job.rows.output_columns import column_options
from specdist.job.totals.spending import options_of
from specdist.results.runs import load_run
from specdist.utils.errors import DISK_FULL, USAGE_ERROR, UserError

if TYPE_CHECKING:
    import datasets

POLL_S = 0.5
# Of what a replica has printed, in the message of its failure.
MAX_LINES = 20
CALL_ARGUMENTS = ("prompts", "output", "target", "draft")
# What says where a replica's models are; without any of them the planner does.
PLACEMENT = ("tp_size", "draft_placement")
Folder = tempfile.TemporaryDirectory[str]


def generate(
    dataset: Any,
    *,
    target: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None = None,
    gpus: Literal["all"] | int | Sequence[int] = "all",
    num_replicas: int | None = None,
    output: str | os.PathLike[str] | None = None,
    use_tqdm: bool = True,
    **options: Any,
) -> Generation:
    """Complete every row of a data set, by as many replicas as the GPUs have room for.

    Args:
        dataset: a ``datasets.Dataset``, an Arrow table or a pandas table with a column ``prompt`` (or as
            ``prompt_column``, ``messages_column`` or ``turns_column`` name it); or a list of texts, of
            conversations, or of rows as mappings.
        target, draft: hub ids or folders, as of :class:`specdist.SpeculativeLLM`.
        gpus: all that torch sees, so many of them, or these. Without a GPU, or with ``device="cpu"``, a
            replica is one process.
        num_replicas: by default as many as the GPUs have room for; on a CPU one.
        output: the run's folder; by default a temporary one, which is gone with the result. The same call
            with the same folder goes on.
        options: of ``jobs/generate.py``, by their names; ``rollout`` may be a function of a module. Where
            neither ``tp_size`` nor ``draft_placement`` is given, the planner chooses them for these GPUs, as
            ``jobs/plan.py`` does; the log says what.

    Raises :class:`UserError` for what the options alone say, and if the planner finds that the models do not
    fit. Replicas start with the first row that is asked for.
    """
    if output is not None and URL.match(str(output)):
        raise UserError(f"output is {output}, but must be a folder: jobs/generate.py writes to a bucket")
    if "preview" in options:
        raise UserError("preview is of jobs/generate.py, which prints it: give the first rows alone instead")
    check_names(options, set(GenerateConfig.__dataclass_fields__).difference(CALL_ARGUMENTS))
    given = plain_values({"target": target, "draft": draft, **options})
    check_types(GenerateConfig, given)
    if num_replicas is not None and (type(num_replicas) is not int or num_replicas < 1):
        raise UserError(f"num_replicas is {num_replicas!r}, but must be a whole number, 1 or more")
    table, columns = _table_of(dataset)
    # Gone with the result, or with this call if it is refused.
    folder = tempfile.TemporaryDirectory(prefix="specdist-", ignore_cleanup_errors=True)
    prompts, file, run = (Path(folder.name, name) for name in ("prompts.arrow", "options.yaml", "run"))
    with pa.ipc.new_file(prompts, table.schema) as writer:
        writer.write_table(table)
    given |= columns | {"prompts": str(prompts), "output": str(output or run)}
    file.write_text(yaml.safe_dump(given))
    config = parse_generate_config(["--config", str(file)])
    chosen = _chosen(gpus, config.device)
    if (of_one := chosen[: len(chosen) // (num_replicas or 1)]) and given.keys().isdisjoint(PLACEMENT):
        column = config.messages_column or config.prompt_column
        num_bytes = (table[column] if column in table.column_names else table).nbytes
        # By name, as the commands are: what runs the job alone does not import the planner.
        plan_call = import_module("specdist.lab.plan.job").plan_call
        plan = plan_call(config, of_one, len(table[: config.limit]), num_bytes)
        if plan is not None:
            given["tp_size"], num_replicas = plan.tp_size, num_replicas or plan.num_replicas
            if config.uses_draft_model:
                given["draft_placement"] = "own" if plan.num_gpus > plan.tp_size else "shared"
            file.write_text(yaml.safe_dump(given))
            config = parse_generate_config(["--config", str(file)])
    placed = _placed(config, chosen, num_replicas)
    return Generation(config, table, [_Replica(file, size, own) for size, own in placed], folder, use_tqdm)


class Generation:
    """The rows of a call of :func:`generate`, for a loop, as they finish: mappings with the columns of the
    job's output. Leaving the loop, or a ``with`` block, ends all replicas; finished rows are kept in the
    folder :attr:`output`, and another loop begins with them."""

    def __init__(
        self, config: GenerateConfig, rows: pa.Table, replicas: list[_Replica], folder: Folder, use_tqdm: bool
    ) -> None:
        self.output = config.output
        self._inputs, self._replicas, self._shows_bar = rows, replicas, use_tqdm
        options = column_options(config)
        self._schema = output_schema(rows.schema, is_exact=config.is_exact, options=options)
        self._run, self._num_samples = RunFolder(Path(config.output)), config.num_samples
        self._prompts, self._is_same_run = config.prompts, False
        # Also at the end of the program.
        weakref.finalize(self, _end, replicas, folder)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Raises :class:`UserError` for what a replica refuses, and RuntimeError if none is left before the
        end, with what it printed last."""
        seen: set[tuple[int, int]] = set()
        done: set[int] = set()
        bar = tqdm(total=len(self._inputs) * self._num_samples, unit="row", disable=not self._shows_bar)
        try:
            while not self._is_complete(done):
                # Asked before the folder is read: what they have finished is in it.
                is_over = self._is_over()
                for row in self._new_rows(seen, done) if is_over or self._is_compared() else ():
                    bar.update()
                    yield row
                if is_over and not self._is_complete(done):
                    raise RuntimeError(f"the replicas ended before the run was complete: {self.output}")
                time.sleep(0 if is_over else POLL_S)
        finally:
            bar.close()
            self.close()

    def dataset(self) -> datasets.Dataset:
        """All rows, in the order of the input; waits for them."""
        for _ in self:
            pass
        return load_run(self.output).dataset

    def close(self) -> None:
        """End all replicas, and wait for their end."""
        _end(self._replicas)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _is_complete(self, done: set[int]) -> bool:
        return self._run.manifest_path.is_file() and len(done) == self._run.plan().num_shards

    def _is_compared(self) -> bool:
        """Whether a replica has opened the folder with this call's options, and refused no run of others."""
        self._is_same_run |= options_of(self._run.config_path).get("prompts") == self._prompts
        return self._is_same_run

    def _is_over(self) -> bool:
        """Whether all replicas have ended; starts them first. Raises for the failure of all."""
        if not any(replica.is_started for replica in self._replicas):
            for replica in self._replicas:
                replica.start()
        failures = [failure for replica in self._replicas if (failure := replica.failure()) is not None]
        if failures and (len(failures) == len(self._replicas) or isinstance(failures[0], UserError)):
            raise failures[0]
        return all(replica.has_ended for replica in self._replicas)

    def _new_rows(self, seen: set[tuple[int, int]], done: set[int]) -> Iterator[dict[str, Any]]:
        """The rows that have been finished since the last look, each once."""
        if not self._run.manifest_path.is_file():
            return
        run = self._run
        # Listed first: a shard that is finished meanwhile is read by its file.
        parts = {shard: run.part_logs(shard)[0] for shard in run.begun_shards() if shard not in done}
        complete = run.complete_among(sorted(run.recorded_shards() - done))
        new = [
            row
            for shard, rows in parts.items()
            if shard not in complete
            for row in rows
            if (row.row_id, row.sample_index) not in seen
        ]
        tables = [open_shard(run.paths(shard), verify=False) for shard in complete]
        tables += [results_table(new, self._schema)] if new else []
        for table in tables:
            places = zip(table["row_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True)
            for place, key in enumerate(places):
                if key not in seen:
                    seen.add(key)
                    (row,) = table.slice(place, 1).to_pylist()
                    (of_input,) = self._inputs.slice(key[0], 1).to_pylist()
                    yield row | {name: value for name, value in of_input.items() if row.get(name) is None}
        done.update(complete)


@dataclass
class _Replica:
    """A launch of the main job on ``num_ranks`` GPUs, these; on a CPU on none."""

    options: Path
    num_ranks: int
    gpus: Sequence[int]

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115

    @property
    def is_started(self) -> bool:
        return self._process is not None

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def start(self) -> None:
        job = ["specdist.cli", "generate", "--config", str(self.options)]
        if self.num_ranks > 1:
            ranks = f"--multi_gpu --num_processes {self.num_ranks} --num_machines 1 --main_process_port 0"
            more = "--mixed_precision no --dynamo_backend no --module"
            job = ["specdist.job.ranks.launch", *ranks.split(), *more.split(), *job]
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": _visible(self.gpus)} if self.gpus else {})
        # It ends when this process does.
        environment |= {LAUNCHER_VARIABLES[1]: "no"}
        package = str(Path(__file__).resolve().parents[1])
        environment["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [environment.get("PYTHONPATH")])])
        # Ctrl-C in a terminal is this process's to pass on.
        self._process = subprocess.Popen(
            [sys.executable, "-m", *job], env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=self._printed, start_new_session=True,
        )  # fmt: skip

    def failure(self) -> Exception | None:
        """Why it ended, if it failed."""
        code = None if self._process is None else self._process.poll()
        if not code:
            return None
        self._printed.seek(0)
        lines = self._printed.read().decode(errors="replace").splitlines()
        told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        if code in (USAGE_ERROR, DISK_FULL) and told:
            return UserError(told[-1])
        ended = "was stopped" if code == EXIT_STOPPED else f"ended with exit code {code}"
        return RuntimeError("\n".join([f"a replica {ended}:", *lines[-MAX_LINES:]]))

    def ask_to_stop(self) -> None:
        if self._process is not None and not self.has_ended:
            self._process.terminate()

    def end(self) -> None:
        """Wait until it has ended, for its own time limit at most."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None


def _table_of(dataset: Any) -> tuple[pa.Table, dict[str, str]]:
    """The rows as a table, and the options that name their column."""
    if isinstance(dataset, pa.Table):
        return dataset, {}
    if all(hasattr(dataset, name) for name in ("with_format", "features", "__len__")):
        table = dataset.with_format("arrow")[:]
        return table.replace_schema_metadata(dataset.features.arrow_schema.metadata), {}
    if hasattr(dataset, "to_dict") and hasattr(dataset, "columns"):
        return pa.Table.from_pandas(dataset, preserve_index=False), {}
    is_list = isinstance(dataset, Iterable) and not isinstance(dataset, (str, Mapping))
    items = list(dataset) if is_list else None
    if items and all(isinstance(item, str) for item in items):
        return pa.table({"prompt": items}), {}
    if items and all(isinstance(item, Mapping) for item in items):
        return pa.Table.from_pylist(items), {}
    if items and all(isinstance(item, Sequence) and not isinstance(item, str) for item in items):
        return pa.table({"messages": items}), {"messages_column": "messages"}
    raise UserError(
        f"dataset is {type(dataset).__name__}, but must be a datasets.Dataset, an Arrow or pandas table, or "
        "a list, not empty, of texts, of conversations, or of rows as mappings"
    )


def _chosen(gpus: Literal["all"] | int | Sequence[int], device: str) -> Sequence[int]:
    """The GPUs to use; none on a CPU."""
    import torch

    seen = range(0 if device == "cpu" else torch.cuda.device_count())
    chosen = seen if gpus == "all" else range(gpus) if isinstance(gpus, int) else gpus
    is_some = isinstance(chosen, Sequence) and (len(chosen) > 0 or chosen is seen)
    if not is_some or any(gpu not in seen for gpu in chosen):
        raise UserError(f"gpus is {gpus!r}, but torch sees {len(seen)} here")
    return chosen


def _placed(
    config: GenerateConfig, gpus: Sequence[int], num_replicas: int | None
) -> list[tuple[int, Sequence[int]]]:
    """Of each replica the number of ranks, and its GPUs."""
    num_ranks = config.num_world_ranks if config.draft_placement == "own" else config.tp_size
    if not gpus and num_ranks > 1:
        raise UserError(f"{num_ranks} ranks need as many GPUs, and torch sees none here: leave tp_size out")
    most = len(gpus) // num_ranks if gpus else num_replicas or 1
    if (num_replicas or 1) > most:
        wanted = f"{num_replicas or 1} replicas of {num_ranks} GPUs"
        raise UserError(f"{wanted} need more than the {len(gpus)} that there are: ask for fewer")
    config.check_world(num_ranks)
    each = [gpus[first : first + num_ranks] for first in range(0, len(gpus), num_ranks)]
    return [(num_ranks, each[k] if gpus else ()) for k in range(num_replicas or most)]


def _visible(gpus: Sequence[int]) -> str:
    """These GPUs of those that this process sees, as it names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else None
    return ",".join(str(gpu) if names is None else names[gpu] for gpu in gpus)


def _end(replicas: Sequence[_Replica], folder: Folder | None = None) -> None:
    for replica in replicas:
        replica.ask_to_stop()
    for replica in replicas:
        replica.end()
    if folder is not None:
        folder.cleanup()
