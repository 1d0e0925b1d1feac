"""Generation from Python by replicas in processes of their own: the job's rows, each once, and no process
that stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import specdist
from specdist.utils.errors import UserError
from tests.job.launching import read_output, run_here
from tests.job.pair import Pair

TEXTS = [f"the quick brown fox {number}" for number in range(10)]
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8, "rows_per_shard": 3}


def call(pair: Pair, dataset: Any = TEXTS, **options: Any) -> specdist.Generation:
    models = {"target": pair.target, "draft": pair.draft, "device": "cpu", "use_tqdm": False}
    return specdist.generate(dataset, **models, **options)


def process_ids(rows: specdist.Generation) -> list[int]:
    return [replica._process.pid for replica in rows._replicas if replica._process is not None]


def is_there(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_rows_are_those_of_the_job_each_once(pair: Pair, tmp_path: Path) -> None:
    """By two replicas, of which one is killed; the columns of unfinished shards are those of finished ones.
    Fault: a row twice or never, or the other replica's end taken for that of the run."""
    table = pa.table({"prompt": TEXTS, "answer": list(range(10))})
    pa_file = tmp_path / "prompts.arrow"
    with pa.ipc.new_file(pa_file, table.schema) as writer:
        writer.write_table(table)
    models = {"target": pair.target, "draft": pair.draft, "device": "cpu"}
    assert run_here(prompts=pa_file, output=tmp_path / "job", **models, **GREEDY).code == 0
    expected = read_output(tmp_path / "job").select(["row_id", "answer", "completion_ids"]).to_pylist()
    rows, found = call(pair, table, num_replicas=2, output=tmp_path / "rows", **GREEDY), []
    for row in rows:
        if not found:
            os.kill(process_ids(rows)[0], signal.SIGKILL)
        found.append(row)
    shown = [{name: row[name] for name in expected[0]} for row in found]
    assert sorted(shown, key=lambda row: row["row_id"]) == expected
    names = rows.dataset().column_names
    assert all(list(row) == names for row in found)
    assert rows.dataset()["completion_ids"][:] == [row["completion_ids"] for row in expected]


def test_a_loop_that_is_left_leaves_no_process_and_another_call_goes_on(pair: Pair, tmp_path: Path) -> None:
    options = {**GREEDY, "max_num_seqs": 1, "max_new_tokens": 40, "output": tmp_path / "rows"}
    rows = call(pair, **options)
    first, process_id = {}, -1
    for row in rows:
        first, (process_id,) = row, process_ids(rows)
        assert is_there(process_id)
        break
    assert not is_there(process_id) and not process_ids(rows)
    again = list(call(pair, **options))
    assert len(again) == 10 and first in again
    # Not even its first row is shown to a call that the job refuses for another's folder.
    with pytest.raises(UserError, match="holds a run with different settings"):
        next(iter(call(pair, **options | {"seed": 1})))
    with pytest.raises(UserError, match="holds a run with different settings"):
        next(iter(call(pair, ["other", "rows"], **options)))


def test_what_a_replica_refuses_is_raised_here(pair: Pair) -> None:
    """Its message, as that of an error of the caller's; or what it printed, if it was killed."""
    with pytest.raises(UserError, match="--max_seq_len 1000000 is more than the 128 positions"):
        list(call(pair, max_seq_len=10**6))
    rows = call(pair)
    assert not rows._is_over()
    os.kill(process_ids(rows)[0], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="a replica ended with exit code -9"):
        list(rows)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ("a text", {}, "dataset is str, but must be a datasets.Dataset, an Arrow or pandas table, or a list"),
    ([], {}, "dataset is list, but must be"),
    (TEXTS, {"temprature": 0}, "temprature is not an option: did you mean temperature?"),
    (TEXTS, {"temperature": "hot"}, "temperature is 'hot', of type str, but must be a number"),
    (TEXTS, {"output": "s3://bucket/run"}, "output is s3://bucket/run, but must be a folder"),
    (TEXTS, {"gpus": 2}, "gpus is 2, but torch sees 0 here"),
    (TEXTS, {"tp_size": 2}, "2 ranks need as many GPUs, and torch sees none here"),
    (TEXTS, {"policy": "fixed", "num_draft_tokens": 0}, "--num_draft_tokens 0"),
]


@pytest.mark.parametrize(("dataset", "options", "message"), WRONG)
def test_wrong_calls_start_nothing(pair: Pair, dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        call(pair, dataset, **options)


def test_conversations_and_tables_of_pandas_are_read(pair: Pair) -> None:
    """As columns that the job would be told of."""
    import datasets
    import pandas

    hub = datasets.Dataset.from_dict({"prompt": TEXTS[::-1]}).select(range(9, -1, -1))
    assert call(pair, hub)._inputs["prompt"].to_pylist() == TEXTS
    talk = [{"role": "user", "content": "the quick"}]
    said = call(pair, [talk, talk])
    assert said._inputs.column_names == ["messages"]
    assert call(pair, pandas.DataFrame({"prompt": TEXTS}))._inputs["prompt"].to_pylist() == TEXTS
