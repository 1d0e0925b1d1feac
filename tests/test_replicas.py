"""Generation from Python by replicas in processes of their own: the job's rows, each once, and no process
that stays."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml

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
    return Path("/proc", str(process_id)).exists()


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
    with pytest.raises(UserError, match="prompt_column absent"):
        list(call(pair, prompt_column="absent"))
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
    (TEXTS, {"num_replicas": 0}, "num_replicas is 0, but must be a whole number, 1 or more"),
    (TEXTS, {"chat_template_kwargs": {"a": 1}}, "of type dict, but must be a text or None"),
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
    streamed = call(pair, hub.to_iterable_dataset(), dtype=torch.float32, seed=np.int64(3), stop=("a", "b"))
    assert streamed._inputs["prompt"].to_pylist() == TEXTS
    options = yaml.safe_load(streamed._replicas[0].options.read_text())
    assert (options["dtype"], options["seed"], options["stop"]) == ("float32", 3, ["a", "b"])
    assert options["target"] == str(pair.target)


def pretend(monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[str, float]]) -> None:
    """That torch sees these GPUs, by the driver's name and GiB."""
    found = [SimpleNamespace(name=name, total_memory=int(gib * 2**30)) for name, gib in gpus]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)


L4, H100, OTHER = ("NVIDIA L4", 22.5), ("NVIDIA H100 80GB HBM3", 79.6), ("Tesla T9", 16)
SHORT = {"max_seq_len": 1024}
# An 8B's weights take 15.0 GiB, and 16 GiB more the keys and values of its longest sequence here.
PLACED: list[tuple[Any, ...]] = [
    ([L4, L4], {}, [[0, 1]], [2, None], "1 x (target only, tp_size 2"),
    ([H100, H100], {}, [[0], [1]], [1, None], "2 x (target only, tp_size 1"),
    ([OTHER, OTHER], SHORT, [[0, 1]], [2, None], "2 x Tesla T9"),
    ([H100, (H100[0], 15)], SHORT, [[0, 1]], [2, None], "tp_size 2"),
    ([L4, L4], {"draft": "1b", "gpus": [1]} | SHORT, [[1]], [1, "shared"], "1 x (draft on rank 0, tp_size 1"),
    ([L4, L4], {"draft": "1b", "overlap": "asynchronous"} | SHORT, [[0, 1]], [1, "own"], "1 x (draft GPU, "),
    ([H100] * 4, {"num_replicas": 2}, [[0], [1]], [1, None], "tp_size 1"),
    ([L4, L4], {"tp_size": 1}, [[0], [1]], [1, None], ""),
    ([L4, L4], {"target": "/absent"}, [[0], [1]], [None, None], "no plan: --target /absent has no readable"),
]


@pytest.mark.parametrize(("gpus", "options", "places", "told", "logged"), PLACED)
def test_replicas_are_where_the_planner_places_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    gpus: Any, options: Any, places: Any, told: Any, logged: str,
) -> None:  # fmt: skip
    """Unless the caller says where. Faults: what fits is not asked of this machine's memory, the one with the
    least, or of the longest sequence; a choice of the caller's is overruled; the job is not told."""
    pretend(monkeypatch, gpus)
    caplog.set_level(logging.INFO, "specdist")
    rows = specdist.generate(TEXTS * 100, **{"target": "8b", **options})
    assert [list(replica.gpus) for replica in rows._replicas] == places and not process_ids(rows)
    found = yaml.safe_load(rows._replicas[0].options.read_text())
    assert [found.get("tp_size"), found.get("draft_placement")] == told
    assert logged in caplog.text and bool(logged) == bool(caplog.text)


def test_models_that_fit_nowhere_are_refused_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, [L4])
    with pytest.raises(
        UserError, match=r"--target 70b does not fit 1 x NVIDIA L4(.*\n)+- --gpus_per_node 8: "
    ):
        specdist.generate(TEXTS, target="70b")
    with pytest.raises(UserError, match="fits 1 x NVIDIA L4, but not beside draft 7b: leave it out"):
        specdist.generate(TEXTS, target="8b", draft="7b", max_seq_len=1024)
