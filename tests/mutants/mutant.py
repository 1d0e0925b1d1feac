"""What a mutant is, and where in the package its text stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
SUFFIXES = (".py", ".c", ".h", ".css", ".html")
Sources = Mapping[Path, str]


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: for reports and ``--only``.
        where: the function that holds the text: ``verify_blocks``, ``GoodputPolicy.choose``; a class or a
            constant of a module where no function holds it (a nested function belongs to the outer one).
            Only where the same text stands in two functions of one name is the module's last name set
            before it, ``goodput.GoodputPolicy.choose``; what stands in no definition is held by the
            module, ``goodput``, and text that is not Python by its file, ``cpu_pass.c``. The file's
            place is looked up, so that it may move.
        old, new: text that is in there exactly once, and its replacement.
        tests: what pytest is to run, in this order, until one fails: those that ought to notice the fault,
            the cheapest first.
        is_dangerous: it would silently bias or lose output; some of these are planted in every run of the suite.
    """

    name: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]
    is_dangerous: bool = False

    def find(self, sources: Sources) -> Place:
        """Where the text stands. Raises ValueError unless that is one place."""
        places = [
            Place(path, begin + text[begin:end].index(self.old))
            for path, text in sources.items()
            if self.old in text
            for begin, end in _spans(path, text, self.where)
            if text.count(self.old, begin, end) == 1
        ]
        if len(places) != 1:
            found = f" ({', '.join(str(place.path) for place in places)})" if places else ""
            raise ValueError(
                f"mutant {self.name}: its text stands once in {len(places)} places called {self.where}{found}, "
                "not in one: write it anew"
            )
        return places[0]

    def planted(self, sources: Sources) -> tuple[Place, str]:
        """Where the text stands, and that file's with the fault. Raises as :meth:`find`."""
        place = self.find(sources)
        text = sources[place.path]
        return place, text[: place.offset] + self.new + text[place.offset + len(self.old) :]


@dataclass(frozen=True)
class Place:
    """A file below the root, and the number of characters before the text."""

    path: Path
    offset: int


def read_sources(root: Path = REPOSITORY) -> Sources:
    """Every text of the package and of the instruments, by its path below ``root``."""
    # The instruments are code, too; tests are not.
    found = [path for room in ("specdist", "tests/lab") for path in sorted((root / room).rglob("*"))]
    paths = [path for path in found if path.suffix in SUFFIXES and not path.name.startswith("test_")]
    return {path.relative_to(root): path.read_text() for path in paths}


def _spans(path: Path, text: str, where: str) -> Iterator[tuple[int, int]]:
    """The first character of every definition called ``where``, and the one after its last."""
    module = path.parent.name if path.name == "__init__.py" else path.stem
    if where == (module if path.suffix == ".py" else path.name):
        yield 0, len(text)
    if path.suffix == ".py":
        names = (where, where.removeprefix(f"{module}."))
        yield from (span for name, span in definitions(text) if name in names)


@cache
def definitions(text: str) -> list[tuple[str, tuple[int, int]]]:
    """The qualified name of every function, class, method and constant, and the characters that it takes,
    in whole lines with its decorators."""
    begins = [0]
    for line in text.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    found: list[tuple[str, tuple[int, int]]] = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(each.lineno for each in decorators)])
            span = begins[first - 1], begins[node.end_lineno or first]
            found.extend((prefix + name, span) for name in _names(node))
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try | ast.With):
                for part in ("body", "orelse", "finalbody"):
                    visit(getattr(node, part, []), prefix)
                for handler in getattr(node, "handlers", []):
                    visit(handler.body, prefix)

    visit(ast.parse(text).body, "")
    return found


def _names(node: ast.stmt) -> list[str]:
    """What a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [
        each.id for target in targets if target for each in ast.walk(target) if isinstance(each, ast.Name)
    ]
