"""What is installed: a job in one process needs fewer packages than one of several ranks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from specdist.utils.errors import UserError

# The argument of models that have states, and no keys and values.
STATES_ARGUMENT = "cache_params"


def version_of(package: str) -> str | None:
    """The installed version; None of a package that is absent, or that is found without being installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cache_argument(forward: Callable[..., object]) -> str:
    """The argument of a transformers model or layer for keys and values, or states: renamed in 5.24."""
    taken = inspect.signature(forward).parameters
    return next((name for name in ("cache", STATES_ARGUMENT) if name in taken), "past_key_values")


def check_installed(package: str, needed_by: str, instead: str) -> None:
    """Raises UserError where a package is absent. ``needed_by``: an option with its value; ``instead``: what
    works without the package."""
    if find_spec(package) is None:
        raise UserError(f"{_absent(package, needed_by)}, or {instead}")


@contextlib.contextmanager
def named_packages(needed_by: str) -> Iterator[None]:
    """Makes the absence of a package that is imported within a UserError; ``needed_by``: what imports it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package == "specdist" or find_spec(package) is not None:
            raise
        raise UserError(_absent(package, needed_by)) from error


def _absent(package: str, needed_by: str) -> str:
    return (
        f"{needed_by} needs the package {package}, which is not installed here: pip install {package} "
        "(jobs/constraints-cuda.txt has the tested version)"
    )
