"""A function of the user between turns: what it answers decides what is generated next, also after kills."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specdist.job.totals.status import StatusReader
from tests.job.killing import fork_and_kill
from tests.job.launching import part_logs, read_output, refused, run_here, shard_bytes, shard_stats
from tests.job.pair import write_arrow
from tests.job.ranks import fork_ranks
from tests.ranks import REPOSITORY

NUM_ROWS, NUM_KILLS = 12, 2
NEXT = "and where do they begin"
# Every call is noted with its place: by row, sample, number of messages, and the last completion.
FUNCTION = """
import time
from pathlib import Path
from specdist import rollout

def called(row, messages):
    with (Path(__file__).parent / "calls").open("a") as file:
        file.write(f"{row['row_id']} {row['sample_index']} {len(messages)} {messages[-1]['content']!r}\\n")

def accept(row, messages):
    called(row, messages)
    time.sleep(1.2 * (row["row_id"] == 11))  # when nothing else is left
    return rollout.accept()

def talk(row, messages):
    if len(messages) == 1 + 1:
        return rollout.messages([{"role": "user", "content": row["next"]}])
    return rollout.accept(score=len(messages), last=messages[-1]["content"])

def choose(row, messages):  # no text of another length is enough
    called(row, messages)
    time.sleep(0.02)
    length = len(messages[-1]["content"]) + row["row_id"]
    if length % 4 == 0:
        return rollout.accept(length)
    if length % 4 == 1:
        return rollout.messages([{"role": "user", "content": "again"}])
    return rollout.reject(f"{length} characters")

def fail(row, messages):
    kind = row["row_id"]
    if kind == 0:
        return rollout.give_up("no hope")
    if kind == 1:
        raise KeyError("left")
    if kind == 2:
        return "a text"
    if kind == 3:
        return rollout.reject("too long")
    return rollout.messages([{"role": "user", "content": "more"}])
