"""Parquet files, of which a few row groups are in memory at a time."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet
import pytest

from specdist.data.formats.prompts import open_prompts


def open_(path, limit=None, **options):
    return open_prompts(str(path), prompt_column="prompt", messages_column=None, limit=limit, **options)


@pytest.fixture
def parquet(tmp_path):
    """Two files of ten rows in groups of three."""
    for number in range(2):
        table = pa.table({"prompt": [f"p{number}{row}" for row in range(10)], "id": list(range(10))})
        pa.parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=3)
    return tmp_path


def test_of_parquet_files_few_row_groups_are_in_memory(parquet, monkeypatch):
    read = []
    original = pa.parquet.ParquetFile.read_row_group
    monkeypatch.setattr(
        pa.parquet.ParquetFile,
        "read_row_group",
        lambda self, number, **options: read.append(number) or original(self, number, **options),
    )
    prompts = open_(parquet)
    assert read == [0, 1, 2, 3] * 2, "each is checked once"
    read.clear()
    assert prompts.table(8, 12).column("prompt").to_pylist() == ["p08", "p09", "p10", "p11"]
    assert read == [2, 3, 0]
    read.clear()
    assert [prompts.prompt(row) for row in range(20)] == [f"p{row // 10}{row % 10}" for row in range(20)]
    assert len(read) == 8
    assert len(prompts.rows._decoded) <= 5
    assert prompts.table(20, 20).num_rows == 0
    limited = open_(parquet, limit=11)
    assert limited.num_rows == 11 and limited.table(9, 11).column("id").to_pylist() == [9, 0]
