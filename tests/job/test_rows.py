"""The contents of single rows: unusable text, chats, and the ways in which a completion ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset

from tests.job.launching import Ended, read_output, run_here, shard_stats
from tests.job.pair import some_texts, write_arrow


@pytest.fixture
def bad_prompts(tmp_path: Path) -> Path:
    """Good rows, with a bad one between each two of them."""
    good = some_texts(5)
    values = [good[0], None, good[1], "", good[2], "the " * 300, *good[3:]]
    return write_arrow(tmp_path / "bad.arrow", {"prompt": values, "reference": list("abcdefgh")})


def test_bad_rows_become_error_rows_and_the_others_are_finished(
    options: dict[str, Any], bad_prompts: Path, tmp_path: Path
) -> None:
    """One bad row in a million must not cost the job, nor be lost silently."""
    output, num_samples = tmp_path / "run", 2
    changes = {"prompts": bad_prompts, "rows_per_shard": 4, "num_samples": num_samples}
    ended = run_here(**(options | changes), output=output)
    rows = read_output(output).to_pylist()
    assert [row["row_id"] for row in rows] == [row for row in range(8) for _ in range(num_samples)]
    assert [row["reference"] for row in rows[::num_samples]] == list("abcdefgh")
    reasons = {row["row_id"]: row["error"] for row in rows if row["finish_reason"] == "error"}
    assert sorted(reasons) == [1, 3, 5]
    assert "null" in reasons[1]
    assert "empty" in reasons[3]
    assert "600 tokens" in reasons[5]
    assert "at most 127" in reasons[5]
    for row in rows:
        is_bad = row["row_id"] in reasons
        assert is_bad == (row["error"] is not None) == (row["completion_ids"] == [])
        assert not is_bad or (row["completion"], row["num_completion_tokens"]) == ("", 0)
    totals = ended.totals
    assert (totals["num_rows"], totals["num_error_rows"]) == (8, 3)
    assert "3 of 8 rows have an error instead of a completion" in ended.stderr
    assert totals["num_completions"] == 5 * num_samples
    assert sum(shard["num_error_rows"] for shard in shard_stats(output)) == 3
    dataset = load_dataset(
        "arrow", data_files=str(output / "shards" / "*.arrow"), split="train", cache_dir=str(tmp_path)
    )
    assert dataset.num_rows == 8 * num_samples


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
