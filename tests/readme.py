"""The READMEs as one text, their blocks of code taken apart, and the blocks that are generated.

python -m tests.readme        write every generated block anew
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import textwrap
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
    from specdist.data.stats.schema import SECTIONS, markdown_table
    from specdist.policies.registry import all_papers
    from specdist.policies.registry import markdown_table as policies
    from tests import elsewhere
    from tests.engine import measure_logprobs
    from tests.headlines import headlines
    from tests.job import clouds
    from tests.lab import acceptance, public_tables
    from tests.lab.emulation import experts as emulated_experts
    from tests.lab.emulation import policies as emulated_policies
    from tests.lab.plan import sweep, validated
    from tests.models import family_table, quantized_formats
    from tests.models.heads import tables as heads_tables
    from tests.sampling.constraints import tables as constraint_tables

    return {
        **{section: markdown_table(section) for section in SECTIONS},
        "policies": policies(),
        "references": "\n".join(f"- {paper.markdown()}" for paper in all_papers()),
        "tree": tree(),
        "kernels": compiled_kernels(),
        "clouds": clouds.markdown(),
        "rounds": sweep.markdown(),
        "plan-validated": validated.markdown(),
        "public": public_tables.markdown(),
        "fault-injection": fault_injection(),
        "drafters": acceptance.drafters_markdown(),
        "elsewhere": elsewhere.markdown(),
        "constrained": constraint_tables.markdown(),
        "logprobs-cost": measure_logprobs.markdown(),
        "quantized": quantized_formats.markdown(),
        "families": family_table.markdown(),
        "plan": f"```\n{plan()}\n```",
        "emulation": emulation(),
        "host-times": host_times(),
        "emulated": emulated(),
        "policies-emulated": emulated_policies.markdown(
            REPOSITORY / "jobs/benchmarks/policies-emulated.json"
        ),
        "experts-emulated": emulated_experts.markdown(),
        **headlines(),
        **heads_tables.markdown(),
    }


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


def emulation() -> str:
    """The results of ``python -m tests.lab.emulation --emulate``."""
    from tests.lab.emulation.results import EmulationResult

    files = sorted((REPOSITORY / "jobs/benchmarks").glob("emulation-*.json"))
    return "\n\n".join(EmulationResult.read(file).markdown() for file in files)


def emulated() -> str:
    """What a user would quote of the defaults, wherever the draft is."""
    from tests.lab.emulation import placements

    given = placements.given()
    text = (
        "Several GPUs have not been measured yet. In virtual time, at the pace that `jobs/plan.py` predicts "
        "from published peaks and assumed shares of them, this is tokens/s per GPU of a 70B target, in "
        "bfloat16 on 4 H100s or in FP8 on 2, with the default options and a 1B draft on the target's rank 0 "
        f"(shared) or on a GPU of its own, which counts (acceptance {given['acceptance']:g}, greedy, prompts "
        f"of {given['prompt_tokens']:,} and completions of {given['output_tokens']:,} tokens, as many "
        "sequences as memory holds; in brackets, times the target alone):"
    )
    worth = [f"{most} sequences ({name})" for name, most in placements.worth_its_gpu().items() if most]
    after = (
        f"Per GPU, one of the draft's own is worth it up to {' or '.join(worth)}; else rank 0 is the better "
        "place, and the other GPUs run more replicas. A run whose draft will hardly use its GPU says so when "
        "it starts. More: [measurements](jobs/benchmarks/README.md)."
    )
    fill = {"width": 118, "break_on_hyphens": False, "break_long_words": False}
    return "\n\n".join([textwrap.fill(text, **fill), placements.markdown(), textwrap.fill(after, **fill)])


def fault_injection() -> str:
    """What injected faults did to replicas, as a table."""
    from specdist.utils.table import Table

    rows = []
    for entry in json.loads(
        (REPOSITORY / "jobs/benchmarks/fault-injection.json").read_text(encoding="utf-8")
    )["injections"]:
        done, _, found = entry["last_line"].partition(": ")
        assert found == "all rows there, once, every byte the same"
        killed, vanished, paused, sub_shards, runs = map(int, re.findall(r"\d+", done))
        options = entry["command"].partition(" tests.job.fault_injection ")[2].partition(" --output")[0]
        rows.append(
            {"options": f"`{options}`", "runs": runs, "killed": killed, "of them vanished": vanished,
             "paused": paused, "sub-shards at work": sub_shards, "minutes": round(entry["seconds"] / 60)}
        )  # fmt: skip
    return Table.of(rows, num_names=1).markdown()


def host_times() -> str:
    """The host's time between two passes, before and after."""
    from tests.lab.emulation.host_times import table

    path = REPOSITORY / "jobs/benchmarks/host-times.json"
    return table(json.loads(path.read_text(encoding="utf-8")))


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


def write_generated() -> None:
    """Bring every generated block up to date."""
    blocks_by_name = generated()
    for path in READMES:
        text = path.read_text(encoding="utf-8")
        for name, block in blocks_by_name.items():
            begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
            if begin in text:
                before, _, rest = text.partition(begin)
                text = f"{before}{begin}\n\n{block}\n\n{end}{rest.partition(end)[2]}"
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_generated()
