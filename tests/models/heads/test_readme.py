"""The README's storage of a million examples follows from the size of an example."""

from __future__ import annotations

import re

import pytest

from specdist.models.heads.examples import bytes_per_example
from tests.readme import documentation


def test_the_storage_of_examples_is_right() -> None:
    text = " ".join(documentation().split())
    found = re.search(r"million of them take ([\d.]+) GB for a draft with a hidden size of ([\d,]+);", text)
    assert found is not None
    stored = bytes_per_example(int(found[2].replace(",", "")), "float16") / 1000
    assert float(found[1]) == pytest.approx(stored, abs=0.005)
