"""HTML from the templates in this folder, which escape all text that is not markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

# Text, or finished markup.
Content = str


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("specdist.results.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, **values: Any) -> str:
    """A whole file."""
    return _environment().get_template(template).render(values)


def _part(macro: str, *values: Any) -> Markup:
    """By a macro of ``parts.html``."""
    part: Markup = getattr(_environment().get_template("parts.html").module, macro)(*values)
    return part


def paragraph(text: Content) -> Markup:
    return _part("paragraph", text)


def left_out(reason: str) -> Markup:
    """In place of something that cannot be shown: why, and how to get it."""
    return _part("paragraph", reason, "missing")


def noted(text: Content, note: Content) -> Markup:
    """A cell of two lines, the second one small."""
    return _part("noted", text, note)


def box(content: Sequence[Markup], class_: str = "") -> Markup:
    return _part("box", content, class_)


def details(summary: str, content: Sequence[Markup]) -> Markup:
    """Content that a click opens."""
    return _part("details", summary, content)


def banner(title: str, text: str, *, class_: str, role: str) -> Markup:
    return _part("banner", title, text, class_, role)


def tiles(figures: Sequence[tuple[str, str, str]]) -> Markup:
    """Tiles of labels, values and notes."""
    return _part("tiles", figures)


def table(
    header: Sequence[Content],
    rows: Iterable[Sequence[Content]],
    *,
    num_texts: int = 1,
    caption: str = "",
    class_: str = "",
) -> Markup:
    """Columns after the first ``num_texts`` hold numbers, and are aligned to the right."""
    kinds = ["text" if index < num_texts else "number" for index in range(len(header))]
    head, *body = [list(zip(cells, kinds, strict=True)) for cells in (header, *rows)]
    return _part("table", head, body, caption, f"table {class_}".strip())
