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
from specdist.config.arguments import CommandParser, local_path


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("outputs", type=local_path, nargs="+", metavar="OUTPUT", help="folder of a run")
    parser.add_argument(
        "--folder", type=local_path, help="output folder (default: report/ in the folder of the run)"
    )
    parser.add_argument("--tune", type=local_path, help="output folder of specdist tune for this pair")
    given = parser.values(arguments)

    from specdist.reporting import write_report

    report = write_report(given.outputs, folder=given.folder, tune=given.tune)
    print(f"report: {report.page}")
    document = {
        "page": str(report.page),
        "num_bytes": report.num_bytes,
        "pictures": [str(path) for path in report.pictures],
    }
    print(json.dumps(document))
    return 0
