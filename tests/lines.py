"""How large the package is, beside its budgets: lines, rooms, words, rounds; and the change of every room.

    python -m tests.lines [--with COMMIT] [--check]

``--check``, a part of ``tests/run.sh``, fails above what was reached, which is lowered with each part that
goes until it is the goal. A room is a folder of ``specdist/``; an arrow leads from a room, or a module beside
the rooms, to another that it imports. By default the commit is where this branch left ``main``, or the one
before on ``main``. Options are those of ``generate`` in the working tree.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache

from specdist.config.generate import GenerateConfig
from tests.mutants.mutant import REPOSITORY, definitions

# Pages of generated tables, where figures are looked up: a manual is read.
TABLES = "jobs/benchmarks/tables/"
GENERATED = re.compile(r"<!-- ([\w-]+):begin -->.*?<!-- \1:end -->", re.DOTALL)
JOB = "specdist.job.generate"
# A round's files are those that define these: what is merged makes them fewer, wherever it is moved.
SYNCHRONOUS = """
    Engine.step Scheduler Sequence ProposalRequest DraftWorker DraftLoop Verifier Dense sample_next_tokens
    ModelRunner NewBlocks LocalTarget StopRules NextRound PageTable RandomKeys LaunchedSteps DraftState
    PolicyState DraftRuns Feedback
"""
# goodput, work ahead with branches, graphs, a sharded target.
DEFAULT_ON_GPU = f"""
    {SYNCHRONOUS}
        ShardedTarget Collectives VocabParallelVerifier StepScores TokenFeatures
    RunLengths     AheadDrafter FirstAhead BranchTable ToRank TargetStates
    Link Draft    RoundPlan     Request Timeline DeviceClock StatsRecorder AheadReport
    NonFiniteGuard StaticPasses StaticRuns     CheckedGraphs InputStaging AttentionGroup PagedSegments
    TritonKernel SymmetricMemory DraftDistributions     sampling_kernels DraftDraws Winners
    BranchPageTable KeyValueCache writer_on DraftFeatures Goodput CostModel     RoundChooser
    residual_norm paged_attention search_kernel
"""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What has a budget; the fields' order is that of the table."""

    options: int
    package_lines: int
    import_lines: int
    synchronous_files: int
    synchronous_lines: int
    default_files: int
    default_lines: int
    test_lines: int
    words: int
    words_by_hand: int
    rooms: int
    arrows: int


REACHED = Sizes(
    options=91, package_lines=57_115, import_lines=48_715, synchronous_files=17, synchronous_lines=3_817,
    default_files=46, default_lines=10_625, test_lines=54_770, words=18_130, words_by_hand=15_550,
    rooms=12, arrows=62,
)  # fmt: skip
GOAL = Sizes(
    options=91, package_lines=54_000, import_lines=41_000, synchronous_files=16, synchronous_lines=3_200,
    default_files=44, default_lines=8_800, test_lines=52_000, words=22_000, words_by_hand=15_000,
    rooms=12, arrows=65,
)  # fmt: skip


@dataclass(frozen=True)
class Tree:
    """The texts of a tree's Python files and manuals, by their paths."""

    texts: Mapping[str, str]

    def lines(self, prefix: str) -> int:
        return sum(_length(text) for path, text in self.texts.items() if _is_python(path, prefix))

    def modules(self) -> dict[str, str]:
        """Texts of the package, by the modules' names."""
        return {module_of(path): text for path, text in self.texts.items() if _is_python(path, "specdist/")}

    def rooms(self) -> Counter[str]:
        """Lines by room; a file beside the rooms is called ``llm.py``."""
        counts: Counter[str] = Counter()
        for path, text in self.texts.items():
            if _is_python(path, "specdist/"):
                counts[path.split("/")[1]] += _length(text)
        return counts

    def num_files(self, room: str) -> int:
        return sum(_is_python(path, f"specdist/{room}") for path in self.texts)

    def arrows(self) -> set[tuple[str, str]]:
        """(importer, imported): rooms, and modules beside them."""
        modules = self.modules()
        pairs = {
            (module.split(".")[1], name.split(".")[1])
            for module, text in modules.items()
            for name in _imports(text, modules)
            if "." in module and "." in name
        }
        return {(one, other) for one, other in pairs if one != other}

    def closure(self, module: str) -> set[str]:
        """Every module that importing this one may import, also later, inside functions."""
        modules, found, waiting = self.modules(), set[str](), [module]
        while waiting:
            name = waiting.pop()
            if name in found or name not in modules:
                continue
            found.add(name)
            parts = name.split(".")
            waiting += [".".join(parts[:count]) for count in range(1, len(parts))]
            waiting += _imports(modules[name], modules)
        return found

    def defining(self, names: str) -> tuple[set[str], list[str]]:
        """The files that define these, and the names that not exactly one file defines."""
        found: dict[str, list[str]] = {name: [] for name in names.split()}
        for path, text in self.texts.items():
            if _is_python(path, "specdist/"):
                for name in {name for name, _ in definitions(text)} & found.keys():
                    found[name].append(path)
        files = {paths[0] for paths in found.values() if len(paths) == 1}
        return files, [name for name, paths in found.items() if len(paths) != 1]

    def sizes(self) -> Sizes:
        modules, rooms = self.modules(), self.rooms()
        (synchronous, _), (default, _) = self.defining(SYNCHRONOUS), self.defining(DEFAULT_ON_GPU)
        manuals = [
            text for path, text in self.texts.items() if path.endswith(".md") and not path.startswith(TABLES)
        ]
        return Sizes(
            options=len(fields(GenerateConfig)),
            package_lines=self.lines("specdist/"),
            import_lines=sum(_length(modules[name]) for name in self.closure(JOB)),
            synchronous_files=len(synchronous),
            synchronous_lines=sum(_length(self.texts[path]) for path in synchronous),
            default_files=len(default),
            default_lines=sum(_length(self.texts[path]) for path in default),
            test_lines=self.lines("tests/"),
            words=sum(len(text.split()) for text in manuals),
            words_by_hand=sum(len(GENERATED.sub("", text).split()) for text in manuals),
            rooms=sum(not room.endswith(".py") for room in rooms),
            arrows=len(self.arrows()),
        )


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_python(path: str, prefix: str) -> bool:
    return path.startswith(prefix) and path.endswith(".py")


