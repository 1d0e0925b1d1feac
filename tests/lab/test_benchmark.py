"""jobs/benchmark.py: every engine in a process of its own, on tiny models, vLLM by a stand-in."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specdist.cli import COMMANDS, generate
from tests.job.pair import Pair, write_arrow
from tests.ranks import REPOSITORY

SCRIPT = REPOSITORY / "jobs/benchmark.py"
NUM_ROWS, NUM_NEW, BATCH = 5, 12, 2
# As much of vLLM as the job uses: tokens by transformers, one row at a time, and a note of what it was given.
STAND_IN = """
import json, os
import torch
from transformers import AutoModelForCausalLM

__version__ = "9.8.7"


class SamplingParams:
    def __init__(self, **settings):
        assert settings.pop("temperature") == 0 and settings.pop("ignore_eos")
        assert not settings.pop("detokenize")
        self.settings = settings


class Output:
    def __init__(self, token_ids):
        self.token_ids, self.outputs = token_ids, [self]


class LLM:
    def __init__(self, model, **options):
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, options["dtype"]))
        with open(os.environ["NOTES"], "a") as notes:
            threads = os.environ["OMP_NUM_THREADS"], os.environ["VLLM_CPU_OMP_THREADS_BIND"]
            print(json.dumps([options, threads]), file=notes)

    def reset_prefix_cache(self):
        self.is_fresh = True

    def generate(self, inputs, settings, use_tqdm):
        assert self.is_fresh
        self.is_fresh = False
        found = []
        for each in inputs:
            prompt = each["prompt_token_ids"]
            row = self.model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=settings.settings["max_tokens"],
                eos_token_id=settings.settings["stop_token_ids"], pad_token_id=0,
            )[0, len(prompt):].tolist()
            found.append(Output(row))
        return found
"""
PLATFORM = "class current_platform:\n    device_type = 'cpu'\n"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    sys.path.append(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    sys.modules["benchmark"] = module = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def is_worker(command: list[str]) -> bool:
    return Path(command[1]).name == "_engines.py"


@pytest.fixture
def words(pair: Pair, tmp_path: Path) -> list[str]:
    """A command line on the CPU."""
    given = {
        "target": pair.target, "draft": pair.draft, "prompts": pair.prompts, "device": "cpu",
        "num_prompts": NUM_ROWS, "max_new_tokens": NUM_NEW, "batch_size": BATCH,
        "output": tmp_path / "results/found.json",
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in given.items()]


@pytest.mark.slow
def test_every_engine_is_measured_on_the_same_rows(
    words: list[str],
    benchmark: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The target alone by transformers and vLLM in processes, as the job starts them, with one size; all else
    here, which saves the imports."""
    package, run_process = tmp_path / "packages/vllm", subprocess.run
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    (package / "platforms.py").write_text(PLATFORM)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def run(command: list[str], *, env: dict[str, str], stdout: Any, stderr: Any) -> Any:
        work = json.loads(Path(command[-2]).read_text()) if is_worker(command) else {"draft": ""}
        if work["draft"] is None and work["batch_size"] == BATCH:
            return run_process(command, env=env, stdout=stdout, stderr=stderr)
        with monkeypatch.context() as patch, contextlib.redirect_stdout(stdout):
            for name, value in env.items():
                patch.setenv(name, value)
            done = run_worker(*command[-2:]) if is_worker(command) else generate(command[2:])
        return subprocess.CompletedProcess(command, done)

    run_worker = sys.modules["_engines"].run_worker
    monkeypatch.setattr(benchmark.subprocess, "run", run)
    assert benchmark.main([*words, "--batch_size", "3", str(BATCH)]) == 0
    found = json.loads((tmp_path / "results/found.json").read_text())
    engines = ("transformers", "specdist", "vllm")
    names = [f"{engine}{draft}" for engine in engines for draft in ("", ", with draft")]
    # transformers' assistance has one row, whatever the size.
    assert [line["name"] for line in found["lines"]] == [*names, names[0], *names[2:]]
    assert [line["batch_size"] for line in found["lines"]] == [BATCH, 1, *[BATCH] * 4, *[3] * 5]
    assert (found["reference"], found["dtype"], found["num_rows"]) == ("transformers", "float32", NUM_ROWS)
    for line in found["lines"]:
        assert line["error"] is None and line["num_equal_rows"] == NUM_ROWS
        assert line["num_tokens"] == found["lines"][0]["num_tokens"] > NUM_ROWS
        assert line["tokens_per_s"] == line["num_tokens"] / line["seconds"] > 0 and line["start_s"] > 0
    rates = [line["tokens_per_s"] for line in found["lines"]]
    wanted = [rate / rates[0 if index < 6 else 6] for index, rate in enumerate(rates)]
    assert [line["x_reference"] for line in found["lines"]] == wanted
    assert found["lines"][4]["version"] == "9.8.7"
    table, told = (tmp_path / "results/found.md").read_text(), capsys.readouterr().out
    for name in names:
        assert any(line.startswith(f"{name}  ") for line in told.splitlines())
        assert any(line.startswith(f"| {name} | ") for line in table.splitlines())
    assert found["command"] in table
    alone, drafted, *_ = (json.loads(line) for line in (tmp_path / "notes").read_text().splitlines())
    assert alone[0].pop("speculative_config") is None
    speculation = drafted[0].pop("speculative_config")
    assert (speculation.pop("method"), speculation.pop("num_speculative_tokens")) == ("draft_model", 5)
    assert Path(speculation.pop("model")).name == "draft" and not speculation
    longest = found["prompt_tokens"][1] + NUM_NEW + 5 + 1
    shared = {
        "dtype": "float32",
        "max_num_seqs": BATCH,
        "max_model_len": longest,
        "skip_tokenizer_init": True,
    }
    assert alone == drafted == [shared, [str(found["num_threads"]), "nobind"]]


