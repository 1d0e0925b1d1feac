"""Benchmark tables in a Markdown file, made from result files: no number in it is ever typed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specdist.benchmark.results import BenchmarkResult
from specdist.benchmark.tables import markdown_report
from specdist.data.files import write_atomically
from specdist.errors import UserError

BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"


def update_readme(path: Path, results: Sequence[Path], *, is_brief: bool = False) -> None:
    """Replace what stands between the markers by one section per result, in the order given; a brief one has
    the first table alone.

    Raises :class:`UserError` where a result or the markers cannot be read; the file is then as it was.
    """
    sections = [markdown_report(BenchmarkResult.read(result), is_brief=is_brief) for result in results]
    try:
        # Not read_text: it would turn the line ends that are outside the markers into this system's.
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--update_readme {path} cannot be read: {error}") from error
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UserError(
            f"--update_readme {path} must hold {BEGIN} once and {END} once behind it: put both where the "
            "tables belong"
        )
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    content = "\n\n".join([BEGIN, *sections, END])
    write_atomically(path, lambda file: file.write(f"{before}{content}{after}".encode()))
