"""Print how a run went, and some of its completions, from its finished shards.

specdist show runs/demo/output --rows 2
specdist show runs/demo/output --theory     what theory and the measured costs predict, beside what was
specdist show --schema                      the meaning of every column and every statistic
"""

from __future__ import annotations

import textwrap
from argparse import RawTextHelpFormatter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdist.cli.ending import tells_mistakes
from specdist.config.arguments import CommandParser
from specdist.utils.errors import UserError

if TYPE_CHECKING:
    from specdist.results.runs import Run

WIDTH = 100
INDENT = " " * 12
# Lines of a prompt and of a completion; of a prompt the end is shown, which the completion continues.
MAX_PROMPT_LINES, MAX_LINES = 3, 5
COLUMNS = [
    "row_id",
    "sample_index",
    "prompt",
    "completion",
    "finish_reason",
    "error",
    "num_completion_tokens",
]


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("output", nargs="?", help="folder of the run, or its URL")
    parser.add_argument("--schema", action="store_true", help="print the meaning of columns and statistics")
    parser.add_argument(
        "--rows", type=int, default=3, help="completions to print, spread over the run (default: 3)"
    )
    parser.add_argument("--full", action="store_true", help="print long prompts and completions in full")
    parser.add_argument(
        "--theory", action="store_true", help="print predictions and fits beside the measurements, too"
    )
    given = parser.values(arguments)
    if given.output is None and not given.schema:
        parser.error("name the --output folder of a run, or --schema")
    if given.schema:
        print_schema()
        return 0

    from specdist.results.runs import load_run

    run = load_run(given.output)
    if not run.finished_shards:
        raise UserError(
            f"{given.output} has no finished shard yet: python jobs/status.py {given.output} shows its work"
        )
    print_summary(run, has_theory=given.theory)
    print_rows(run, given.rows, is_full=given.full)
    return 0


def print_summary(run: Run, *, has_theory: bool) -> None:
    from specdist.data.run.run_folder import RunFolder
    from specdist.job.totals.closing import summary_lines
    from specdist.job.totals.report import comparison_lines, cut_line, run_figures, total_stats

    folder = RunFolder(run.path)
    total, settings, info = total_stats(folder), run.manifest.fingerprint, run.manifest.info
    lines = summary_lines(folder, total, num_devices=info.get("num_devices", info["world_size"]))
    if total.num_cut_completions:
        lines.append(f"cut         {cut_line(total.num_cut_completions, total.num_completions, settings)}")
    for line in lines:
        print(textwrap.fill(line, WIDTH, subsequent_indent=INDENT, break_long_words=False))
    if has_theory:
        lines = comparison_lines(run_figures(folder, total))
        print("", *(lines or ["nothing was drafted, and no costs are frozen: nothing to predict"]), sep="\n")


def print_rows(run: Run, num_rows: int, *, is_full: bool) -> None:
    table = run.table.select(COLUMNS)
    count = min(num_rows, table.num_rows)
    for place in range(count):
        (row,) = table.slice(place * table.num_rows // count, 1).to_pylist()
        sample = f", sample {row['sample_index']}" if run.manifest.fingerprint["num_samples"] > 1 else ""
        ended = {"length": "cut by a length limit", "error": f"error, {row['error']}"}
        size = "" if row["finish_reason"] == "error" else f"{row['num_completion_tokens']} tokens, "
        print(f"\nrow {row['row_id']}{sample}: {size}{ended.get(row['finish_reason'], row['finish_reason'])}")
        for label, most in (("prompt", MAX_PROMPT_LINES), ("completion", MAX_LINES)):
            # A row with an error may have no prompt, and has no completion.
            if row[label]:
                print(*shown(label, row[label], None if is_full else most), sep="\n")


def shown(label: str, text: str, most: int | None) -> list[str]:
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


def print_schema() -> None:
    from specdist.data.stats.schema import SECTIONS

    for section, (_, fields) in SECTIONS.items():
        print(f"{section}")
        for field in fields():
            text = f"  {field.name} ({field.type}): {field.meaning}"
            print(textwrap.fill(text, WIDTH, subsequent_indent="      "))
        print()
