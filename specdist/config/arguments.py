"""Options from one YAML file and the command line, which wins.

The YAML file is turned into arguments placed before the command line's, so one parser checks the types
and choices of both, and an unknown key is the same error as an unknown option.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from transformers import HfArgumentParser

from specdist.utils.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Every option, of whatever job, whose value is a file, a folder, or a model that may be a folder.
PATH_OPTIONS = frozenset(
    ["against", "config", "data", "draft", "eval_data", "folder", "head", "lm_eval_include", "model",
     "output", "output_config", "outputs", "profile", "prompts", "results", "run", "synthetic_folder",
     "target", "trace", "tune", "update_readme"]
)  # fmt: skip
MODEL_OPTIONS = frozenset({"target", "draft", "model"})


def check_paths(values: Mapping[str, Any]) -> None:
    """Refuse URLs where a path is expected: ``Path`` would make ``s3://bucket`` the folder ``s3:/bucket``.

    ``values`` are options by name; those that are not paths may hold anything. Raises :class:`UserError`.
    """
    for name in PATH_OPTIONS.intersection(values):
        value = values[name]
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, str) and URL.match(item):
                instead = "a folder or a hub id (owner/name)" if name in MODEL_OPTIONS else "a path"
                raise UserError(
                    f"--{name} {item} is a URL, but specdist reads and writes local files only: give "
                    f"{instead} instead, after mounting the storage or copying its files to this machine"
                )


def local_path(text: str) -> Path:
    """A path given on the command line, for ``argparse``. Raises ``argparse.ArgumentTypeError`` for a URL."""
    try:
        check_paths({"folder": text})
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--folder ")) from error
    return Path(text)


def option(default: Any = dataclasses.MISSING, *, help: str, **metadata: Any) -> Any:
    """A dataclass field with the help text that ``--help`` prints."""
    return field(default=default, metadata={"help": help, **metadata})


def arguments_from_yaml(path: Path, overridden: set[str], lists: set[str]) -> list[str]:
    """The YAML file's keys as ``--key=value`` arguments, less those that the command line overrides.

    Raises :class:`UserError` if the file is not one flat mapping, or has several values for an option that is
    not one of ``lists``.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path} must be a mapping of option names to values")
    arguments: list[str] = []
    for name, value in values.items():
        items = value if isinstance(value, list) and name in lists else [value]
        if any(isinstance(item, (dict, list)) for item in items):
            # Shortened: aliases can make billions of values out of a few lines.
            shown = reprlib.repr(value)
            raise UserError(f"--config {path}: {name} must be one plain value, not {shown}; options are flat")
        if name == "config":
            raise UserError(f"--config {path}: a file cannot name another one; move its options here")
        if name not in overridden and value is not None:
            arguments += [f"--{name}={item}" for item in items]
    return arguments


def parse_arguments(
    config_class: type[Config], arguments: Sequence[str] | None = None, *, positional: str | None = None
) -> Config:
    """Parse ``[--config FILE] [--option value ...]`` into ``config_class``; the command line wins.

    A word before all options is the value of the option ``positional``.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if positional is not None and arguments and not arguments[0].startswith("-"):
        arguments[0] = f"--{positional}={arguments[0]}"
    config_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config_parser.add_argument(
        "--config", type=local_path, help="YAML file of options; the command line wins"
    )
    chosen, options = config_parser.parse_known_args(arguments)
    if chosen.config is not None:
        overridden = {item[2:].split("=")[0] for item in options if item.startswith("--")}
        lists = {item.name for item in dataclasses.fields(config_class) if "action" in item.metadata}
        options = arguments_from_yaml(chosen.config, overridden, lists) + options
    parser = HfArgumentParser(config_class, allow_abbrev=False, parents=[config_parser])
    namespace = vars(parser.parse_args(options))
    del namespace["config"]
    check_paths(namespace)
    return config_class(**namespace)
