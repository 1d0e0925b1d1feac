"""The console command: it finds its commands, and reports a mistake before it imports anything heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module

import pytest

import specdist.cli
from specdist.cli import COMMANDS, Command, main
from specdist.utils.documents import print_document, take_flags
from tests.ranks import REPOSITORY

HEAVY = {"torch", "transformers", "datasets", "pyarrow", "deepspeed", "accelerate", "matplotlib"}
RUN = ["--prompts", "p.jsonl", "--target", "large", "--output", "run"]
# A mistake that each command finds in its options.
MISTAKES = {
    "generate": [*RUN, "--temperatur", "0"],
    "show": ["--rows", "few"],
    "report": [],
    "status": ["run", "--watch", "often"],
    "merge": ["run"],
    "evaluate": ["run", "--task", "gsm8k", "--kk", "3"],
    "plan": ["--target", "7b", "--nodes", "0"],
    "distill": ["runs/mine", "--new_draft", "new", "--teacher", "sorcery"],
    "collect": [*RUN, "--draft", "small", "--kind", "sorcery"],
    "train-head": ["--kind", "acceptance"],
    "train-demo": ["--output", "run", "--max_seconds", "0"],
}
STOPPED = "raise KeyboardInterrupt"
# For each command line of those in the last argument: the exit code, the output, and what was imported.
SCRIPT = """
import contextlib, io, json, sys
from specdist.cli import main
for words in json.loads(sys.argv[1]):
    said, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code or 0, said.getvalue(), told.getvalue(), sorted({heavy} & set(sys.modules))]))
"""


def run_alone(*lines: list[str], rank: int = 0) -> list[tuple[int, str, str, list[str]]]:
    """The commands in an interpreter of their own."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{heavy}", repr(HEAVY)), json.dumps(lines)],
        capture_output=True, text=True, timeout=60, cwd=REPOSITORY, env={**os.environ, "RANK": str(rank)},
        check=True,
    )  # fmt: skip
    return [tuple(json.loads(line)) for line in ended.stdout.splitlines()]


def test_help_and_mistakes_import_nothing_heavy() -> None:
    """All in one interpreter: what one command imports is there from then on."""
    found = run_alone(*([name, "--help"] for name in COMMANDS))
    for name, (code, stdout, stderr, heavy) in zip(COMMANDS, found, strict=True):
        assert (code, heavy) == (0, []) and stdout.startswith("usage: "), (name, stderr)
    found = run_alone(*([name, *MISTAKES[name]] for name in COMMANDS))
    for name, (code, stdout, stderr, heavy) in zip(COMMANDS, found, strict=True):
        assert (code, stdout, heavy) == (2, "", []), (name, stderr)
        assert "error: " in stderr.splitlines()[-1] and "Traceback" not in stderr


def test_an_unknown_option_is_reported_once_with_the_nearest_one() -> None:
    """Every rank finds it; only rank 0 prints it."""
    words = ["generate", *MISTAKES["generate"]]
    [(_, _, told, _)] = run_alone(words)
    assert told == "error: --temperatur is not an option: did you mean --temperature?\n"
    [(code, _, told, _)] = run_alone(words, rank=1)
    assert (code, told) == (2, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("show run --row 3", "--row is not an option: did you mean --rows?"),
        ("report run --fodler there", "--fodler is not an option: did you mean --folder?"),
        ("status run --wach", "--wach is not an option: did you mean --watch?"),
        # Without the misspelt option a required one is missing: that is not what the user wants to hear.
        ("merge run --outptu there", "--outptu is not an option: did you mean --output?"),
        ("generate --targe large", "--targe is not an option: did you mean --target?"),
        ("generate --model large", "--model is not an option: did you mean --target?"),
        ("generate --max_tokens 5", "--max_tokens is not an option: did you mean --max_new_tokens?"),
        (
            "generate --nproc_per_node 5",
            "--nproc_per_node is not an option of this job, but of its launcher: accelerate launch "
            "--config_file jobs/accelerate/gpu5.yaml --num_processes N jobs/generate.py ...",
        ),
        (
            "collect --num_branches",
            "--num_branches is not an option of this job, but of jobs/generate.py alone: leave it out",
        ),
        ("merge run --zzz --output there", "--zzz is not an option; --help lists all options"),
        ("merge --output there", "run must be given"),
        ("show one two", "two is not an option: a value without an option"),
        (
            "generate run.yaml",
            "run.yaml is not an option: a value without an option; did you mean --config run.yaml?",
        ),
        (
            "status --watch run",
            "--watch: run is no number of seconds above 0; the run's folder comes before --watch",
        ),
        (
            "status run --watch -1",
            "--watch: -1 is no number of seconds above 0; the run's folder comes before --watch",
        ),
        ("show --rows few", "--rows: 'few' is not a whole number"),
    ],
)
def test_every_command_tells_a_mistake_in_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_the_help_has_a_line_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, command in COMMANDS.items():
        described = [line.split(maxsplit=1) for line in lines if line.startswith(f"  {name} ")]
        assert described == [[name, command.meaning]]
    assert main([]) == 2


