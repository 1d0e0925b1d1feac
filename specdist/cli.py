"""The console command ``specdist COMMAND``, and what the scripts in jobs/ run. Imports no heavy library.

A command is a row of the table: the options, and the function that does it. With several ranks:
``accelerate launch --module specdist.cli generate``.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import logging
import math
import os
import shlex
import sys
import time
from argparse import ArgumentTypeError, RawTextHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from specdist.config.arguments import CommandParser, local_path, parse_given
from specdist.utils.documents import print_document, take_flags
from specdist.utils.errors import DISK_FULL, RANK_0_FIRST_S, USAGE_ERROR, UserError
from specdist.utils.garbage import paused_garbage
from specdist.utils.packages import named_packages

PROGRAM = "specdist"
INTERRUPTED, OUTPUT_CLOSED = 130, 141
WATCH_S = 5.0


@dataclass(frozen=True)
class Command:
    """To be called with its arguments, by default the program's; returns the exit code.

    Attributes:
        options: the module and the class of the options, or a function that adds them to a parser.
        run: the module and the name of a function of the options. It returns the exit code, or what is to be
            printed: a text, and a document for the last line on stdout; either may be missing.
        takes_given: whether ``run`` is called with the names of the options that were given, too.
        program: how the command line begins that ``run`` is called with, too: results name it.
        first: the options that a word before all options stands for.
        logs: whether what the package logs is shown, with the time.
        is_slow: whether importing ``run`` takes seconds.
        first_check: of the options, before that; named as ``run`` is.
        is_rank: it may be one of several, and ends at once: threads of their libraries sometimes abort during
            the interpreter's exit, which a launcher would report as the failure of a successful run.
    """

    name: str
    meaning: str
    options: str | Callable[[CommandParser], None]
    run: str
    takes_given: bool = False
    program: str | None = None
    first: Callable[[str], list[str]] | None = None
    logs: bool = False
    is_slow: bool = False
    first_check: str | None = None
    is_rank: bool = False

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """A :class:`UserError`, or which package is missing, is printed, and ``USAGE_ERROR`` returned. Of
        several ranks, which all find the same error, only rank 0 prints it."""
        words = take_flags(sys.argv[1:] if arguments is None else arguments, is_rank=self.is_rank)
        try:
            with named_packages(f"{PROGRAM} {self.name}"):
                code = self._run(words)
        except UserError as error:
            code = error.exit_code
            if os.environ.get("RANK", "0") == "0":
                print(f"error: {error}", file=sys.stderr, flush=True)
        if code in (USAGE_ERROR, DISK_FULL) and os.environ.get("RANK", "0") != "0":
            time.sleep(RANK_0_FIRST_S)
        return code

    def end(self) -> NoReturn:
        """Run it with the program's arguments, and end this process with the exit code."""
        try:
            code = self()
            sys.stdout.flush()
        except BrokenPipeError:
            if self.is_rank:
                raise
            # Whoever read stdout has gone, as head does.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = OUTPUT_CLOSED
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = INTERRUPTED
        if self.is_rank:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        sys.exit(code)

    def parse(self, words: Sequence[str]) -> tuple[Any, frozenset[str]]:
        """The options, and the names of those that were given. Raises :class:`UserError`."""
        if callable(self.options):
            parser = CommandParser(
                description=inspect.getdoc(self.options), formatter_class=RawTextHelpFormatter
            )
            self.options(parser)
            return parser.values(words), frozenset()
        if self.first is not None and words and not words[0].startswith("-"):
            words = [*self.first(words[0]), *words[1:]]
        return parse_given(named(self.options), words)

    def _run(self, words: list[str]) -> int:
        if self.logs:
            log_to_stderr()
        options, given = self.parse(words)
        more: list[Any] = [given] if self.takes_given else []
        if self.program is not None:
            more.append(shlex.join([*self.program.split(), *words]))
        if self.first_check is not None:
            named(self.first_check)(options)
        with heavy_imports() if self.is_slow else contextlib.nullcontext():
            run = named(self.run)
        ended = run(options, *more)
        if isinstance(ended, int):
            return ended
        text, document = ended
        texts = [text] if text else []
        if document is None:
            print(*texts)
        else:
            print_document(document, *texts, sep="\n\n")
        return 0


def named(place: str) -> Any:
    """``module:name``, imported."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def log_to_stderr() -> None:
    """Log specdist's own messages, with the time."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("specdist").setLevel(logging.INFO)
    logging.getLogger("huggingface_hub").propagate = False  # it shows its own


@contextlib.contextmanager
def heavy_imports() -> Iterator[None]:
    """For imports that take seconds: says so, on rank 0, and leaves the garbage collector out."""
    if "torch" not in sys.modules and os.environ.get("RANK", "0") == "0":
        log_to_stderr()
        logging.getLogger(PROGRAM).info("importing torch and transformers")
    with paused_garbage():
        yield


def _show(parser: CommandParser) -> None:
    """Print how a run went, and some of its completions, from its finished shards.

    specdist show runs/demo/output --rows 2
    specdist show --schema                      the meaning of every column and every statistic
    """
    parser.add_argument("output", nargs="?", help="folder of the run, or its URL")
    parser.add_argument("--schema", action="store_true", help="print the meaning of columns and statistics")
    parser.add_argument(
        "--rows", type=int, default=3, help="completions to print, spread over the run (default: 3)"
    )
    parser.add_argument("--full", action="store_true", help="print long prompts and completions in full")


