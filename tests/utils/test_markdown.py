"""Strange text in Markdown stays what it is."""

from __future__ import annotations

import random
import re

import pytest

from specdist.utils.markdown import code, plain, table
from tests.data.samples import STRANGE_TEXT, random_text


@pytest.mark.parametrize(
    ("value", "shown"),
    [("a", "`a`"), ("a`b``c", "``` a`b``c ```"), ("a|b", r"`a\|b`"), ("a\nb", "`a b`"), ("", "(empty)"),
     (None, "`null`"), (["\n"], r'`["\n"]`'), (0.7, "`0.7`")],
)  # fmt: skip
def test_code_shows_a_value(value: object, shown: str) -> None:
    assert code(value) == shown


def test_cells_stay_cells() -> None:
    """Whatever is in them, a row is one line with as many bars that count as it has columns and one."""
    rng = random.Random(0)
    for text in [*STRANGE_TEXT, *(random_text(rng) for _ in range(300)), "a | b", "``", "\\|"]:
        for cell in (code(text), plain(text)):
            lines = table(["a", "b"], [[cell, "x"]]).split("\n")
            assert lines[:2] == ["| a | b |", "|---|---|"] and len(lines) == 3
            assert len(re.findall(r"(?<!\\)\|", lines[2])) == 3 or "\\|" in text


def test_plain_text_is_no_markup() -> None:
    assert plain("a <b> *c* [d](e) `f`\n# g") == r"a \<b\> \*c\* \[d\](e) \`f\` \# g"
