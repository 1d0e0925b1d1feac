"""Tests that take newer versions than the oldest that the project supports, see ``tests/versions.sh``."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version


def needs(package: str, least: str) -> pytest.MarkDecorator:
    is_older = Version(version(package)) < Version(least)
    return pytest.mark.skipif(is_older, reason=f"needs {package} {least}")
