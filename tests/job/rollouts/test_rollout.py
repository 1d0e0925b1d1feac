"""What a user's function answers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from specdist import rollout
from specdist.config.calls import plain_values
from specdist.rollout import Answer
from specdist.utils.errors import UserError
from tests.job.rollouts import functions


def test_an_answer_is_the_same_through_json() -> None:
    """Its way into the journal and from a process: NumPy's numbers are scores."""
    answers = [
        rollout.accept(), rollout.accept(np.float32(0.5), tags=["a"], nested={"b": None}),
        rollout.reject("too short"), rollout.give_up("no hope"),
        rollout.messages([{"role": "tool", "content": "12", "tool_call_id": "x"}]),
    ]  # fmt: skip
    assert [Answer.from_json(json.loads(json.dumps(answer.to_json()))) for answer in answers] == answers
    assert (answers[1].kind, answers[1].score, answers[1].columns["tags"]) == ("accept", 0.5, ["a"])


@pytest.mark.parametrize(
    ("name", "argument", "words"),
    [
        ("accept", "high", "score is 'high', but it should be a finite number or None"),
        ("accept", float("inf"), "score is inf"),
        ("reject", " ", "reason is ' ', but it should be a text that is not empty"),
        ("give_up", None, "reason is None"),
        ("messages", [], r"messages is \[\], but it should be a list of one or more dicts"),
        ("messages", ["a"], "message 0 is 'a', but it should be a dict"),
        ("messages", [{"role": "bot", "content": ""}], "the role of message 0 is 'bot', .* one of system, "),
        ("messages", [{"role": "user"}], "the content of message 0 is None, but it should be a text"),
        ("messages", [{"role": "user", "content": "\ud800"}], "messages cannot be written as JSON"),
    ],
)
def test_a_wrong_argument_is_told(name: str, argument: Any, words: str) -> None:
    """Where the user's function calls it, not when the run writes its output."""
    with pytest.raises(ValueError, match=words):
        getattr(rollout, name)(argument)


def test_a_column_that_json_has_not_is_told_by_name() -> None:
    """It would end the run when it is written."""
    for value in (float("nan"), np.zeros(2)):
        with pytest.raises(ValueError, match="value cannot be written as JSON"):
            rollout.accept(good=1, value=value)


def test_a_function_from_python_is_its_place() -> None:
    """What no other process could import is refused before one tries to, and begins the program again."""
    place = f"{functions.__file__}:check"
    assert plain_values({"rollout": functions.check}) == {"rollout": place}
    with pytest.raises(UserError, match=r"rollout is .*<lambda> of .*, which no other process can"):
        plain_values({"rollout": lambda row, messages: rollout.accept()})
