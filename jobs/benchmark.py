"""Compare specdist with transformers and vLLM on the same rows, each engine in a process of its own.

    python jobs/benchmark.py --target TARGET --draft DRAFT --prompts FILE --output runs/benchmark.json

Every engine runs the target alone and, with --draft, also with it: specdist by jobs/generate.py in one
process, where its default policy chooses the lengths; transformers by ``generate``, which is assisted for one
row at a time only; vLLM by its ``draft_model``. Decoding is greedy, on one CPU or one GPU, so all should emit
the same tokens. What is timed is the generation of all rows by models that are loaded and warm; several batch
sizes are measured one after the other. The rest of a process is its start: imports, loading, compilation,
warm-up, what specdist checks and measures first.

The table is printed, and written in Markdown beside the JSON document of --output. The exit code is 1 if an
engine failed; the line of one that is not installed says so.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import _package  # noqa: F401
from _engines import TRANSFORMERS, VLLM, Found, Work

from specdist.config.arguments import option, parse_arguments
from specdist.utils.errors import USAGE_ERROR, UserError
from specdist.utils.packages import named_packages, version_of
from specdist.utils.rules import check_ranges
from specdist.utils.table import Table, decimals

# The tokens of the first that can be measured, alone, are those that all others should emit.
ENGINES = (TRANSFORMERS, SPECDIST := "specdist", VLLM)
NOT_INSTALLED = "not installed"
WORKER = Path(__file__).resolve().with_name("_engines.py")
# The engine in its own process, on the threads of OMP_NUM_THREADS, with 2 GiB of keys and values.
VLLM_ON_CPU = {"ENABLE_V1_MULTIPROCESSING": "0", "CPU_OMP_THREADS_BIND": "nobind", "CPU_KVCACHE_SPACE": "2"}
CPU_INFO = Path("/proc/cpuinfo")
# Where jobs/offline.sh installs vLLM, which requires another torch.
OWN_PYTHON = WORKER.parents[1] / ".venv-vllm/bin/python"
REMARKS = (
    "tokens/s: of the generation of all rows, models loaded and warm; start: the rest of the process; equal "
    "rows: with the tokens of the reference, {reference}. Where two tokens are nearly as likely, rounding "
    "decides: in {dtype} {how_many} rows differ."
)


@dataclass(kw_only=True)
class BenchmarkConfig:
    """Every option of the job. Raises :class:`UserError` for a value out of its range."""

    target: str = option(help="hub id or folder of the large model")
    draft: str | None = option(None, help="hub id or folder of the small model; without it the target alone")
    prompts: str = option(help="Arrow, Parquet, JSONL or CSV, as the main job reads them")
    prompt_column: str | None = option(None, help="column that holds the prompt text (default: prompt)")
    messages_column: str | None = option(None, help="column that holds chat messages, instead")
    output: str = option(help="JSON file for the result; the table is beside it, in a file ending in .md")
    num_prompts: int = option(32, at_least=1, help="number of rows, the first of the file")
    max_new_tokens: int = option(64, at_least=1, help="maximum length of a completion, in tokens")
    batch_size: list[int] | None = option(
        None, at_least=1, help="maximum number of sequences at a time, one or several (default: 8)"
    )
    num_draft_tokens: int = option(5, at_least=1, help="draft tokens per round of transformers and vLLM")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", help="auto = the checkpoint's")
    device: Literal["auto", "cpu", "cuda"] = option("auto", help="auto = cuda if available")
    engines: list[str] | None = option(
        None, help=f"of {', '.join(ENGINES)} (default: all)", action="extend", choices=ENGINES
    )
    vllm_python: str = option(
        str(OWN_PYTHON) if OWN_PYTHON.is_file() else sys.executable,
        help="Python of the environment that has vLLM (default: .venv-vllm's, if there is one)",
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        self.batch_size = sorted(set(self.batch_size or [8]))
        self.engines = [engine for engine in ENGINES if engine in (self.engines or ENGINES)]
        if not self.output.endswith(".json") or Path(self.output).is_dir():
            raise UserError(f"--output {self.output} must be a file whose name ends in .json: name one")
        if shutil.which(self.vllm_python) is None:
            raise UserError(f"--vllm_python {self.vllm_python} is not a program: name a Python that has vLLM")

    def job_options(self, *, has_draft: bool, batch_size: int = 1) -> dict[str, Any]:
        """Options of the main job for the same work. Its default policy drafts."""
        names = ("target", "prompts", "prompt_column", "messages_column", "max_new_tokens", "dtype", "device")
        options = {name: getattr(self, name) for name in names} | {"temperature": 0.0}
        options |= {"limit": self.num_prompts, "max_num_seqs": batch_size}
        options["draft"] = self.draft if has_draft else None
        return {name: value for name, value in options.items() if value is not None}


def plan(config: BenchmarkConfig) -> list[Work]:
    """A process for each line of the table. Raises :class:`UserError`; no model is loaded."""
    import torch

    from specdist.config.generate import GenerateConfig
    from specdist.data.formats.prompts import RowError, open_prompts
    from specdist.job.models.model_plan import plan_models
    from specdist.job.ranks.topology import local_device
    from specdist.job.rows.row_requests import prompt_encoder

    job = GenerateConfig(**config.job_options(has_draft=True), output="-")
    models = plan_models(job)
    target, draft = models.target, models.draft
    if config.draft is not None and (draft is None or draft.drafter is not None):
        raise UserError(f"--draft {config.draft} is not a model by itself: name the folder or hub id of one")
    columns = {"prompt_column": job.prompt_column, "messages_column": job.messages_column}
    prompts = open_prompts(job.prompts, limit=job.limit, **columns)
    prompts.check_no_batch("a benchmark")
    encoder = prompt_encoder(job, models)
    token_ids: list[list[int]] = []
    try:
        token_ids.extend(encoder.prompt_ids(prompts.prompt(row)) for row in range(prompts.num_rows))
    except RowError as error:
        raise UserError(f"--prompts, row {len(token_ids)}: {error.reason}; leave it out") from error
    sizes = config.batch_size or []
    if sizes[-1] > len(token_ids):
        raise UserError(
            f"--batch_size {sizes[-1]} is more than the {len(token_ids)} rows of --prompts and --num_prompts "
            f"{config.num_prompts}: lower it, or take more rows"
        )
    max_seq_len = max(map(len, token_ids)) + config.max_new_tokens
    if max_seq_len > models.max_seq_len:
        raise UserError(
            f"the longest prompt and --max_new_tokens {config.max_new_tokens} make {max_seq_len} tokens, but "
            f"the models support {models.max_seq_len}: lower it, or leave long prompts out"
        )
    alone = Work(
        engine=SPECDIST,
        target=str(target.folder),
        num_draft_tokens=config.num_draft_tokens,
        dtype=str(target.torch_dtype(config.dtype)).removeprefix("torch."),
        device=local_device(config.device).type,
        num_threads=torch.get_num_threads(),
        batch_size=1,
        max_new_tokens=config.max_new_tokens,
        max_seq_len=min(models.max_seq_len, max_seq_len + config.num_draft_tokens + 1),
        stop_token_ids=sorted(target.stop_token_ids()),
        prompts=token_ids,
    )
    works = []
    for size, engine in itertools.product(sizes, config.engines or ()):
        works.append(dataclasses.replace(alone, engine=engine, batch_size=size))
        # transformers' assistance has one row, whatever the size.
        if draft is not None and (engine != TRANSFORMERS or size == sizes[0]):
            rows = 1 if engine == TRANSFORMERS else size
            works.append(dataclasses.replace(works[-1], draft=str(draft.folder), batch_size=rows))
    return works


def run(work: Work, config: BenchmarkConfig) -> Found:
    """What a process of its own finds."""
    from specdist import load_run

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output, log, work_file = (folder / part for part in ("output", "log", "work"))
        if work.engine == SPECDIST:
            options = config.job_options(has_draft=work.draft is not None, batch_size=work.batch_size)
            options["output"] = output
            words = [f"--{name}={value}" for name, value in options.items()]
            command = [sys.executable, str(Path(__file__).with_name("generate.py")), *words]
        else:
            work_file.write_text(json.dumps(dataclasses.asdict(work)))
            python = config.vllm_python if work.engine == VLLM else sys.executable
            command = [python, str(WORKER), str(work_file), str(output)]
        of_vllm = VLLM_ON_CPU.items() if work.device == "cpu" else ()
        environment = {f"VLLM_{name}": value for name, value in of_vllm} | dict(os.environ)
        environment["OMP_NUM_THREADS"] = str(work.num_threads)
        begin = time.perf_counter()
        with log.open("w") as file:
            code = subprocess.run(command, env=environment, stdout=file, stderr=file).returncode
        wall_s = time.perf_counter() - begin
        if code:
            last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
            is_absent = last == [f"ModuleNotFoundError: No module named {work.engine!r}"]
            return Found(error=NOT_INSTALLED if is_absent else ": ".join([f"exit code {code}", *last]))
        if work.engine == SPECDIST:
            job = load_run(output)
            found = Found(
                version=version_of(SPECDIST) or "checkout",
                seconds=job.statistics["wall_s"],
                completions=job.table["completion_ids"].to_pylist(),
                error=next(filter(None, job.table["error"].to_pylist()), None),
            )
        else:
            found = Found(**json.loads(output.read_text()))
        return dataclasses.replace(found, start_s=wall_s - found.seconds)


def compare(works: Sequence[Work], config: BenchmarkConfig) -> dict[str, Any]:
    """Run every process, one after the other; the content of ``--output``."""
    import torch

    lines: list[dict[str, Any]] = []
    reference, wanted, rates = None, [], dict[int, float]()
    for work in works:
        print(f"running {work.name}, batch {work.batch_size}", file=sys.stderr, flush=True)
        found = run(work, config)
        line = {"name": work.name, "batch_size": work.batch_size, **dataclasses.asdict(found)}
        line["num_tokens"] = sum(map(len, line.pop("completions")))
        if found.error is None:
            if reference is None and work.draft is None:
                reference, wanted = work.name, found.completions
            line["tokens_per_s"] = rate = line["num_tokens"] / found.seconds
            if work.name == reference:
                rates[work.batch_size] = rate
            # What has one row alone, transformers' assistance, is beside the smallest batch.
            size = works[0].batch_size if work.batch_size == 1 else work.batch_size
            line["x_reference"] = rate / rates[size] if size in rates else None
            line["num_equal_rows"] = sum(map(operator.eq, found.completions, wanted)) if wanted else None
        lines.append(line)
    work, lengths = works[0], [len(prompt) for prompt in works[0].prompts]
    cpus = re.findall(r"^model name\s*: (.*)", CPU_INFO.read_text(), re.M) if CPU_INFO.is_file() else []
    return {
        "command": shlex.join(["python", "jobs/benchmark.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": torch.cuda.get_device_name() if work.device == "cuda" else (*cpus, platform.machine())[0],
        "num_threads": work.num_threads,
        "versions": {"python": platform.python_version(), "torch": version_of("torch")},
        "options": dataclasses.asdict(config),
        "dtype": work.dtype,
        "num_rows": len(lengths),
        "prompt_tokens": [min(lengths), max(lengths)],
        "reference": reference,
        "lines": lines,
    }


def report(document: dict[str, Any], written: Callable[[Table], str]) -> str:
    """What was run, the table, why lines have no figures, and what its columns mean."""
    reference, options, (shortest, longest) = (
        document[key] for key in ("reference", "options", "prompt_tokens")
    )
    rows, errors = [], []
    for line in document["lines"]:
        name, error = line["name"], line["error"]
        if error not in (None, NOT_INSTALLED):
            errors.append(f"{name}: {error}")
            error = "failed"
        rows.append({
            "engine": name,
            "version": error or line["version"],
            "batch": line["batch_size"],
            "tokens/s": decimals(line.get("tokens_per_s"), 1),
            "x reference": decimals(line.get("x_reference")),
            "start, s": None if error else decimals(line["start_s"], 1),
            "equal rows": line.get("num_equal_rows"),
        })  # fmt: skip
    work = (
        f"{options['target']}, draft {options['draft']}, {document['dtype']}; greedy; {document['num_rows']} "
        f"prompts of {shortest} to {longest} tokens, completions of at most {options['max_new_tokens']}; "
        f"{document['device']}, {document['num_threads']} threads"
    )
    words = {"reference": reference or "which is missing", "dtype": document["dtype"]}
    remarks = REMARKS.format(**words, how_many="few" if document["dtype"] == "float32" else "some")
    return "\n\n".join([work, written(Table.of(rows, num_names=2)), *errors, remarks])


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit code."""
    try:
        with named_packages("jobs/benchmark.py"):
            config = parse_arguments(BenchmarkConfig, arguments)
            works, output = plan(config), Path(config.output)
        output.parent.mkdir(parents=True, exist_ok=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    document = compare(works, config)
    output.write_text(json.dumps(document, indent=2) + "\n")
    text = f"{report(document, Table.markdown)}\n\n{document['date']}: `{document['command']}`\n"
    output.with_suffix(".md").write_text(text)
    print(report(document, Table.console))
    return int(any(line["error"] not in (None, NOT_INSTALLED) for line in document["lines"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
