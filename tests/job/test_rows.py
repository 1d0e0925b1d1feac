"""The contents of single rows: unusable text, chats, and the ways in which a completion ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import load_dataset

from tests.job.launching import Ended, read_output, run_here, shard_stats
from tests.job.pair import some_texts, write_arrow

INVALID_UTF8 = b"caf\xe9 au lait"


@pytest.fixture
def bad_prompts(tmp_path: Path) -> Path:
    """Good rows, with a bad one between each two of them."""
    good = [text.encode() for text in some_texts(5)]
    values = [good[0], None, good[1], b"", good[2], b"the " * 300, good[3], INVALID_UTF8, good[4]]
    text = pa.array(values, pa.binary()).view(pa.string())
    return write_arrow(tmp_path / "bad.arrow", {"prompt": text, "reference": list("abcdefghi")})


def test_bad_rows_become_error_rows_and_the_others_are_finished(
    options: dict[str, Any], bad_prompts: Path, tmp_path: Path
) -> None:
    """One bad row in a million must not cost the job, nor be lost silently."""
    output, num_samples = tmp_path / "run", 2
    changes = {"prompts": bad_prompts, "rows_per_shard": 4, "num_samples": num_samples}
    ended = run_here(**(options | changes), output=output)
    rows = read_output(output).to_pylist()
    assert [row["row_id"] for row in rows] == [row for row in range(9) for _ in range(num_samples)]
    assert [row["reference"] for row in rows[::num_samples]] == list("abcdefghi")
    reasons = {row["row_id"]: row["error"] for row in rows if row["finish_reason"] == "error"}
    assert sorted(reasons) == [1, 3, 5, 7]
    assert "null" in reasons[1]
    assert "empty" in reasons[3]
    assert "600 tokens" in reasons[5]
    assert "at most 127" in reasons[5]
    assert "UTF-8" in reasons[7]
    for row in rows:
        is_bad = row["row_id"] % 2 == 1
        assert is_bad == (row["error"] is not None) == (row["completion_ids"] == [])
        assert not is_bad or (row["completion"], row["num_completion_tokens"]) == ("", 0)
    assert rows[7 * num_samples]["prompt"] == "caf\ufffd au lait"
    totals = ended.totals
    assert (totals["num_rows"], totals["num_error_rows"]) == (9, 4)
    assert "4 of 9 rows have an error instead of a completion" in ended.stderr
    assert totals["num_completions"] == 5 * num_samples
    assert sum(shard["num_error_rows"] for shard in shard_stats(output)) == 4
    # A bad string in the output would make `datasets` refuse the whole file.
    dataset = load_dataset(
        "arrow", data_files=str(output / "shards" / "*.arrow"), split="train", cache_dir=str(tmp_path)
    )
    assert dataset.num_rows == 9 * num_samples


def test_finish_reasons_tell_the_end_token_from_the_length(greedy: tuple[Path, Ended]) -> None:
    """The end token is counted and kept, as the last id alone, and is not part of the text."""
    rows, ended = read_output(greedy[0]).to_pylist(), greedy[1]
    num_cut = [row["finish_reason"] for row in rows].count("length")
    assert ended.totals["num_cut_completions"] == num_cut > len(rows) / 10
    assert f"{num_cut} of {len(rows)} completions" in ended.stderr
    assert "were cut by --max_new_tokens 32 or --max_seq_len" in ended.stderr
    for row in rows:
        ids = row["completion_ids"]
        assert 0 not in ids[:-1]
        assert row["finish_reason"] == ("stop" if ids[-1] == 0 else "length")
        assert len(ids) == 32 or row["finish_reason"] == "stop"
        assert "<|end|>" not in row["completion"]
