"""What is installed: a job in one process needs fewer packages than one of several ranks."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from specdist.utils.errors import UserError


def version_of(package: str) -> str | None:
    """The installed version; None of a package that is absent, or that is found without being installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_installed(package: str, needed_by: str, instead: str) -> None:
    """Raises UserError where a package is absent. ``needed_by``: an option with its value; ``instead``: what
    works without the package."""
    if find_spec(package) is None:
        raise UserError(
            f"{needed_by} needs the package {package}, which is not installed here: pip install {package} "
            f"(jobs/constraints-cuda.txt has the tested version), or {instead}"
        )
