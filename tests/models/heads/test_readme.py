"""The README's storage per million examples follows from the size of an example."""

from __future__ import annotations

import re

import pytest

from specdist.models.heads.examples import bytes_per_example
from tests.readme import documentation


def test_the_table_of_storage_is_right() -> None:
    text = documentation()
    table = text.split("GB per million examples, float16 |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \|$", table, re.MULTILINE)
    assert len(rows) == 3
    for hidden_size, gigabytes in rows:
        stored = bytes_per_example(int(hidden_size), "float16") / 1000
        assert float(gigabytes) == pytest.approx(stored, abs=0.005)
