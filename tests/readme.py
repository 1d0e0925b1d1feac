"""The READMEs as one text, and their blocks of code taken apart."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import REPOSITORY

# The one in front, and those beside what they are about.
READMES = (
    REPOSITORY / "README.md",
    *(
        path
        for folder in ("jobs", "slurm", "specdist")
        for path in sorted((REPOSITORY / folder).rglob("README.md"))
    ),
)


def documentation() -> str:
    """All of them, one after the other."""
    return "\n".join(path.read_text(encoding="utf-8") for path in READMES)


def blocks(language: str) -> list[str]:
    """Every fenced block in this language, in order."""
    text = documentation()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """A command line as it is typed: ``NAME=value`` before it, the script, and the script's arguments.

    ``launcher`` is what stands before the script.
    """

    line: str
    environment: dict[str, str]
    launcher: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]


def commands() -> list[Command]:
    """Of all bash blocks; comments left out, continued lines joined."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    return [parsed(line) for line in lines if shlex.split(line, comments=True)]


def parsed(line: str) -> Command:
    words = shlex.split(line, comments=True)
    environment = {}
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    place = next((place for place, word in enumerate(words) if word.endswith((".py", ".sh"))), len(words) - 1)
    return Command(
        line=shlex.join(shlex.split(line, comments=True)),
        environment=environment,
        launcher=tuple(words[:place]),
        script=words[place],
        arguments=tuple(words[place + 1 :]),
    )


def workspace_of(path: Path) -> Path:
    """The folder beside which the README's relative paths are found."""
    for name in ("data", "runs", "jobs/configs"):
        (path / name).mkdir(parents=True)
    return path
