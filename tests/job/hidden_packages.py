"""An environment in which packages are absent, for a Python started with it: neither imports nor
``importlib.metadata`` find them, and the project itself is not installed."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
# Python imports it before anything else.
SITE = """
import functools, importlib.machinery, importlib.metadata, sys

HIDDEN = {hidden!r}
find_spec = importlib.machinery.PathFinder.find_spec
distribution = importlib.metadata.Distribution.from_name


def visible_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in HIDDEN else find_spec(name, path, target)


def visible_distribution(name):
    if name.lower().replace("-", "_") in HIDDEN | {{"specdist"}}:
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)


# No function: pytest keeps it as an attribute of a class, where a function would become a method.
importlib.machinery.PathFinder.find_spec = functools.partial(visible_spec)
importlib.metadata.Distribution.from_name = staticmethod(visible_distribution)
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
sys.path[:] = [entry for entry in sys.path if entry not in ("", {repository!r})]
"""


def all_but(packages: Sequence[str]) -> set[str]:
    """The names by which all is imported that neither these packages are nor what they need."""
    needed: set[str] = set()
    waiting = [Requirement(package) for package in packages]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in needed or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        needed.add(name)
        try:
            waiting += map(Requirement, requires(name) or [])
        except PackageNotFoundError:
            continue
    return {
        module
        for module, owners in packages_distributions().items()
        if module != "specdist" and not needed & set(map(canonicalize_name, owners))
    }


def environment_without(packages: Collection[str], folder: Path) -> dict[str, str]:
    """``folder``: for the file that hides them. Packages have the names by which they are imported."""
    text = SITE.format(hidden=set(packages), repository=str(REPOSITORY))
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(folder)}
