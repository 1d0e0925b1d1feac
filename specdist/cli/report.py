"""Write a run's report: an HTML page, and its figures as PNG files.

    specdist report runs/mine
    specdist report runs/mine --tune runs/tune            with the results of specdist tune
    specdist report runs/one runs/two --folder runs/both  several runs side by side

The last line on stdout is a JSON document.
"""

from __future__ import annotations

import json
from argparse import RawTextHelpFormatter
from collections.abc import Sequence

from specdist.cli.ending import tells_mistakes
from specdist.config.arguments import URL, CommandParser, local_path
from specdist.utils.errors import UserError


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("outputs", nargs="+", metavar="OUTPUT", help="folder of a run, or its URL")
    parser.add_argument(
        "--folder", type=local_path, help="output folder (default: report/ in the folder of the run)"
    )
    parser.add_argument("--tune", type=local_path, help="output folder of specdist tune for this pair")
    given = parser.values(arguments)

    if URL.match(given.outputs[0]) and given.folder is None:
        raise UserError(f"{given.outputs[0]} is a URL: name a folder for the report with --folder")

    from specdist.data.store.mirror import mirrored
    from specdist.results.report import write_report

    report = write_report(
        [mirrored(output) for output in given.outputs], folder=given.folder, tune=given.tune
    )
    print(f"report: {report.page}")
    document = {
        "page": str(report.page),
        "num_bytes": report.num_bytes,
        "pictures": [str(path) for path in report.pictures],
    }
    print(json.dumps(document))
    return 0
