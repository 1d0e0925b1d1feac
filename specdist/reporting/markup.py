"""HTML that is escaped where it is put together: prompts, errors and options may hold anything."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

VOID_TAGS = ("img", "meta", "br")


class Html(str):
    """Markup that is ready; any other string is text, and is escaped where it is put into some."""


# A text, or markup.
Content = str


def tag(name: str, /, *children: Content, **attributes: str | int) -> Html:
    """An element. ``class_`` stands for ``class``, which Python keeps for itself."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
    )
    if name in VOID_TAGS:
        return Html(f"<{name}{shown}>")
    return Html(f"<{name}{shown}>{join(children)}</{name}>")


def join(children: Iterable[Content]) -> Html:
    """One piece of markup of several, texts escaped."""
    return Html("".join(child if isinstance(child, Html) else html.escape(child) for child in children))


def table(
    header: Sequence[Content],
    rows: Iterable[Sequence[Content]],
    *,
    num_texts: int = 1,
    caption: str = "",
    class_: str = "",
) -> Html:
    """Columns after the first ``num_texts`` hold numbers, and are aligned to the right.

    A table that is wider than the page scrolls in a box of its own.
    """
    alignments = ["text" if index < num_texts else "number" for index in range(len(header))]
    head = [tag("th", cell, class_=kind, scope="col") for cell, kind in zip(header, alignments, strict=True)]
    body = [
        tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, alignments, strict=True)))
        for row in rows
    ]
    parts = [tag("caption", caption)] if caption else []
    parts += [tag("thead", tag("tr", *head)), tag("tbody", *body)]
    return tag("div", tag("table", *parts), class_=f"table {class_}".strip(), tabindex=0)
