"""``specdist COMMAND``: calls the ``main`` of the command's module. Imports no heavy library."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

from specdist.cli.ending import USAGE_ERROR, end_at_once

PROGRAM = "specdist"
INTERRUPTED = 130
COMMANDS = {
    "generate": "generate completions for a data set of prompts; the same command resumes a run",
    "show": "print a run's totals, figures predicted by theory, and some completions",
    "report": "write a run's report: an HTML page and its figures",
    "status": "show a run's progress, its replicas and its errors",
    "merge": "write all rows of a complete run into one file",
    "evaluate": "score completions, or compare two runs",
    "plan": "estimate memory and speed before any GPU is used",
    "tune": "find the draft-length policy for a pair of models",
    "benchmark": "compare with transformers, or compare policies, or profile",
    "collect": "collect training examples for a head",
    "train-head": "train a head on collected examples",
    "distill": "train a draft on what the target says",
    "train-demo": "train the demo pair of models",
    "make-synthetic": "write a random pair of models with a given acceptance rate",
}
# Threads of their libraries may abort during the interpreter's exit.
RANK_COMMANDS = ("generate", "collect", "distill")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
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
    if arguments is None:
        # The program's name in --help, and in the command lines that jobs record.
        sys.argv = [f"{PROGRAM} {name}", *rest]
    try:
        code: int = import_module(f"specdist.cli.{name.replace('-', '_')}").main(rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    if name in RANK_COMMANDS and arguments is None:
        end_at_once(code)
    return code


def help_text() -> str:
    """Every command with a line of its own."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {meaning}" for name, meaning in COMMANDS.items()]
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
