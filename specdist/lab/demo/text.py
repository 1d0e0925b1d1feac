"""Text that every Python installation carries: the language reference and the standard library's docstrings.

Modules are parsed with :mod:`ast` and never imported. The language reference (``pydoc_data``) is used if it
is installed. A document is one module or one topic.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specdist.utils.errors import UserError

# Installed packages are not the standard library; the others hold tests, generated tables or boilerplate.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings"}
)
TOPICS_FILE = Path("pydoc_data", "topics.py")
SHINGLE_WORDS = 8
HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Document:
    """One module's docstrings or one topic of the language reference, in sections."""

    name: str
    sections: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n\n".join(self.sections)


@dataclass(frozen=True)
class Corpus:
    """Documents to train on, and held-out documents."""

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all texts in order, and of the two parts' bounds."""
        digest = hashlib.sha256()
        for part in (self.training, self.held_out):
            for document in part:
                digest.update(hashlib.sha256(document.text.encode()).digest())
            digest.update(b"end of part")
        return digest.hexdigest()


def load_corpus(*, held_out_one_in: int = HELD_OUT_ONE_IN, stdlib: Path | None = None) -> Corpus:
    """Read, deduplicate and split the standard library's text; the same files give the same corpus.

    One document in ``held_out_one_in`` is held out, by the hash of its content, independently of the other
    documents. Raises :class:`UserError` if there is no text.
    """
    stdlib = stdlib or Path(sysconfig.get_path("stdlib"))
    documents = drop_near_duplicates([*topic_documents(stdlib), *module_documents(stdlib)])
    if not documents:
        raise UserError(
            f"the standard library folder {stdlib} contains no Python sources to read docstrings from: use a "
            "Python whose standard library is installed as .py files (not a zip or a minimal package)"
        )
    held_out = {document for document in documents if _is_held_out(document, held_out_one_in)}
    return Corpus(
        training=tuple(document for document in documents if document not in held_out),
        held_out=tuple(document for document in documents if document in held_out),
    )


def topic_documents(stdlib: Path) -> Iterator[Document]:
    """The topics of the language reference by name, a section per paragraph; none if it is not installed."""
    path = stdlib / TOPICS_FILE
    tree = _parse(path) if path.is_file() else None
    assignments = (node for node in tree.body if isinstance(node, ast.Assign)) if tree else ()
    for node in assignments:
        topics = ast.literal_eval(node.value)
        for name in sorted(topics):
            paragraphs = (paragraph.strip("\n").rstrip() for paragraph in topics[name].split("\n\n"))
            yield Document(f"topic {name}", tuple(filter(None, paragraphs)))


def module_documents(stdlib: Path) -> Iterator[Document]:
    """The docstrings of every module by path, a section per module, class and function."""
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts) and relative != TOPICS_FILE:
            tree = _parse(path)
            sections = tuple(_docstring_sections(tree)) if tree else ()
            if sections:
                yield Document(f"module {relative.as_posix()}", sections)


def drop_near_duplicates(documents: Iterable[Document]) -> list[Document]:
    """Drop each section that mostly repeats earlier ones, and each document that has no section left.

    A section repeats when at least half of its runs of ``SHINGLE_WORDS`` words were seen before: docstrings
    are copied between a module and its C or pure-Python twin, and topics quote each other.
    """
    seen: set[tuple[str, ...]] = set()
    kept_documents = []
    for document in documents:
        kept_sections = []
        for section in document.sections:
            shingles = _shingles(section)
            if 2 * len(shingles & seen) < len(shingles):
                kept_sections.append(section)
            seen |= shingles
        if kept_sections:
            kept_documents.append(Document(document.name, tuple(kept_sections)))
    return kept_documents


def _shingles(text: str) -> set[tuple[str, ...]]:
    words = text.lower().split()
    num_shingles = max(1, len(words) - SHINGLE_WORDS + 1)
    return {tuple(words[start : start + SHINGLE_WORDS]) for start in range(num_shingles)}


def _is_held_out(document: Document, one_in: int) -> bool:
    return int.from_bytes(hashlib.sha256(document.text.encode()).digest()[:8], "big") % one_in == 0


def _parse(path: Path) -> ast.Module | None:
    """The file's syntax tree; None for another Python's syntax, which some distributions have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sources of the library itself warn about their escape sequences
        try:
            return ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return None


def _docstring_sections(node: ast.AST) -> Iterator[str]:
    """Docstrings in source order, each under the line that defines its object."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node)
        if docstring and docstring.strip():
            yield _heading(node) + docstring
    for child in ast.iter_child_nodes(node):
        yield from _docstring_sections(child)


def _heading(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.Module):
        return ""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases}):\n" if bases else f"class {node.name}:\n"
    return f"def {node.name}({ast.unparse(node.args)}):\n"
