"""Write a run's report: a page that opens in any browser, from disk, and its pictures as PNG files.

    python jobs/report.py runs/mine
    python jobs/report.py runs/mine --tune runs/tune            with what jobs/tune.py has replayed
    python jobs/report.py runs/one runs/two --folder runs/both  several runs side by side

The last line on stdout is a JSON document.
"""

import argparse
import json

from specdist.config.arguments import local_path
from specdist.reporting import write_report
from specdist.utils.errors import UserError, exit_with


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("outputs", type=local_path, nargs="+", metavar="OUTPUT", help="folder of a run")
    parser.add_argument(
        "--folder", type=local_path, help="where to (default: report/ in the folder of the run)"
    )
    parser.add_argument("--tune", type=local_path, help="what jobs/tune.py has left for this pair")
    arguments = parser.parse_args()
    try:
        report = write_report(arguments.outputs, folder=arguments.folder, tune=arguments.tune)
    except UserError as error:
        exit_with(error)
    print(f"report: {report.page}")
    document = {
        "page": str(report.page),
        "num_bytes": report.num_bytes,
        "pictures": [str(path) for path in report.pictures],
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