@pytest.mark.parametrize(
    ("word", "remedy"),
    [("stats", "did you mean status?"), ("train_demo", "did you mean train-demo?"), ("zzz", "--help lists")],
)
def test_an_unknown_command_is_reported_with_the_nearest_one(
    word: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err.startswith(f"error: {word} is not a command: ")
    assert main([word]) == 2 and remedy in capsys.readouterr().err


def test_a_terminal_gets_the_document_only_if_it_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two kilobytes of JSON would hide the lines for people; a pipe gets it in any case."""
    monkeypatch.setattr(sys, "argv", ["specdist"])
    for is_terminal, words, is_shown in ((False, [], True), (True, [], False), (True, ["--json", "x"], True)):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal)
        assert take_flags(words) == words[1:]
        print_document({"rows": 3}, "3 rows")
        assert capsys.readouterr().out.splitlines() == ["3 rows", *['{"rows": 3}'] * is_shown]
    take_flags([])


def test_every_command_has_a_script_in_jobs_that_calls_the_same_function() -> None:
    scripts = {path.stem for path in (REPOSITORY / "jobs").glob("[a-z]*.py")} - {"benchmark", "one_round"}
    assert {name.replace("-", "_") for name in COMMANDS} == scripts
    for name in scripts:
        text = (REPOSITORY / "jobs" / f"{name}.py").read_text()
        assert f"from specdist.cli import {name}\n" in text and f"    {name}.end()\n" in text
        assert getattr(specdist.cli, name) is COMMANDS[name.replace("_", "-")]


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_row_of_the_table_names_what_there_is(command: Command) -> None:
    """Its names are looked up when the command runs."""
    for place in (command.run, command.options, command.first_check):
        if isinstance(place, str):
            module, _, name = place.partition(":")
            assert callable(getattr(import_module(module), name))


def test_ranks_end_at_once_with_their_exit_code() -> None:
    """Others end as programs do; who is interrupted is told so."""
    ranks = {name for name, command in COMMANDS.items() if command.is_rank}
    assert ranks == {"generate", "collect", "distill"}
    for is_rank, ended, code in ((True, "return 75", 75), (False, "return 3", 3), (False, STOPPED, 130)):
        script = (
            "import atexit, sys\nfrom specdist.cli import Command\n"
            f"def run(options):\n    {ended}\n"
            "atexit.register(print, 'exit')\nsys.argv = ['program']\n"
            f"Command('name', '', lambda parser: None, '__main__:run', is_rank={is_rank}).end()\n"
        )
        found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert (found.returncode, found.stdout) == (code, "" if is_rank else "exit\n"), found.stderr
        assert found.stderr == ("interrupted\n" if ended == STOPPED else "")


def test_a_command_whose_reader_has_gone_ends_without_a_traceback() -> None:
    """As with ``specdist show --schema | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "specdist.cli", "show", "--schema"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=REPOSITORY)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_the_installed_command_runs_as_it_is_typed() -> None:
    """Its parsers know the program's name, and the exit code of a rank is that of its command."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert '[project.scripts]\nspecdist = "specdist.cli:main"\n' in text
    for words, code, begin in (
        (["show", "--help"], 0, "usage: specdist show [-h]"),
        (["generate", "--seed", "x"], 2, "error: --seed: 'x' is not a whole number"),
    ):
        command = [sys.executable, "-m", "specdist.cli", *words]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
        assert ended.returncode == code and (ended.stdout + ended.stderr).startswith(begin)
