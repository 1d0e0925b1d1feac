"""The one exception whose message is written for the person who started the job."""

from __future__ import annotations

import sys
from typing import NoReturn


class UserError(ValueError):
    """Bad input: the message names the option, the value, the rule and the remedy; no traceback is shown."""


def exit_with(error: Exception) -> NoReturn:
    """End a job as every job ends for a mistake of its user: the message on stderr, and exit code 2."""
    sys.stderr.write(f"error: {error}\n")
    sys.exit(2)
