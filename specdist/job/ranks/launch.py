"""``accelerate launch`` that ends with the exit code of its ranks: ``python -m specdist.job.ranks.launch
...``.

accelerate itself ends with 1, whatever they end with. A scheduler must tell a request to stop, after which
the same command goes on, from a wrong option, after which it will not.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from specdist.job.ranks.signals import EXIT_STOPPED
from specdist.utils.errors import USAGE_ERROR, UserError
from specdist.utils.packages import named_packages


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes the arguments of ``accelerate launch``.

    Returns the exit code of the rank that ended first with another one than 0, 128 and the signal's number
    where one was killed, and ``EXIT_STOPPED`` if the launcher itself was asked to stop.
    """
    try:
        with named_packages("a launch of several ranks"):
            from accelerate.commands.launch import launch_command, launch_command_parser
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return USAGE_ERROR
    options = launch_command_parser().parse_args(arguments)
    try:
        launch_command(options)
    except ChildFailedError as error:
        return _as_shells_do(error.get_first_failure()[1].exitcode)
    except subprocess.CalledProcessError as error:
        return _as_shells_do(error.returncode)
    except SignalException:
        return EXIT_STOPPED
    return 0


def _as_shells_do(code: int) -> int:
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
