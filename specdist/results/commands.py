"""What ``specdist show``, ``report``, ``status`` and ``merge`` do with a run: each takes its options."""

from __future__ import annotations

import contextlib
import textwrap
import time
from argparse import Namespace
from typing import Any

from specdist.config.arguments import URL
from specdist.data.run.merging import merge_run
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.schema import SECTIONS
from specdist.data.store.access import reading
from specdist.data.store.copies import mirrored
from specdist.data.store.files import writing
from specdist.job.totals.closing import summary_lines
from specdist.job.totals.report import cut_line, total_stats
from specdist.job.totals.status import StatusReader
from specdist.results.runs import Run, load_run
from specdist.utils.documents import print_document
from specdist.utils.errors import UserError

WIDTH, INDENT = 100, " " * 12
# Lines of a prompt and of a completion; of a prompt the end is shown, which the completion continues.
MAX_PROMPT_LINES, MAX_LINES = 3, 5
COLUMNS = [
    "row_id", "sample_index", "prompt", "completion", "finish_reason", "error", "num_completion_tokens"
]  # fmt: skip


def show(given: Namespace) -> int:
    """Print the schema, or a run's totals and some of its rows. Raises :class:`UserError`."""
    if given.schema:
        _print_schema()
        return 0
    if given.output is None:
        raise UserError("name the --output folder of a run, or --schema; --help lists all options")
    run = load_run(given.output)
    if not run.finished_shards:
        raise UserError(
            f"{given.output} has no finished shard yet: python jobs/status.py {given.output} shows its work"
        )
    _print_summary(run)
    _print_rows(run, given.rows, is_full=given.full)
    return 0


def report(given: Namespace) -> tuple[str, dict[str, Any]]:
    """Write the report; the text and the document to print. Raises :class:`UserError`."""
    if URL.match(given.outputs[0]) and given.folder is None:
        raise UserError(f"{given.outputs[0]} is a URL: name a folder for the report with --folder")
    # The report's pictures take time to import.
    from specdist.results.report import write_report

    outputs = [mirrored(output) for output in given.outputs]
    written = write_report(outputs, folder=given.folder)
    pictures = [str(path) for path in written.pictures]
    document = {"page": str(written.page), "num_bytes": written.page.stat().st_size, "pictures": pictures}
    return f"report: {written.page}", document


def status(given: Namespace) -> int:
    """Print a run's progress, and with ``--watch`` again and again, on a terminal in one place; 0 if the run
    is complete, else 1."""
    with reading(given.output) as output:
        reader = StatusReader(output)
        found = reader.read()
    if given.watch is not None and not found.is_complete:
        from rich.live import Live
        from rich.text import Text

        with contextlib.suppress(KeyboardInterrupt), Live(auto_refresh=False, transient=True) as live:
            while not found.is_complete:
                if live.console.is_terminal:
                    live.update(Text("\n".join(found.lines())), refresh=True)
                else:
                    print(*found.lines(), "", sep="\n", flush=True)
                time.sleep(given.watch)
                found = reader.read()
    print_document(found.to_json(), *found.lines())
    return 0 if found.is_complete else 1


def merge(given: Namespace) -> tuple[str, None]:
    """Write one file; the text to print. Raises :class:`UserError`."""
    write, things = merge_run, "rows"
    if given.format is not None:
        # It decodes tokens, for which transformers is imported.
        from specdist.job.rows.openai_results import write_results

        write, things = write_results, "results"
    with writing(given.output):
        number = write(RunFolder(mirrored(given.run)), given.output, overwrite=given.overwrite)
    return f"{number:,} {things} in {given.output}", None


def _print_schema() -> None:
    for section, (_, fields) in SECTIONS.items():
        print(f"{section}")
        for field in fields():
            text = f"  {field.name} ({field.type}): {field.meaning}"
            print(textwrap.fill(text, WIDTH, subsequent_indent="      "))
        print()


def _print_summary(run: Run) -> None:
    folder = RunFolder(run.path)
    total, settings, info = total_stats(folder), run.manifest.fingerprint, run.manifest.info
    lines = summary_lines(folder, total, num_devices=info.get("num_devices", info["world_size"]))
    if total.num_cut_completions:
        lines.append(f"cut         {cut_line(total.num_cut_completions, total.num_completions, settings)}")
    for line in lines:
        print(textwrap.fill(line, WIDTH, subsequent_indent=INDENT, break_long_words=False))


def _print_rows(run: Run, num_rows: int, *, is_full: bool) -> None:
    table = run.table.select(COLUMNS)
    count = min(num_rows, table.num_rows)
    for place in range(count):
        (row,) = table.slice(place * table.num_rows // count, 1).to_pylist()
        sample = f", sample {row['sample_index']}" if run.manifest.fingerprint["num_samples"] > 1 else ""
        ended = {"length": "cut by a length limit", "repetition": "ended in a loop"}
        ended["error"] = f"error, {row['error']}"
        size = "" if row["finish_reason"] == "error" else f"{row['num_completion_tokens']} tokens, "
        print(f"\nrow {row['row_id']}{sample}: {size}{ended.get(row['finish_reason'], row['finish_reason'])}")
        for label, most in (("prompt", MAX_PROMPT_LINES), ("completion", MAX_LINES)):
            # A row with an error may have no prompt, and has no completion.
            if row[label]:
                print(*_shown(label, row[label], None if is_full else most), sep="\n")


def _shown(label: str, text: str, most: int | None) -> list[str]:
    """The text's lines beside the label, ``most`` of them: the last of a prompt, else the first."""
    lines = [
        part
        for line in text.strip("\n").expandtabs(4).splitlines()
        for part in textwrap.wrap(line, WIDTH - len(INDENT), replace_whitespace=False) or [""]
    ]
    if most is not None and len(lines) > most:
        num_left = len(lines) - most + 1
        note = f"[{num_left} more lines: --full]"
        lines = [note, *lines[num_left:]] if label == "prompt" else [*lines[: most - 1], note]
    return [
        f"{label if place == 0 else '':<{len(INDENT)}}{line}".rstrip() for place, line in enumerate(lines)
    ]
