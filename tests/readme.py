"""The READMEs as one text, their blocks of code taken apart, and the blocks that are generated.

python -m tests.readme        write every generated block anew
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.ranks import REPOSITORY

# The one in front, and those beside what they are about: the jobs' with its guides.
MANUALS = (
    REPOSITORY / "README.md",
    REPOSITORY / "jobs/README.md",
    *sorted((REPOSITORY / "jobs/guides").glob("*.md")),
    REPOSITORY / "jobs/benchmarks/README.md",
    *(path for folder in ("slurm", "specdist") for path in sorted((REPOSITORY / folder).rglob("README.md"))),
)
# Generated tables, each with what was measured, how, and where.
TABLES = tuple(sorted((REPOSITORY / "jobs/benchmarks/tables").glob("*.md")))
READMES = (*MANUALS, *TABLES)


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


@cache
def generated() -> dict[str, str]:
    """What stands between the markers ``<!-- name:begin -->`` and ``<!-- name:end -->``, by name."""
    from specdist.data.stats.schema import SECTIONS, fields_table
    from tests.models import family_table

    return {
        **{section: fields_table(name, fields()) for section, (name, fields) in SECTIONS.items()},
        "policies": policies(),
        "references": references(),
        "tree": tree(),
        "kernels": compiled_kernels(),
        "families": family_table.markdown(),
        "main-families": family_table.main_families(),
        "plan": f"```\n{plan()}\n```",
    }


def policies() -> str:
    """Policies, their options and their papers."""
    from specdist.policies.registry import HEAD_KINDS, OPTIONS, POLICIES, TARGET_ONLY

    lines = ["| policy | drafts | its options and defaults | from |", "|---|---|---|---|"]
    for name, policy in POLICIES.items():
        options = ["`--head`"] * (name in HEAD_KINDS)
        options += [
            f"`{option}` {info.default:g}" + (f" ({info.symbol})" if info.symbol else "")
            for option, info in OPTIONS[name].items()
            if option != "max_draft_tokens"
        ]
        papers = "; ".join(map(_short, policy.papers))
        lines.append(f"| `{name}` | {policy.drafts} | {', '.join(options)} | {papers} |")
    lines.append(f"| `{TARGET_ONLY}` | nothing: the target alone | | |")
    return "\n".join(lines)


def references() -> str:
    """The papers of all methods, each once."""
    from specdist.policies.registry import OF_ACCEPTANCE, OF_SPECULATION, POLICIES

    found = [paper for policy in POLICIES.values() for paper in policy.papers]
    papers = [*OF_SPECULATION, *found, *(paper for papers in OF_ACCEPTANCE.values() for paper in papers)]
    return "\n".join(f"- {paper}" for paper in dict.fromkeys(papers))


def _short(paper: str) -> str:
    """The first author, and the year."""
    names, year = paper[: paper.index(")")].split(" (")
    first, *others = names.split(", ")
    return f"{first}{' et al.' * bool(others)} {year}"


def compiled_kernels() -> str:
    """What ``python -m tests.kernels.compilation --output tests/kernels/compiled.json`` has found."""
    found = json.loads((REPOSITORY / "tests/kernels/compiled.json").read_text(encoding="utf-8"))
    capabilities = sorted({one["capability"] for one in found})
    cells = {
        (one["name"], one["capability"]): f"{one['registers']}, {one['shared_bytes'] / 1024:.1f}"
        for one in found
    }
    names = dict.fromkeys(one["name"] for one in found if "float32" not in one["name"])
    lines = [f"| kernel |{''.join(f' sm_{capability} |' for capability in capabilities)}"]
    lines.append("|---|" + "---|" * len(capabilities))
    lines += [
        f"| {name.replace('(bfloat16)', '').replace('(bfloat16, ', '(').strip()} |"
        + "".join(f" {cells[name, capability]} |" for capability in capabilities)
        for name in names
    ]
    return "\n".join(lines)


def plan() -> str:
    """What the command in front of the plan prints."""
    from specdist.config.generate import parse_arguments
    from specdist.lab.plan.job import run_plan
    from specdist.lab.plan.options import PlanConfig

    before = documentation().partition("<!-- plan:begin -->")[0]
    command = re.findall(r"```bash\n(.*?)```", before, re.DOTALL)[-1].replace("\\\n", " ")
    arguments = shlex.split(command)
    assert arguments[:2] == ["python", "jobs/plan.py"]
    return run_plan(parse_arguments(PlanConfig, arguments[2:]), command)[0]


def tree() -> str:
    """A line for each room of the package: what its docstring says, or else its modules' names."""
    package = REPOSITORY / "specdist"
    rooms = sorted(path.parent for path in package.rglob("__init__.py") if path.parent != package)
    lines = []
    for room in rooms:
        modules = [f"`{path.stem}`" for path in sorted(room.glob("*.py")) if path.name != "__init__.py"]
        about = first_sentence(room / "__init__.py") or ", ".join(modules)
        lines.append(f"- `{room.relative_to(package)}/`: {about}")
    return "\n".join(lines)


def first_sentence(path: Path) -> str:
    """Of a module's docstring, on one line and without the full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    text = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[a-z)`])(?<! al)\.(?: |$)", text, maxsplit=1)[0]
    return re.sub(r":(?:class|func|mod|meth):", "", sentence).replace("``", "`").rstrip(".:")


def write_block(path: Path, name: str, block: str) -> None:
    """Put a text between a page's markers of this name, if it has them."""
    text, begin, end = path.read_text(encoding="utf-8"), f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin in text:
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{block}\n\n{end}{rest.partition(end)[2]}"
        path.write_text(text, encoding="utf-8")


def write_generated() -> None:
    """Bring every generated block up to date."""
    blocks_by_name = generated()
    for path in READMES:
        for name, block in blocks_by_name.items():
            write_block(path, name, block)


if __name__ == "__main__":
    write_generated()
