"""Steps around a run: prompts that a template writes, and a run that reads what another has written."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest

import specdist
from specdist.job.run.opening import check_early
from specdist.utils.errors import UserError
from tests.job.gate import Gate
from tests.job.killing import SLOW, fork_and_kill
from tests.job.launching import logged_rows, parse, read_output, refused, run_here, shard_bytes, shard_files
from tests.job.pair import Pair, write_arrow
from tests.job.ranks import fork_ranks

TEMPLATE = "{{ 12 // n }} of {{ text }}\n{% if n == 2 %}\ntwo\n{% endif %}"


@pytest.mark.ranks
@pytest.mark.parametrize("is_chat", [False, True], ids=["text", "chat"])
def test_tokens_are_those_of_a_column_with_the_rendered_texts(
    is_chat: bool, options: dict[str, Any], pair: Pair, tmp_path: Path
) -> None:
    """Made here without Jinja; also after a kill, and on two ranks. It notices a space that differs."""
    texts = pa.ipc.open_file(pair.prompts).read_all()["prompt"].to_pylist()
    rows = {"text": texts, "n": [row % 4 for row in range(len(texts))]}
    done: list[Any] = [f"{12 // n} of {text}\n" + "two\n" * (n == 2) if n else None
                       for text, n in zip(*rows.values(), strict=True)]  # fmt: skip
    run = options | SLOW | {"prompts": write_arrow(tmp_path / "a.arrow", rows), "prompt_template": TEMPLATE}
    column = "messages_column" if is_chat else "prompt_column"
    if is_chat:
        run |= {"chat": True, "system_prompt": "as {{ n }}"}
        done = [text and [{"role": "system", "content": f"as {n}"}, {"role": "user", "content": text}]
                for text, n in zip(done, rows["n"], strict=True)]  # fmt: skip
    ready = options | SLOW | {"prompts": write_arrow(tmp_path / "b.arrow", {"done": done}), column: "done"}
    assert run_here(**ready, output=tmp_path / "ready").code == 0
    output, gate = tmp_path / "run", Gate(tmp_path / "gate")
    code = fork_and_kill(lambda: bool(logged_rows(output, 1)), gate=gate, **run, output=output)
    assert code == -signal.SIGKILL and len(shard_files(output)) < 4
    assert run_here(**run, output=output).code == 0
    assert fork_ranks(2, **run, output=tmp_path / "ranks").code == 0
    names = ["row_id", "prompt", "completion", "completion_ids", "finish_reason", "num_prompt_tokens"]
    expected = read_output(tmp_path / "ready").select(names)
    for path in (output, tmp_path / "ranks"):
        found = read_output(path)
        assert found.select(names).to_pylist() == expected.to_pylist()
        reason = "--prompt_template, line 1: integer division or modulo by zero"
        assert found["error"].to_pylist() == [None if n else reason for n in rows["n"]]


def test_several_paths_are_one_input(options: dict[str, Any], pair: Pair, tmp_path: Path) -> None:
    """A file, a glob and a folder, after a kill: byte for byte the run over one file of their record batches.
    Alone it notices files in another order, and rows that are numbered from their own file's beginning."""
    table = pa.ipc.open_file(pair.prompts).read_all()
    places = {"z.arrow": (0, 7), "x/1.arrow": (7, 8), "x/2.arrow": (8, 15), "a/9.arrow": (15, 24)}
    pieces = {name: table.slice(first, end - first) for name, (first, end) in places.items()}
    for name, piece in {**pieces, "one.arrow": pa.concat_tables(pieces.values())}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with pa.ipc.new_file(tmp_path / name, table.schema) as writer:
            writer.write_table(piece)
    paths = [str(tmp_path / name) for name in ("z.arrow", "x/*.arrow", "a")]
    run, one, output = options | SLOW | {"prompts": paths}, tmp_path / "one", tmp_path / "run"
    assert run_here(**run | {"prompts": tmp_path / "one.arrow"}, output=one).code == 0
    gate = Gate(tmp_path / "gate")
    code = fork_and_kill(lambda: bool(logged_rows(output, 1)), gate=gate, **run, output=output)
    assert code == -signal.SIGKILL and len(shard_files(output)) < 4
    assert run_here(config=output / "config.yaml").code == 0
    assert shard_bytes(output) == shard_bytes(one)
    refused(run_here(**run | {"prompts": [*paths, output]}, output=output), f"--prompts {output} is in --out")


def test_a_judge_reads_what_a_run_has_answered(options: dict[str, Any], tmp_path: Path) -> None:
    """From answers to the good ones: one command, one filter; every verdict is about the answer beside it."""
    answered, judged = tmp_path / "answered", tmp_path / "judged"
    assert run_here(**options | {"max_seq_len": 20, "max_new_tokens": 6}, output=answered).code == 0
    (tmp_path / "verdict.json").write_text('{"enum": [1, 2, 3, 4]}')
    (tmp_path / "judge.jinja").write_text("Rate {{ input_completion }} for {{ input_prompt }}:\n")
    judge = options | {
        "prompts": answered, "prompt_template": tmp_path / "judge.jinja", "chat": True, "output": judged,
        "json_schema": tmp_path / "verdict.json", "temperature": 1.0, "max_new_tokens": 24,
    }  # fmt: skip
    assert run_here(**judge).code == 0
    answers, run = read_output(answered).to_pylist(), specdist.load_run(judged)
    for row in run.dataset:
        answer = answers[row["input_row_id"]]
        assert row["prompt"] == f"[user] Rate {answer['completion']} for {answer['prompt']}:\n[assistant] "
        assert row["input_completion_ids"] == answer["completion_ids"]
    scores = Counter(run.dataset["completion"])
    good = run.dataset.filter(lambda row: json.loads(row["completion"]) > 2)
    assert len(good) == scores["3"] + scores["4"] and scores.total() == 20 and "" not in scores
    judge["prompt_template"] = (tmp_path / "judge.jinja").read_text()
    assert "nothing to do" in run_here(**judge).stderr
    refused(run_here(**judge | {"prompt_template": "{{ input_prompt }}"}), "prompt_template.sha256")
    refused(run_here(**judge | {"prompts": judged}), f"--prompts {judged} is in --output {judged}")


@pytest.mark.usefixtures("no_models")
def test_what_is_read_is_refused_before_anything_is_loaded(
    options: dict[str, Any], finished: Path, tmp_path: Path
) -> None:
    """An option without effect, and a run that is not complete, with what is missing."""
    new, template = options | {"output": tmp_path / "new"}, {"prompt_template": "{{ reference }}"}
    shard_files(finished)[1].unlink()
    faults: list[tuple[dict[str, Any], str]] = [
        ({"unfinished": True}, f"--unfinished has no effect: --prompts {options['prompts']} is not a run's"),
        (template | {"prompts": finished}, "1 of 3 shards are missing (1)"),
        ({"prompts": finished, "unfinished": True}, "--prompt_column prompt is not a column of"),
    ]  # fmt: skip
    for changes, told in faults:
        refused(run_here(**new | changes), told)
    # Before torch is imported: see tests/test_architecture.py.
    with pytest.raises(UserError, match="reads nothing, but the columns of"):
        check_early(parse(**new | {"prompt_template": "{{ nothing }}"}))
