"""The functions of jobs/rollouts."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

from specdist.rollout import Answer
from tests.ranks import REPOSITORY


def called(example: str, content: str, **row: Any) -> Answer:
    spec = spec_from_file_location(example, REPOSITORY / f"jobs/rollouts/{example}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.check(row, [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}])


def test_the_calculator_computes_and_nothing_else() -> None:
    """No name, no call, no power; what is wrong is the model's to read."""
    (message,) = called("calculator", "<<2*(3+4)>> and <<-1/4>> <<1/0>> <<exit()>> <<9**9>>").messages
    results = message["content"].splitlines()
    assert results[:2] == ["2*(3+4) = 14", "-1/4 = -0.25"] and "ZeroDivisionError" in results[2]
    assert all("error: " in result for result in results[2:]) and len(results) == 5
    assert called("calculator", "It is 14.").kind == "accept"


def test_json_is_repaired_by_what_the_parser_says() -> None:
    """An endless repair of what is right, or an acceptance of what is not."""
    (message,) = called("repair_json", '{"a": }').messages
    assert "Expecting value: line 1 column 7" in message["content"]
    assert called("repair_json", '```json\n{"a": 1}\n```').kind == "accept"


def test_the_nearest_number_scores_highest() -> None:
    """Of several completions the best one is kept: the order of scores counts."""
    scores = [called("scored", text, answer="1200").score for text in ("= 1,200", "1199", "5", "1" * 400)]
    assert scores == sorted(scores, reverse=True) and scores[0] == 1.0 and scores[-1] == 0.0
    assert called("scored", "none", answer="5").kind == "reject"


def test_code_is_rejected_with_the_assertion_that_fails() -> None:
    """It runs in the sandbox, not in the worker."""
    row = {"test_list": ["assert f(1) == 1", "assert f(2) == 4"]}
    assert called("tested_code", "```python\ndef f(x):\n    return x * x\n```", **row).kind == "accept"
    rejected = called("tested_code", "def f(x):\n    return x", **row)
    assert (rejected.kind, rejected.reason) == ("reject", "assert f(2) == 4: AssertionError")
