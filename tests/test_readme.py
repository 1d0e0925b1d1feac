"""What the README says of columns, statistics, papers and messages is what the code says."""

from __future__ import annotations

import ast
import re

import pytest

from specdist.data.schema import SECTIONS, markdown_table
from specdist.policies.references import REFERENCES
from tests.ranks import REPOSITORY
from tests.readme import README

TEXT = README.read_text(encoding="utf-8")


def between(name: str) -> str:
    """What stands between the markers of a block."""
    match = re.search(rf"<!-- {name}:begin -->\n\n(.*?)\n\n<!-- {name}:end -->", TEXT, re.DOTALL)
    assert match, f"README.md has no block {name}"
    return match[1]


@pytest.mark.parametrize("section", SECTIONS)
def test_tables_are_those_of_the_schema(section: str) -> None:
    """If one is not, put what is expected here between its markers."""
    assert between(section) == markdown_table(section)


def test_the_papers_are_all_there() -> None:
    assert between("references") == "\n".join(f"- {item.markdown()}" for item in REFERENCES.values())


def test_links_lead_somewhere() -> None:
    """Anchors are headings as a hub writes them, files are in the repository."""
    headings = re.findall(r"^##+ (.*)$", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert len(links) > 10
    for link in links:
        if link.startswith("#"):
            assert link[1:] in anchors, link
        elif not link.startswith("http"):
            assert (REPOSITORY / link).exists(), link


def messages() -> list[str]:
    """Every text in the package, with … for what is filled in."""
    found = []
    for path in sorted((REPOSITORY / "specdist").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%\w", "…", node.value))
            elif isinstance(node, ast.JoinedStr):
                pieces = [piece.value if isinstance(piece, ast.Constant) else "…" for piece in node.values]
                found.append("".join(map(str, pieces)))
    return found


def troubles() -> list[str]:
    """The first cells of the table of messages."""
    table = TEXT.partition("## Troubleshooting")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def test_messages_in_the_table_are_those_of_the_program() -> None:
    """Who changes a message changes the table."""
    fragments, known = troubles(), messages()
    assert len(fragments) >= 15
    for fragment in fragments:
        pattern = re.escape(fragment).replace("…", ".*?")
        assert any(re.search(pattern, message, re.DOTALL) for message in known), fragment
    assert not any("no such message as this one" in message for message in known)


def test_every_file_of_the_package_is_in_the_tree() -> None:
    """By its own name, or by its folder's where the tree stops there."""
    tree = TEXT.partition("## The tree")[2]
    for folder in sorted(path.name for path in (REPOSITORY / "specdist").iterdir() if path.is_dir()):
        assert folder.startswith("__") or f"  {folder}/" in tree, folder
    for path in (REPOSITORY / "specdist").glob("*.py"):
        assert path.name == "__init__.py" or f"  {path.name} " in tree, path.name
    for path in (REPOSITORY / "jobs").glob("*.*"):
        assert f"  {path.name} " in tree or path.name.startswith("constraints-"), path.name
