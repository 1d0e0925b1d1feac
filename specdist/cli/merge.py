"""Write all rows of a complete run into one file, in input order, with every shard verified.

    specdist merge runs/mine --output mine.parquet

The file's name says which format: .arrow, .parquet, .jsonl or .csv. In a .csv file lists and structures are
JSON texts. With --format openai the results of a run over requests of OpenAI's batch format are written as
that API does, one per request, into a .jsonl file.
"""

from __future__ import annotations

from argparse import RawTextHelpFormatter
from collections.abc import Sequence

from specdist.cli.ending import tells_mistakes
from specdist.config.arguments import CommandParser, local_path
from specdist.utils.errors import UserError


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("run", help="folder of the run, or its URL")
    parser.add_argument(
        "--output", type=local_path, required=True, help="file to write: .arrow, .parquet, .jsonl or .csv"
    )
    parser.add_argument(
        "--format", choices=["openai"], help="openai = results of OpenAI's batch format, into a .jsonl file"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    given = parser.values(arguments)

    from specdist.data.run.merging import merge_run
    from specdist.data.run.run_folder import RunFolder
    from specdist.data.store.mirror import mirrored

    try:
        folder = RunFolder(mirrored(given.run))
        if given.format == "openai":
            from specdist.job.rows.openai_results import write_results

            num_results = write_results(folder, given.output, overwrite=given.overwrite)
            print(f"{num_results:,} results in {given.output}")
            return 0
        num_rows = merge_run(folder, given.output, overwrite=given.overwrite)
    except OSError as error:
        raise UserError(str(error)) from error
    print(f"{num_rows:,} rows in {given.output}")
    return 0
