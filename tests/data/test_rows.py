from __future__ import annotations

import random

import pyarrow as pa
import pytest

from specdist.data.columns import OUTPUT_COLUMNS
from specdist.data.stats.rows import RowResult, shard_table
from tests.data.samples import STRANGE_TEXT, random_text, row_result


def test_a_result_survives_one_line_of_json():
    rng = random.Random(0)
    for text in STRANGE_TEXT + [random_text(rng) for _ in range(500)]:
        result = row_result(prompt=None, completion=text, error=text[::-1])
        line = result.to_json()
        assert b"\n" not in line
        assert RowResult.from_json(line) == result


def test_an_input_column_named_prompt_becomes_the_output_column():
    inputs = pa.table({"id": [1], "prompt": pa.array(["as given"], pa.large_string())})
    table = shard_table(inputs, [row_result(0, prompt="not used")], first_row=0, num_samples=1)
    assert table.column_names == [*OUTPUT_COLUMNS, "id"]
    assert table["prompt"].to_pylist() == ["as given"]
    assert table.schema.field("prompt").type == pa.large_string()


def test_samples_follow_their_row_in_order_whatever_order_they_finished_in():
    inputs = pa.table({"ref": [["a"], None, ["c", "d"]]})
    results = [row_result(row, sample) for row in (5, 6, 7) for sample in range(2)]
    expected = shard_table(inputs, results, first_row=5, num_samples=2)
    assert expected["row_id"].to_pylist() == [5, 5, 6, 6, 7, 7]
    assert expected["sample_index"].to_pylist() == [0, 1] * 3
    assert expected["ref"].to_pylist() == [["a"], ["a"], None, None, ["c", "d"], ["c", "d"]]
    rng = random.Random(0)
    for _ in range(20):
        rng.shuffle(results)
        assert shard_table(inputs, results, first_row=5, num_samples=2) == expected


@pytest.mark.parametrize("keys", [[(0, 0)], [(0, 0), (1, 0), (1, 0)], [(0, 0), (2, 0)], [(0, 0), (1, 1)]])
def test_there_must_be_exactly_one_result_for_each_sample(keys):
    inputs = pa.table({"id": [1, 2]})
    with pytest.raises(ValueError, match="2 rows from 0 on need 2 results"):
        shard_table(inputs, [row_result(*key) for key in keys], first_row=0, num_samples=1)


def test_a_completion_without_utf8_has_replacement_characters():
    results = [row_result(0, completion="half \ud83d, \ud83d\ude00")]
    table = shard_table(pa.table({"id": [1]}), results, first_row=0, num_samples=1)
    table.validate(full=True)
    assert table["completion"][0].as_py() == "half \ufffd, 😀"
