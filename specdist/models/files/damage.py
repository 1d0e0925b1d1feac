"""Turns libraries' errors on damaged model files into one message each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from specdist.utils.errors import UserError


@contextlib.contextmanager
def reading(what: str, remedy: str = "fetch it again") -> Iterator[None]:
    """A context for one call of a library on a user's files: its error becomes a :class:`UserError`.

    transformers, tokenizers and torch check few values before they use them. So a wrong value may raise a
    TypeError, a KeyError, a ZeroDivisionError or, from Rust, a panic, which is not an Exception.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what} cannot be used ({_reason(error)}): {remedy}") from error


def _reason(error: BaseException) -> str:
    """The error's message, and its type unless the message says enough: a KeyError's message is only the
    key."""
    text = " ".join(str(error).split())
    shown = text if isinstance(error, (ValueError, OSError)) and text else f"{type(error).__name__}: {text}"
    return shown if len(shown) <= 500 else f"{shown[:497]}..."
