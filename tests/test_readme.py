"""What the READMEs say of columns, statistics, policies, papers and messages is what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.lines import GENERATED
from tests.ranks import REPOSITORY
from tests.readme import READMES, TABLES, documentation, generated

TEXT = documentation()
MAX_LINES = 400
# By hand: what is generated is not counted. A page of tables has only what was measured, how, and where.
MAX_WORDS = {"README.md": 1_400, "jobs/README.md": 2_500, "jobs/benchmarks/README.md": 1_200}
MAX_WORDS_OF_GUIDES, MAX_WORDS_OF_TABLES, MAX_WORDS_OF_OTHERS = 1_200, 300, 2_200


def between(name: str) -> str:
    """What stands between the markers of a block."""
    match = re.search(rf"<!-- {name}:begin -->\n\n(.*?)\n\n<!-- {name}:end -->", TEXT, re.DOTALL)
    assert match, f"no README has a block {name}"
    return match[1]


# Tests of their own compare these.
BY_OTHERS = {"memory", "published", "placements", "demo"}
MARKED = sorted({*re.findall(r"<!-- ([\w-]+):begin -->", TEXT)} - BY_OTHERS)


@pytest.mark.parametrize("name", MARKED)
def test_generated_blocks_are_up_to_date(name: str) -> None:
    """If one is not: python -m tests.readme writes them anew."""
    assert between(name) == generated()[name]


def test_every_generated_block_stands_in_one_readme() -> None:
    assert sorted(generated()) == MARKED


def anchors(path: Path) -> set[str]:
    """Headings as a hub writes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_somewhere(path: Path) -> None:
    """To files of the repository, and to headings in them."""
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
        assert not re.search(r"\s", link), f"{path}: {link}"
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path}: {link}"
        assert not anchor or anchor in anchors(target), f"{path}: {link}"


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_page_is_short(path: Path) -> None:
    """A measurement in a manual is a sentence with a link; its table is a page of its own."""
    text, name = path.read_text(encoding="utf-8"), str(path.relative_to(REPOSITORY))
    num_words = len(GENERATED.sub("", text).split())
    if path in TABLES:
        # Of a table whose instrument is gone no block is generated: its rows are no text either.
        rows = sum(len(line.split()) for line in GENERATED.sub("", text).splitlines() if line[:1] == "|")
        assert num_words - rows <= MAX_WORDS_OF_TABLES, name
        return
    others = MAX_WORDS_OF_GUIDES if path.parent.name == "guides" else MAX_WORDS_OF_OTHERS
    assert num_words <= MAX_WORDS.get(name, others), name
    assert len(text.splitlines()) <= MAX_LINES, name


def test_the_first_page_leads_to_all_others() -> None:
    """By two links at most."""
    here = {READMES[0]}
    for _ in range(2):
        here |= {target for page in here for target in linked_pages(page)}
    assert set(READMES) <= here, set(READMES) - here


def linked_pages(path: Path) -> list[Path]:
    links = re.findall(r"\]\(([^)\s#]+\.md)[)#]", path.read_text(encoding="utf-8"))
    return [(path.parent / link).resolve() for link in links if not link.startswith("http")]


def test_a_round_is_read_in_as_few_lines_as_its_page_says() -> None:
    """Draft and target in one process: what other rounds need is in other files."""
    page = REPOSITORY / "specdist/engine/README.md"
    files = re.findall(r"^\| \[\S+\]\((\S+\.py)\) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(files) <= 9
    assert sum(len((page.parent / file).read_text(encoding="utf-8").splitlines()) for file in files) <= 2300


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
    text = (REPOSITORY / "jobs/README.md").read_text(encoding="utf-8")
    table = text.partition("## Troubleshooting")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def test_messages_in_the_table_are_those_of_the_program() -> None:
    """Who changes a message changes the table."""
    fragments, known = troubles(), messages()
    assert len(fragments) >= 10
    for fragment in fragments:
        pattern = re.escape(fragment).replace("…", ".*?")
        assert any(re.search(pattern, message, re.DOTALL) for message in known), fragment
    assert not any("no such message as this one" in message for message in known)


def test_every_job_is_in_the_table_of_jobs() -> None:
    """By its own name."""
    text = (REPOSITORY / "jobs" / "README.md").read_text(encoding="utf-8")
    for path in (REPOSITORY / "jobs").glob("[a-z]*.py"):
        assert f"`{path.name}`" in text, path.name
