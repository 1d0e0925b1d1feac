"""Ranges of options and what does not go together, as the fields and classes declare it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest

from specdist.cli import COMMANDS, named
from specdist.config.arguments import option
from specdist.config.generate import GenerateConfig
from specdist.config.speculation import ASYNCHRONOUS, NGRAM
from specdist.utils.errors import UserError
from specdist.utils.rules import Refusals, check_options, within
from tests.config.options import config


@dataclass(kw_only=True)
class Options:
    """As a job has them."""

    rows: int | None = option(None, help="", at_least=0)
    shares: list[float] | None = option(None, help="", above=0, at_most=1, note="1 = all")
    mode: str = option("plain", help="")
    flag: bool = option(False, help="")

    _refusals: ClassVar[Refusals] = (
        ("rows flag", lambda o: o.mode == "bare", "has no effect with --mode {o.mode}: leave it out"),
    )


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "text"),
    [
        ({"at_least": 1}, [1, 2.5], [0, 0.99], "must be at least 1"),
        ({"at_least": 0}, [0], [-1], "must not be negative"),
        ({"above": 0}, [1e-9], [0], "must be positive"),
        ({"above": 2, "note": "or so"}, [3], [2], "must be above 2; or so"),
        ({"at_least": 0, "at_most": 1}, [0, 1], [-0.1, 1.1], "must be in [0, 1]"),
        ({"at_least": 0, "below": 1}, [0], [1], "must be in [0, 1)"),
        ({"above": 0, "at_most": 1}, [1], [0], "must be in (0, 1]"),
        ({"above": 0, "below": 1}, [0.5], [0, 1], "must be between 0 and 1"),
        ({"at_least": 1, "text": "must be enough"}, [1], [0], "must be enough"),
    ],
)
def test_a_range_has_its_ends_and_says_so(
    bounds: dict[str, Any], inside: list[float], outside: list[float], text: str
) -> None:
    rule = within(**bounds)
    assert rule.text == text and all(map(rule.holds, inside))
    assert not any(map(rule.holds, [*outside, math.nan, -math.inf]))
    assert rule.holds(math.inf) == (not {"at_most", "below"} & set(bounds))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rows": -1}, "--rows -1 must not be negative"),
        ({"shares": [0.5, 2]}, "--shares 2 must be in (0, 1]; 1 = all"),
        ({"rows": 3, "mode": "bare"}, "--rows 3 has no effect with --mode bare: leave it out"),
        ({"rows": 0, "mode": "bare"}, "--rows 0 has no effect with --mode bare: leave it out"),
        ({"flag": True, "mode": "bare"}, "--flag has no effect with --mode bare: leave it out"),
        ({"mode": "bare"}, None),
        ({"rows": 0, "shares": [1, 0.5], "flag": True}, None),
    ],
)
def test_what_is_declared_is_checked(given: dict[str, Any], message: str | None) -> None:
    """Of a list every item; of options that exclude each other those that are given, 0 among the values."""
    if message is None:
        check_options(Options(**given))
        return
    with pytest.raises(UserError) as refused:
        check_options(Options(**given))
    assert str(refused.value) == message


class Anything:
    """Has every attribute, and is something to format."""

    def __getattr__(self, name: str) -> Anything:
        return self

    def __getitem__(self, place: int) -> Anything:
        return self


@pytest.mark.parametrize(
    "name", [name for name, command in COMMANDS.items() if isinstance(command.options, str)]
)
def test_refusals_are_of_options_that_there_are(name: str) -> None:
    options = named(str(COMMANDS[name].options))
    names = {item.name for item in fields(options)}
    for refused, _, why in (row for owner in options.__mro__ for row in vars(owner).get("_refusals", ())):
        assert names.issuperset(refused.split()), refused
        assert why.format(o=Anything())


# One for each row of the tables that the main job has, in any order.
REFUSED: list[dict[str, Any]] = [
    {"policy": "svip", "draft": None},
    {"policy": "specdecpp"},
    {"policy": "fixed", "head": "h"},
    {"policy": "fixed", "verify": "all"},
    {"prompt_template": "{{ a }}", "prompt_column": "text"},
    {"chat": True},
    {"prompt_template": "{{ a }}", "system_prompt": "sing"},
    {"prompt_template": "{{ a }}", "continue_final_message": True},
    {"turns_column": "turns", "prompt_column": "text"},
    {"turns_column": "turns", "messages_column": "chat"},
    {"turns_column": "turns", "trace": True},
    {"turns_column": "turns", "continue_final_message": True},
    {"messages_column": "chat", "prompt_column": "text"},
    {"cache_dtype": "float8", "model_impl": "specdist"},
    {"draft": NGRAM, "policy": "svip"},
    {"draft": NGRAM, "draft_quantization": "int8"},
    {"draft": NGRAM, "overlap": ASYNCHRONOUS},
    {"policy": "sprinter", "head": "h", "logprobs": 0},
    {"end_of_thinking": "."},
    {"regex": "a", "grammar": "file"},
    {"regex": "a", "stop": ["."]},
    {"constraint_column": "rules", "stop": ["."]},
    {"expert_parallel": "always"},
    {"preview": 3, "overwrite": True},
    {"max_turns": 2},
    {"rollout": "a:b", "turns_column": "turns"},
    {"rollout": "a:b", "logprobs": 0},
]


def test_every_refusal_of_the_main_job_is_made() -> None:
    missing = [row for owner in GenerateConfig.__mro__ for row in vars(owner).get("_refusals", ())]
    for given in REFUSED:
        with pytest.raises(UserError) as refused:
            config(**{"draft": "small", **given})
        message = str(refused.value)
        (row,) = [row for row in missing if matches(row, message)]
        missing.remove(row)
    assert not missing


def matches(row: tuple[str, Any, str], message: str) -> bool:
    """Whether the row's text is the message's, whatever options have told in between."""
    names, _, why = row
    told = ".*".join(map(re.escape, re.split(r"\{o\.[^}]*\}", why)))
    return any(re.fullmatch(f"--{name} ?.*{told}", message) for name in names.split())