"""
NAMES = ["row_id", "sample_index", "prompt", "completion", "completion_ids", "finish_reason", "error",
         "num_prompt_tokens", "num_completion_tokens"]  # fmt: skip


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "judge.py").write_text(FUNCTION)
    return tmp_path / "judge.py"


@pytest.fixture
def run(options: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Chats of one message, sampled."""
    texts = [f"of the river {row} and the sea" for row in range(NUM_ROWS)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    turns = [[text, NEXT] for text in texts]
    rows = write_arrow(tmp_path / "chats.arrow", {"chat": chats, "turns": turns, "next": [NEXT] * NUM_ROWS})
    return options | {
        "prompts": rows, "messages_column": "chat", "max_new_tokens": 8, "rows_per_shard": 6,
        "temperature": 1.0, "max_num_seqs": 4, "rollout_workers": 2,
    }  # fmt: skip


def calls(code: Path) -> Counter[str]:
    return Counter((code.parent / "calls").read_text().splitlines())


@pytest.mark.ranks
def test_a_function_that_accepts_everything_changes_no_token(
    run: dict[str, Any], code: Path, tmp_path: Path
) -> None:
    """On one rank and on two, where others wait for what the function says."""
    plain = run | {"rollout_workers": None, "num_samples": 2}
    assert run_here(**plain, output=tmp_path / "plain").code == 0
    judged = run | {"rollout": f"{code}:accept", "num_samples": 2}
    ended = run_here(**judged, output=tmp_path / "run")
    assert ended.totals["num_attempts"] == ended.totals["num_completions"] == 2 * NUM_ROWS
    assert "24 of 24 attempts were accepted (100%); 0 tokens were rejected, 24 calls of" in ended.stderr
    assert fork_ranks(2, **judged, output=tmp_path / "ranks").code == 0
    expected = read_output(tmp_path / "plain").select(NAMES)
    for name in ("run", "ranks"):
        found = read_output(tmp_path / name)
        assert found.select(NAMES).equals(expected)
        assert [ids for [ids] in found["turn_completion_ids"].to_pylist()] == found[
            "completion_ids"
        ].to_pylist()
    assert set(calls(code).values()) == {2} and len(calls(code)) == 2 * NUM_ROWS
    told = "\n".join(StatusReader(tmp_path / "run").read().lines())
    assert "rollout   24 of 24 attempts were accepted" in told and "0 rows wait for one" in told


def test_turns_by_a_function_are_those_of_a_column(run: dict[str, Any], code: Path, tmp_path: Path) -> None:
    """The same texts, so the same tokens of every turn; and what the function says is in the columns."""
    turns = run | {"messages_column": None, "turns_column": "turns", "rollout_workers": None}
    assert run_here(**turns, output=tmp_path / "turns").code == 0
    assert run_here(**run, rollout=f"{code}:talk", output=tmp_path / "run").code == 0
    names = [*NAMES, "turn_completions", "turn_completion_ids", "turn_finish_reasons"]
    found = read_output(tmp_path / "run")
    assert found.select(names).equals(read_output(tmp_path / "turns").select(names))
    for row in found.to_pylist():
        messages = json.loads(row["rollout_messages"])
        assert [message["role"] for message in messages] == ["user", "assistant"] * 2
        assert [message["content"] for message in messages[1::2]] == row["turn_completions"]
        assert json.loads(row["rollout_columns"]) == {"last": row["completion"]}
        assert row["rollout_score"] == 4 and row["rollout_attempts"] == 1


def test_a_tool_is_called_until_no_call_is_left(run: dict[str, Any], tmp_path: Path) -> None:
    """By the shipped calculator, of calls that a constraint makes likely; its values are checked here. The
    constraint holds in every turn."""
    calculator = REPOSITORY / "jobs/rollouts/calculator.py"
    run |= {"rollout": f"{calculator}:check", "regex": r"<<[1-9]\*[1-9]>>|done", "max_turns": 4}
    assert run_here(**run, output=tmp_path / "run").code == 0
    num_calls = 0
    for row in read_output(tmp_path / "run").to_pylist():
        messages = json.loads(row["rollout_messages"])
        contents = [message["content"] for message in messages]
        for call, answer in zip(contents[1:-1:2], contents[2::2], strict=True):
            one, other = int(call[2]), int(call[4])
            assert answer == f"{one}*{other} = {one * other}"
            num_calls += 1
        assert (contents[-1] == "done") == (row["error"] is None)
        assert row["completion"] == ("" if row["error"] else "done")
    assert num_calls > NUM_ROWS // 2


def test_every_way_to_fail_is_an_error_of_its_row(run: dict[str, Any], code: Path, tmp_path: Path) -> None:
    """Also the limits of attempts and turns; rejected tokens are counted, and no completion's."""
    run |= {"rollout": f"{code}:fail", "max_attempts": 2, "max_turns": 3, "rows_per_shard": 64, "limit": 5}
    ended = run_here(**run, output=tmp_path / "run")
    rows = read_output(tmp_path / "run").to_pylist()
    limits = "none of --max_attempts 2 was accepted; of the last: "
    assert rows[0]["error"] == "the rollout function gave up: no hope"
    assert (
        "KeyError" in rows[1]["error"] and "judge.py" in rows[1]["error"] and "'a text'" in rows[2]["error"]
    )
    assert rows[3]["error"] == f"{limits}too long"
    assert rows[4]["error"] == f"{limits}it had no end within --max_turns 3"
    assert [row["rollout_attempts"] for row in rows] == [1, 1, 1, 2, 2]
    assert [len(row["turn_completion_ids"]) for row in rows] == [1, 1, 1, 1, 3]
    assert all(row["completion"] == "" and row["rollout_rejected_tokens"] > 0 for row in rows)
    assert ended.totals["num_completion_tokens"] == 0 and ended.totals["num_error_rows"] == 5
    plain = run | {"messages_column": None, "turns_column": None, "prompt_column": "next"}
    assert run_here(**plain, output=tmp_path / "plain").code == 0
    assert "which a plain prompt has no place for" in read_output(tmp_path / "plain")["error"][4].as_py()


def test_attempts_are_drawn_anew(run: dict[str, Any], code: Path, tmp_path: Path) -> None:
    """Each from a random stream of its own: none repeats another's tokens. The calls tell what they were."""
    run |= {"rollout": f"{code}:choose", "max_attempts": 12, "output": tmp_path / "run"}
    assert run_here(**run).code == 0
    rows = read_output(tmp_path / "run").to_pylist()
    firsts = [call.split(" ", 3) for call in calls(code) if call.split()[2] == "2"]
    texts = {row: [text for number, _, _, text in firsts if int(number) == row] for row in range(NUM_ROWS)}
    assert sum(row["rollout_attempts"] for row in rows) == len(firsts) > 2 * NUM_ROWS
    for row in rows:
        assert len(set(texts[row["row_id"]])) == row["rollout_attempts"], "an attempt drew another's tokens"
        if row["error"] is None:
            assert (len(row["completion"]) + row["row_id"]) % 4 == 0


@pytest.mark.parametrize("where", ["function", "between", "anywhere"])
def test_a_run_that_is_killed_goes_on_where_it_was(
    where: str, run: dict[str, Any], code: Path, tmp_path: Path
) -> None:
    """The bytes of an undisturbed run, and no call twice but those under way when the process died."""
    run |= {"rollout": f"{code}:choose", "max_attempts": 12}
    assert run_here(**run, output=tmp_path / "undisturbed").code == 0
    expected = calls(code)
    (code.parent / "calls").unlink()
    output, chance, num_killed, least = tmp_path / "run", random.Random(where), 0, 0

    def notes() -> list[bytes]:
        return [line for shard in range(2) for log in part_logs(output, shard)
                for line in log.read_bytes().splitlines() if b'"note":' in line]  # fmt: skip

    for _ in range(NUM_KILLS):
        least += chance.randint(1, 40 // NUM_KILLS)

        def moment(least: int = least) -> bool:
            found = notes()
            is_answered = bool(found) and b'"answer"' in found[-1]
            return len(found) >= least and (where == "anywhere" or is_answered == (where == "between"))

        num_killed += fork_and_kill(moment, **run, output=output) == -signal.SIGKILL
    assert num_killed, "the run was over before it could be killed"
    assert run_here(**run, output=output).code == 0
    assert shard_bytes(output) == shard_bytes(tmp_path / "undisturbed")
    found = calls(code)
    assert found.keys() == expected.keys() and (found - expected).total() <= 2 * num_killed
    assert sum(shard["num_attempts"] for shard in shard_stats(output)) == sum(
        read_output(output)["rollout_attempts"].to_pylist()
    )


def test_a_function_that_cannot_be_used_is_refused_before_a_model_is_loaded(
    run: dict[str, Any], code: Path, no_models: None, tmp_path: Path
) -> None:
    new = run | {"output": tmp_path / "new"}
    refused(run_here(**new | {"rollout": f"{code}:missing"}), f"--rollout {code}:missing")
    refused(run_here(**new), "--rollout_workers 2 has no effect without --rollout")
    refused(run_here(**new | {"rollout": f"{code}:accept", "logprobs": 0}), "--logprobs 0 describes one")
    refused(run_here(**new | {"accepted": 2}), "--num_samples")