@pytest.fixture
def started(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Processes that are replaced: transformers' writes its rows, others write a log and end with 1."""
    commands: list[list[str]] = []

    def run(command: list[str], *, env: dict[str, str], stdout: Any, stderr: Any) -> Any:
        assert stdout is stderr
        commands.append(command)
        if not is_worker(command):
            stdout.write("reading\nerror: no memory\n\n")
        elif (work := json.loads(Path(command[-2]).read_text()))["engine"] == "vllm":
            stdout.write("Traceback\nModuleNotFoundError: No module named 'vllm'\n")
        else:
            rows = [[7] * (row + 1) for row in range(len(work["prompts"]))]
            rows[0] = [8 if work["draft"] else 7]
            found = {"version": "5.0", "seconds": 2.0, "completions": rows}
            Path(command[-1]).write_text(json.dumps(found))
            return subprocess.CompletedProcess(command, 0)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(benchmark.subprocess, "run", run)
    return commands


def test_what_fails_and_what_is_absent_have_lines_that_say_so(
    words: list[str],
    benchmark: ModuleType,
    started: list[list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert benchmark.main(words) == 1
    assert len(started) == 6
    lines = json.loads((tmp_path / "results/found.json").read_text())["lines"]
    assert [line["error"] for line in lines] == [
        None, None, *["exit code 1: error: no memory"] * 2, *["not installed"] * 2
    ]  # fmt: skip
    assert [line.get("num_equal_rows") for line in lines] == [5, 4, None, None, None, None]
    assert lines[0]["tokens_per_s"] == 15 / 2
    told = capsys.readouterr().out
    cells = [line.split() for line in told.splitlines()]
    assert ["transformers", "5.0", "2", "7.5", "1.00"] in [row[:5] for row in cells]
    assert ["specdist", "failed", "2", "-", "-", "-", "-"] in cells
    assert ["vllm", "not", "installed", "2", "-", "-", "-", "-"] in cells
    assert "specdist, with draft: exit code 1: error: no memory" in told
    assert "vllm: " not in told


def test_an_engine_that_is_not_installed_is_no_failure_and_without_a_target_alone_nothing_is_compared(
    words: list[str], benchmark: ModuleType, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for word in words if not word.startswith("--draft=")]
    assert benchmark.main([*given, "--engines", "vllm", "transformers"]) == 0
    assert len(started) == 2 and all(map(is_worker, started))
    capsys.readouterr()
    assert benchmark.main([*words, "--engines", "specdist"]) == 1
    assert "of the reference, which is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--output=found"], "--output found must be a file whose name ends in .json"),
        (["--num_prompts=0"], "--num_prompts 0 must be at least 1"),
        (["--engines", "sglang"], "--engines: invalid choice: 'sglang'"),
        (["--draft=ngram"], "--draft ngram is not a model by itself"),
        (
            ["--batch_size", "1", "6"],
            "--batch_size 6 is more than the 5 rows of --prompts and --num_prompts 5",
        ),
        (["--max_new_tokens=120"], "tokens, but the models support 128: lower it"),
        (["--prompts={batch}", "--prompt_column=body"], "requests of OpenAI's batch format"),
        (["--prompts={empty}"], "--prompts, row 1: "),
        (["--temperature=1"], "--temperature is not an option"),
    ],
)
def test_a_mistake_is_refused_before_a_process_is_started(
    given: list[str],
    message: str,
    words: list[str],
    benchmark: ModuleType,
    started: list[list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    batch, empty = tmp_path / "batch.jsonl", tmp_path / "empty.arrow"
    body = {"messages": [{"role": "user", "content": "hello"}], "model": "m"}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    batch.write_text(json.dumps(request) + "\n")
    write_arrow(empty, {"prompt": ["the quick", None]})
    files = {"batch": batch, "empty": empty}
    assert benchmark.main([*words, *(word.format(**files) for word in given)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and message in told
    assert not started and not (tmp_path / "results").exists()


def test_end_tokens_are_kept_and_what_follows_them_is_not(benchmark: ModuleType) -> None:
    until_stop = sys.modules["_engines"].until_stop
    assert until_stop([4, 5, 6, 5, 7], [6, 5]) == [4, 5]
    assert until_stop([4, 5], [7]) == [4, 5] and until_stop([], [7]) == []


def test_it_is_no_command_of_the_console_and_its_engines_import_nothing_of_the_project() -> None:
    assert "benchmark" not in COMMANDS
    assert "import specdist" not in (text := SCRIPT.with_name("_engines.py").read_text())
    assert "from specdist" not in text and "_package" not in text
