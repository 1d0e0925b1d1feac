"""Print a run's totals, figures predicted by theory, and some completions, from its finished shards.

specdist show runs/demo/output --rows 2
specdist show --schema        the meaning of every column and every statistic
"""

from __future__ import annotations

import textwrap
from argparse import RawTextHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specdist.cli.ending import tells_mistakes
from specdist.config.arguments import CommandParser
from specdist.utils.errors import UserError

if TYPE_CHECKING:
    from specdist.data import RunFolder

WIDTH = 100
TOTALS = (
    ("rows", "num_rows", "{:,}"),
    ("rows with an error", "num_error_rows", "{:,}"),
    ("completions cut by a length limit", "num_cut_completions", "{:,}"),
    ("completion tokens", "num_completion_tokens", "{:,}"),
    ("tokens per second", "tokens_per_s", "{:,.1f}"),
    ("tokens per speculative step", "mean_acceptance_length", "{:.2f}"),
    ("draft tokens accepted", "draft_acceptance_rate", "{:.1%}"),
)


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("output", nargs="?", help="folder of the run, or its URL")
    parser.add_argument("--schema", action="store_true", help="print the meaning of columns and statistics")
    parser.add_argument(
        "--rows", type=int, default=2, help="prompts to print, spread over the run (default: 2)"
    )
    given = parser.values(arguments)
    if given.output is None and not given.schema:
        parser.error("name the --output folder of a run, or --schema")
    if given.schema:
        print_schema()
        return 0

    from specdist.data import RunFolder
    from specdist.data.mirror import mirrored

    output = mirrored(given.output)
    data_paths = sorted((output / "shards").rglob("*.arrow"))
    if not data_paths:
        raise UserError(f"{given.output} has no finished shard: name the --output folder of a run")
    print_totals(RunFolder(output))
    print_rows(data_paths, given.rows)
    return 0


def print_totals(folder: RunFolder) -> None:
    from specdist.job.report import comparison_lines, cut_line, is_often_cut, run_figures, total_stats

    total = total_stats(folder)
    figures = total.summary()
    for label, name, style in TOTALS:
        value = figures.get(name)
        print(f"{label:<34} {'-' if value is None else style.format(value)}")
    if is_often_cut(total.num_cut_completions, total.num_completions):
        print(cut_line(total.num_cut_completions, total.num_completions, folder.manifest.fingerprint))
    if not folder.manifest.info["exact"]:
        print("NOT exact: tokens that the verifier trusted were not verified by the target")
    lines = comparison_lines(run_figures(folder, total))
    if lines:
        print("", *lines, sep="\n")


def print_rows(data_paths: list[Path], num_rows: int) -> None:
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    rows = load_dataset("arrow", data_files=[str(path) for path in data_paths], split="train")
    for index in range(min(num_rows, len(rows))):
        row = rows[index * len(rows) // num_rows]
        print(f"\nrow {row['row_id']}: {row['num_completion_tokens']} tokens, {row['finish_reason']}")
        for label, text in (("prompt", row["prompt"]), ("completion", row["completion"])):
            print(f"--- {label}")
            for line in text.strip("\n").splitlines():
                print(textwrap.fill(line, WIDTH, drop_whitespace=False))


def print_schema() -> None:
    from specdist.data.schema import SECTIONS

    for section, (_, fields) in SECTIONS.items():
        print(f"{section}")
        for field in fields():
            text = f"  {field.name} ({field.type}): {field.meaning}"
            print(textwrap.fill(text, WIDTH, subsequent_indent="      "))
        print()
