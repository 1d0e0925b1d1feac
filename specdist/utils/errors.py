"""The one exception whose message is written for the person who started the job; any other as one line."""

import errno
import textwrap

MAX_TEXT_CHARACTERS = 160
# The exit codes of a command that shows one, and of a run whose disk is full.
USAGE_ERROR, DISK_FULL = 2, errno.ENOSPC
# A launcher ends all ranks when one has ended: this gives rank 0 time to print the error.
RANK_0_FIRST_S = 5.0


class UserError(ValueError):
    """Bad input: the message names the option, the value, the rule and the remedy; no traceback is shown."""

    exit_code = USAGE_ERROR


def first_line(error: BaseException) -> str:
    """An error's type and the beginning of its text, for messages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def short_text(error: BaseException) -> str:
    """The beginning of an error's text without its type, for a line of the log."""
    return textwrap.shorten((str(error) or repr(error)).splitlines()[0], MAX_TEXT_CHARACTERS)