def _length(text: str) -> int:
    return len(text.splitlines())


@cache
def imported_names(text: str) -> list[tuple[str, str | None]]:
    """(module, name of it) of every import, also within functions."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"imports are absolute here: {ast.unparse(node)}"
            found += [(str(node.module), alias.name) for alias in node.names]
    return found


def _imports(text: str, modules: Mapping[str, str]) -> Iterator[str]:
    for module, name in imported_names(text):
        full = f"{module}.{name}"
        found = full if name is not None and full in modules else module
        if found in modules:
            yield found


def tree_here() -> Tree:
    """The working tree, without what git ignores."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard").decode().split("\n")
    paths = [path for path in listed if path.endswith((".py", ".md")) and (REPOSITORY / path).is_file()]
    return Tree({path: (REPOSITORY / path).read_text(encoding="utf-8") for path in paths})


def tree_of(commit: str) -> Tree:
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as archive:
        members = [member for member in archive if member.isfile() and member.name.endswith((".py", ".md"))]
        files = {member.name: archive.extractfile(member) or io.BytesIO() for member in members}
        return Tree({name: file.read().decode() for name, file in files.items()})


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, check=True).stdout


def commit_before() -> str | None:
    """Where this branch left ``main``; on ``main`` the commit before; None if neither is known here."""
    head = _git("rev-parse", "HEAD")
    for command in (["merge-base", "HEAD", "main"], ["rev-parse", "--verify", "HEAD~1"]):
        try:
            found = _git(*command)
        except subprocess.CalledProcessError:
            continue
        if found != head:
            return found.decode().strip()
    return None


def report(here: Tree, before: Tree | None) -> str:
    """Two tables."""
    sizes, lines = here.sizes(), [f"{'':32}{'now':>8}{'at most':>9}{'goal':>8}"]
    for field in fields(Sizes):
        size, most, goal = (getattr(each, field.name) for each in (sizes, REACHED, GOAL))
        over = f"  {size - most:,} over" if size > most else ""
        lines.append(f"{field.name.replace('_', ' '):32}{size:>8,}{most:>9,}{goal:>8,}{over}")
    if unknown := here.defining(DEFAULT_ON_GPU)[1]:
        lines.append(
            f"not defined in one file, so that a round's lines are too few: {', '.join(unknown)}: name in "
            "tests/lines.py what does their work now"
        )
    lines += ["", f"{'room':32}{'files':>8}{'lines':>9}{'change':>9}"]
    rooms, earlier = here.rooms(), before.rooms() if before else here.rooms()
    for room in sorted({*rooms, *earlier}):
        change = rooms[room] - earlier[room]
        shown = f"{change:+,}" if change else ""
        lines.append(
            f"{room:32}{here.num_files(room + '/' * ('.py' not in room)):>8}{rooms[room]:>9,}{shown:>9}"
        )
    tests = here.lines("tests/") - before.lines("tests/") if before else 0
    lines.append(f"{'tests':32}{'':8}{sizes.test_lines:>9,}{f'{tests:+,}' if tests else '':>9}")
    return "\n".join(line.rstrip() for line in lines)


def over_budget(sizes: Sizes) -> list[str]:
    """What is larger than was reached before, with both figures."""
    found = []
    for field in fields(Sizes):
        size, most = getattr(sizes, field.name), getattr(REACHED, field.name)
        if size > most:
            found.append(f"{field.name.replace('_', ' ')}: {size:,}, at most {most:,}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lines", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--with", dest="commit", help="the commit that rooms are compared with")
    parser.add_argument("--check", action="store_true", help="fail above what was reached")
    given = parser.parse_args(arguments)
    try:
        here, commit = tree_here(), given.commit or commit_before()
    except (OSError, subprocess.CalledProcessError):
        sys.stdout.write("no checkout of git: nothing is counted\n")
        return 0
    try:
        before = tree_of(commit) if commit else None
    except subprocess.CalledProcessError as error:
        parser.error(f"--with {commit}: {error.stderr.decode().strip()}")
    sys.stdout.write(report(here, before) + "\n")
    if given.check and (over := over_budget(here.sizes())):
        sys.stderr.write(
            f"larger than REACHED in tests/lines.py ({'; '.join(over)}): take something out first\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
