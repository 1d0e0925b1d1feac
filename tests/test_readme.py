"""What the READMEs say of columns, statistics, policies, papers and messages is what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from specdist.data.schema import SECTIONS, markdown_table
from specdist.policies.registry import all_papers
from specdist.policies.registry import markdown_table as markdown_policies
from tests.ranks import REPOSITORY
from tests.readme import READMES, documentation

TEXT = documentation()
# Two pages, and what is linked from them.
MAX_LINES = 220


def between(name: str) -> str:
    """What stands between the markers of a block."""
    match = re.search(rf"<!-- {name}:begin -->\n\n(.*?)\n\n<!-- {name}:end -->", TEXT, re.DOTALL)
    assert match, f"no README has a block {name}"
    return match[1]


@pytest.mark.parametrize("section", SECTIONS)
def test_tables_are_those_of_the_schema(section: str) -> None:
    """If one is not, put what is expected here between its markers."""
    assert between(section) == markdown_table(section)


def test_the_papers_are_all_there() -> None:
    assert between("references") == "\n".join(f"- {item.markdown()}" for item in all_papers())


def test_the_policies_are_all_there() -> None:
    """If they are not, put what is expected here between the markers."""
    assert between("policies") == markdown_policies()


def anchors(path: Path) -> set[str]:
    """Headings as a hub writes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_somewhere(path: Path) -> None:
    """To files of the repository, and to headings in them."""
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path}: {link}"
        assert not anchor or anchor in anchors(target), f"{path}: {link}"


def test_the_first_page_is_short_and_leads_to_all_others() -> None:
    front = READMES[0].read_text(encoding="utf-8")
    assert len(front.splitlines()) <= MAX_LINES
    for path in READMES[1:]:
        assert f"({path.relative_to(REPOSITORY)}" in front, path


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
    tree = (REPOSITORY / "specdist" / "README.md").read_text(encoding="utf-8")
    for folder in sorted(path.name for path in (REPOSITORY / "specdist").iterdir() if path.is_dir()):
        assert folder.startswith("__") or f"  {folder}/" in tree, folder
    for path in (REPOSITORY / "specdist").glob("*.py"):
        assert path.name == "__init__.py" or f"  {path.name} " in tree, path.name
    for path in (REPOSITORY / "jobs").glob("*.*"):
        assert f"  {path.name} " in tree or path.name.startswith("constraints-"), path.name