def _report(parser: CommandParser) -> None:
    """Write a run's report: an HTML page, and its figures as PNG files.

    specdist report runs/mine
    specdist report runs/one runs/two --folder runs/both  several runs side by side

    The last line on stdout is a JSON document; on a terminal only with --json.
    """
    parser.add_argument("outputs", nargs="+", metavar="OUTPUT", help="folder of a run, or its URL")
    parser.add_argument(
        "--folder", type=local_path, help="output folder (default: report/ in the folder of the run)"
    )


def _status(parser: CommandParser) -> None:
    """Show a run's progress: shards and their replicas, rows, tokens/s, expected end, errors by kind.

    specdist status runs/mine
    specdist status runs/mine --watch

    Exit code 0: the run is complete; 1: it is not; 2: the folder has no run. The last line on stdout is a
    JSON document; on a terminal only with --json.
    """
    parser.add_argument("output", help="folder of the run, or its URL")
    parser.add_argument(
        "--watch", type=_seconds, nargs="?", const=WATCH_S, metavar="SECONDS",
        help=f"repeat every so many seconds until the run is complete (default: {WATCH_S:g})",
    )  # fmt: skip


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise ArgumentTypeError(f"{text} is no number of seconds above 0; the run's folder comes before --watch")


def _merge(parser: CommandParser) -> None:
    """Write all rows of a complete run into one file, in input order, with every shard verified.

    specdist merge runs/mine --output mine.parquet

    The file's name says which format: .arrow, .parquet or .jsonl. With --format openai the results of a run
    over requests of OpenAI's batch format are written as that API does, one per request, into a .jsonl file.
    """
    parser.add_argument("run", help="folder of the run, or its URL")
    parser.add_argument(
        "--output", type=local_path, required=True, help="file to write: .arrow, .parquet or .jsonl"
    )
    parser.add_argument(
        "--format", choices=["openai"], help="openai = results of OpenAI's batch format, into a .jsonl file"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


generate = Command(
    "generate", "generate completions for a data set of prompts; the same command resumes a run",
    "specdist.config.generate:GenerateConfig", "specdist.job.generate:run_generation",
    takes_given=True, is_slow=True, first_check="specdist.job.run.opening:check_early", is_rank=True,
)  # fmt: skip
show = Command(
    "show", "print a run's totals and some of its completions",
    _show, "specdist.results.commands:show",
)  # fmt: skip
report = Command(
    "report", "write a run's report: an HTML page and its figures",
    _report, "specdist.results.commands:report",
)  # fmt: skip
status = Command(
    "status", "show a run's progress, its replicas and its errors",
    _status, "specdist.results.commands:status",
)  # fmt: skip
merge = Command(
    "merge", "write all rows of a complete run into one file", _merge, "specdist.results.commands:merge"
)  # fmt: skip
evaluate = Command(
    "evaluate", "score completions, or compare two runs",
    "specdist.results.evaluate.config:EvaluateConfig", "specdist.results.evaluate.run:run_evaluation",
    first=lambda run: [f"--run={run}"], logs=True,
)  # fmt: skip
plan = Command(
    "plan", "estimate memory and speed before any GPU is used",
    "specdist.lab.plan.options:PlanConfig", "specdist.lab.plan.job:run_plan",
    program="python jobs/plan.py", logs=True,
)  # fmt: skip
collect = Command(
    "collect", "collect training examples for a head",
    "specdist.training.collect.config:CollectConfig", "specdist.training.collect.run:run_collection",
    is_slow=True, is_rank=True,
)  # fmt: skip
train_head = Command(
    "train-head", "train a head on collected examples",
    "specdist.training.heads.config:TrainConfig", "specdist.training.heads.run:train_and_describe", logs=True,
)  # fmt: skip
distill = Command(
    "distill", "train a draft on what the target says",
    "specdist.training.drafts.config:DistillConfig", "specdist.training.drafts.run:run_distillation",
    first=lambda run: [f"--run={run}"], logs=True, is_slow=True, is_rank=True,
)  # fmt: skip
train_demo = Command(
    "train-demo", "train the demo pair of models",
    "specdist.lab.demo.config:PairConfig", "specdist.lab.demo.pair:train_demo",
)  # fmt: skip
COMMANDS = {
    command.name: command
    for command in (
        generate, show, report, status, merge, evaluate, plan, collect, train_head, distill,
        train_demo,
    )
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. With the program's own arguments a command ends the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(help_text())
        return 0 if words else USAGE_ERROR
    name, *rest = words
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name.replace("_", "-"), COMMANDS, n=1)
        remedy = f"did you mean {nearest[0]}?" if nearest else f"{PROGRAM} --help lists all commands"
        print(f"error: {name} is not a command: {remedy}", file=sys.stderr)
        return USAGE_ERROR
    if arguments is not None:
        return COMMANDS[name](rest)
    # The program's name in --help, and in the command lines that jobs record.
    sys.argv = [f"{PROGRAM} {name}", *rest]
    return COMMANDS[name].end()


def help_text() -> str:
    """Every command with a line of its own."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.meaning}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [--option value ...]",
            "",
            *lines,
            "",
            f"{PROGRAM} COMMAND --help lists the options of a command.",
            "With several ranks: accelerate launch --module specdist.cli generate --option value ...",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
