"""The options of one call from Python: under the names of vLLM, too, and with their types checked."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from os import PathLike
from typing import Any, Literal, get_args, get_origin

from specdist.config.constraints import NO_STOP, OF_ALL_ROWS
from specdist.config.generate import GenerateConfig
from specdist.config.groups import CompletionOptions
from specdist.config.names import ALIASES, nearest_option
from specdist.utils.errors import UserError

# Of a run's files, which ``SpeculativeLLM`` neither reads nor writes.
RUN_OPTIONS = (
    "prompts", "output", "preview", "constraint_column", "turns_column", "prompt_template", "rollout",
)  # fmt: skip
WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", type(None): "None"}


@dataclass(init=False, kw_only=True)
class SamplingOptions(CompletionOptions):
    """How completions are drawn, where they end, and how many there are: options of ``jobs/generate.py``, by
    their names. vLLM's ``max_tokens`` and ``n`` are ``max_new_tokens`` and ``num_samples``; ``stop`` may be
    one text. Raises :class:`specdist.utils.errors.UserError` (a ValueError) for another name or type.

    At most one constraint, which every completion must match as a whole: ``json_schema``, a schema as a dict
    or in JSON, or a class of pydantic that has one; ``regex``; ``grammar``, in llguidance's form of Lark;
    ``choices``, a list of texts. It takes the place of one that :class:`specdist.SpeculativeLLM` has got.
    """

    json_schema: Any = None
    regex: str | None = None
    grammar: str | None = None
    choices: list[str] | None = None

    def __init__(self, **options: Any) -> None:
        given: dict[str, Any] = {}
        for name, value in options.items():
            own = ALIASES.get(name, name)
            if own in given:
                raise UserError(f"{own} is given twice, under two names: leave one of them out")
            given[own] = [value] if own == "stop" and isinstance(value, str) else value
        names = [item.name for item in dataclasses.fields(SamplingOptions)]
        check_names(given, names, " of SamplingOptions")
        # Mappings are left to those that read them.
        check_types(SamplingOptions, {k: v for k, v in given.items() if not isinstance(v, Mapping)})
        for name in OF_ALL_ROWS:
            setattr(self, name, given.pop(name, None))
        if hasattr(self.json_schema, "model_json_schema"):  # a class of pydantic
            self.json_schema = self.json_schema.model_json_schema()
        super().__init__(**given)
        names = list(self.constraint)
        if names and self.stop:
            raise UserError(f"stop and {names[0]} {NO_STOP.replace('--', '')}")
        if len(names) > 1:
            raise UserError(f"{names[0]} and {names[1]} exclude each other: a completion has one constraint")

    @property
    def constraint(self) -> dict[str, Any]:
        """The constraint by its name; empty without."""
        return {name: value for name in OF_ALL_ROWS if (value := getattr(self, name)) is not None}


def check_names(names: Iterable[str], known: Collection[str], owner: str = "") -> None:
    """Raises :class:`UserError` for a name that is not an option's; ``owner``: whose options these are."""
    for name in names:
        if name not in known:
            found = nearest_option(name, known)
            remedy = (
                f": did you mean {found}?" if found else "; python jobs/generate.py --help all lists them"
            )
            raise UserError(f"{name} is not an option{owner}{remedy}")


def plain_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Values as a file of options has them: paths, and torch's types and devices, as texts; numpy's numbers
    as Python's; tuples as lists; functions as their places. Raises :class:`UserError` for one without."""
    found = dict(options)
    for name, value in options.items():
        if isinstance(value, PathLike) or type(value).__module__ == "torch":
            found[name] = str(value).removeprefix("torch.")
        elif isinstance(value, Real) and hasattr(value, "item"):
            found[name] = value.item()
        elif isinstance(value, tuple):
            found[name] = list(value)
        elif isinstance(value, types.FunctionType):
            found[name] = _place_of(name, value)
    return found


def _place_of(name: str, function: types.FunctionType) -> str:
    if function.__module__ == "__main__" or function.__qualname__ != function.__name__:
        raise UserError(
            f"{name} is {function.__qualname__} of {function.__module__}, which no other process can import: "
            "define it at the top of a file of its own, and import it from there"
        )
    return f"{inspect.getfile(function)}:{function.__name__}"


def check_constructor(options: Mapping[str, Any]) -> None:
    """Raises :class:`UserError` for options of ``SpeculativeLLM`` that are not its own."""
    per_call = {item.name for item in dataclasses.fields(SamplingOptions)}.difference(OF_ALL_ROWS)
    known = {item.name for item in dataclasses.fields(GenerateConfig)}
    for name in options:
        if ALIASES.get(name, name) in per_call:
            raise UserError(f"{name} is an option of generate(): give it there, in SamplingOptions")
        if name in RUN_OPTIONS:
            raise UserError(f"{name} is of a run: specdist.generate() or jobs/generate.py makes one")
        if name == "tp_size" and options[name] != 1:
            raise UserError(f"tp_size is {options[name]}, but SpeculativeLLM has one device: "
                            "specdist.generate() uses several")  # fmt: skip
    check_names(options, known)
    if isinstance(options.get("json_schema"), Mapping):
        raise UserError("json_schema here is a file: give a schema to generate(), in SamplingOptions")


def check_types(config_class: type, given: Mapping[str, Any]) -> None:
    """Raises :class:`UserError` for a value of another type than the option's."""
    hints = _hints(config_class)
    for name, value in given.items():
        if not _is_one(value, hints[name]):
            raise UserError(
                f"{name} is {value!r}, of type {type(value).__name__}, but must be {_words(hints[name])}"
            )


@cache
def _hints(config_class: type) -> dict[str, Any]:
    return typing.get_type_hints(config_class)


def _is_one(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is_one(value, inner) for inner in get_args(hint))
    if get_origin(hint) is list:
        # A text is told apart where lists are read.
        return isinstance(value, (list, tuple, str)) and all(
            _is_one(item, get_args(hint)[0]) for item in value
        )
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, inner))
    if get_origin(hint) is list:
        return f"a list of {'texts' if inner[0] is str else 'numbers'}"
    return " or ".join(map(_words, inner)) if inner else WORDS.get(hint, str(hint))
