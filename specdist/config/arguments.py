"""Options from one YAML file and the command line, which wins.

A configuration is a dataclass. The dataclasses that it inherits from are its groups: ``--help`` prints each
under the title that the class has as ``_argument_group_name``. The YAML file is turned into arguments placed
before the command line's, so one parser checks the types and choices of both.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib.util
import inspect
import itertools
import re
import reprlib
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import yaml

from specdist.config.names import LAUNCHER_OPTIONS, launch_line, nearest_option
from specdist.config.yaml_options import YamlOptions, reading_yaml, says
from specdist.utils.errors import UserError
from specdist.utils.rules import BOUNDS, RULE, Rule, within

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from transformers.hf_argparser import HfArgumentParser, string_to_bool

Config = TypeVar("Config", bound="DataclassInstance")


def _hf_argument_parser() -> Any:
    """transformers' parsing from its own file, which imports nothing else of transformers: the whole package
    takes longer to import than all that comes before an option's error message."""
    package = importlib.util.find_spec("transformers")
    if package is not None and package.origin is not None:
        path = Path(package.origin).with_name("hf_argparser.py")
        spec = importlib.util.spec_from_file_location("specdist_hf_argparser", path)
        if path.is_file() and spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            with contextlib.suppress(ImportError):
                spec.loader.exec_module(module)
                return module
    from transformers import hf_argparser

    return hf_argparser


if not TYPE_CHECKING:
    _PARSING = _hf_argument_parser()
    HfArgumentParser, string_to_bool = _PARSING.HfArgumentParser, _PARSING.string_to_bool
# The tags of YAML's plain values; others are asked for by name, such as !!binary.
YAML_TAG = "tag:yaml.org,2002:"
NULL = f"{YAML_TAG}null"
PLAIN_TAGS = frozenset(
    f"{YAML_TAG}{kind}" for kind in ("str", "bool", "int", "float", "null", "timestamp", "merge", "value")
)
GROUP_TITLE = "_argument_group_name"
# The attribute of a configuration for path options that may be URLs, too.
URL_OPTIONS = "_url_options"
# And those that its --help shows, one line each; all of them are shown by --help all.
MAIN_OPTIONS = "_main_options"
# The attribute, where a job generates, too, for the options of jobs/generate.py that it may not have.
OPTIONS_OF_RUNS = "_options_of_runs"
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Every option, of whatever job, whose value is a file, a folder, or a model that may be a folder.
PATH_OPTIONS = frozenset(
    ["against", "chat_template", "config", "data", "draft", "draft_adapter",
     "folder", "grammar", "head", "json_schema", "lm_eval_include", "new_draft", "output",
     "output_config", "outputs", "prompts", "rollout", "run", "cache_dir",
     "target", "target_adapter"]
)  # fmt: skip
MODEL_OPTIONS = frozenset({"target", "target_adapter", "draft", "draft_adapter"})


def option(
    default: Any = dataclasses.MISSING, *, help: str, rule: Rule | None = None, **metadata: Any
) -> Any:
    """A dataclass field with the help text that ``--help`` prints and a rule of :mod:`specdist.utils.rules`,
    which may be given by the bounds of :func:`within` (``at_least=1``)."""
    bounds = {name: metadata.pop(name) for name in BOUNDS if name in metadata}
    rule = within(**bounds) if bounds else rule
    checked = {} if rule is None else {RULE: rule}
    return field(default=default, metadata={"help": help, **metadata, **checked})


def parse_arguments(
    config_class: type[Config], arguments: Sequence[str] | None = None, *, positional: str | None = None
) -> Config:
    """Parse ``[--config FILE] [--option value ...]`` into ``config_class``; the command line wins.

    A word before all options is the value of the option ``positional``. Raises :class:`UserError` for what
    cannot be parsed; ``--help`` prints all options and ends the program.
    """
    return parse_given(config_class, arguments, positional=positional)[0]


def parse_given(
    config_class: type[Config], arguments: Sequence[str] | None = None, *, positional: str | None = None
) -> tuple[Config, frozenset[str]]:
    """Parse as :func:`parse_arguments` does; return also the names of the options that were given, in the
    file or otherwise."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if positional is not None and arguments and not arguments[0].startswith("-"):
        arguments[0] = f"--{positional}={arguments[0]}"
    config_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config_parser.add_argument(
        "--config", type=local_path, help="YAML file of options; the command line wins"
    )
    chosen, options = config_parser.parse_known_args(arguments)
    parser = OptionParser(config_class, config_parser)
    given = {item[2:].split("=")[0].replace("-", "_") for item in options if item.startswith("--")}
    if chosen.config is not None:
        same: frozenset[str] = getattr(config_class, "_alternatives", frozenset())
        overridden = given | same if given & same else given
        options = parser.arguments_from_yaml(chosen.config, overridden) + options
    values = vars(parser.values(options))
    del values["config"]
    urls = getattr(config_class, URL_OPTIONS, ())
    check_paths({name: value for name, value in values.items() if name not in urls})
    return config_class(**values), frozenset({*given, *parser.places})


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are a :class:`UserError` with option, rule and remedy; no usage is printed."""

    # Where an option of the YAML file stands, for messages.
    places: Mapping[str, str] = {}
    all_options = "--help lists all options"

    def values(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """What :meth:`parse_args` gives. Raises :class:`UserError`, for an unknown option with the nearest
        known one."""
        arguments = list(sys.argv[1:] if arguments is None else arguments)
        # First of all: with a misspelt option a required one may be missing.
        for word in itertools.takewhile(lambda word: word != "--", arguments):
            name = word.split("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                self._refuse(name)
        if arguments and not arguments[0].startswith("-") and not self._get_positional_actions():
            self._refuse(arguments[0])
        namespace, unknown = self.parse_known_args(arguments)
        if unknown:
            self._refuse(unknown[0])
        return namespace

    def _refuse(self, word: str) -> NoReturn:
        if word.startswith("-"):
            told = self.nearest(word.lstrip("-"))
        else:
            meant = f"; did you mean --config {word}?" if word.endswith((".yaml", ".yml")) else ""
            told = f": a value without an option{meant}"
        raise UserError(f"{word} is not an option{told}")

    def nearest(self, name: str) -> str:
        """A remedy for a name that is not an option's."""
        names = [action.dest for action in self._actions if action.option_strings]
        found = nearest_option(name.replace("-", "_"), names)
        return f": did you mean --{found}?" if found else f"; {self.all_options}"

    def error(self, message: str) -> NoReturn:
        match = re.match(r"argument (--\w+)[^:]*: (.*)", message, re.DOTALL)
        if match is None:
            missing = message.removeprefix("the following arguments are required: ")
            names = ", ".join(part.split("/")[0] for part in missing.split(", "))
            raise UserError(
                f"{names} must be given" if missing != message else f"{message}; {self.all_options}"
            )
        name, told = match.groups()
        told = re.sub(r"^invalid int value: (.*)", r"\1 is not a whole number", told)
        told = re.sub(r"^invalid float value: (.*)", r"\1 is not a number", told)
        if chosen := re.match(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", told):
            choices = re.findall(r"[\w./-]+", chosen[2])
            near = difflib.get_close_matches(chosen[1], choices, n=1)
            told += f": did you mean {near[0]}?" if near else ""
        place = self.places.get(name[2:])
        raise UserError(f"{name}: {told}" + (f" ({place})" if place else ""))


class OptionParser(HfArgumentParser, CommandParser):
    """One parser for the groups of a configuration."""

    def __init__(self, config_class: type[DataclassInstance], config_parser: argparse.ArgumentParser) -> None:
        self._main = tuple(getattr(config_class, MAIN_OPTIONS, ()))
        HfArgumentParser.__init__(
            self,
            list(groups_of(config_class)),
            allow_abbrev=False,
            add_help=not self._main,
            parents=[config_parser],
            formatter_class=OptionHelp,
            usage="%(prog)s [--config FILE] [--option value ...]",
        )
        fields = dataclasses.fields(config_class)
        self._names = [item.name for item in fields]
        self._of_runs = frozenset(getattr(config_class, OPTIONS_OF_RUNS, ()))
        self._lists = {item.name for item in fields if "action" in item.metadata}
        self.places: dict[str, str] = {}
        if self._main:
            self.all_options = "--help all lists all options"
            self.add_argument(
                "--help", nargs="?", choices=["all"], action=ShowHelp, default=argparse.SUPPRESS,
                help="all = every option with all that is to be said of it",
            )  # fmt: skip

    def main_help(self) -> str:
        """The main options of each group, with the beginning of what is said of them."""
        width = shutil.get_terminal_size().columns
        lines = [self.format_usage().rstrip()]
        for group in self._action_groups:
            actions = [each for each in group._group_actions if each.dest in self._main]
            if actions:
                lines += ["", f"{group.title}:"]
            for action in actions:
                about = re.split(r"; | \(|\. ", action.help or "")[0]
                is_told = action.default in (None, "") or action.default is False or "default" in about
                about += "" if is_told or action.required else f" (default: {action.default})"
                lines.append(f"  --{action.dest:22}{textwrap.shorten(about, width - 26, placeholder=' ...')}")
        lines += ["", f"{len(self._main)} of {len(self._names)} options; {self.all_options}"]
        return "\n".join(lines) + "\n"

    def nearest(self, name: str) -> str:
        if name.replace("-", "_") in LAUNCHER_OPTIONS:
            return f" of this job, but of its launcher: {launch_line('N', ['...'])}"
        if name in self._of_runs:
            return " of this job, but of jobs/generate.py alone: leave it out"
        return super().nearest(name)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> Any:
        """One for each title: several classes may add to it."""
        same = (group for group in self._action_groups if args and group.title == args[0])
        return next(same, None) or super().add_argument_group(*args, **kwargs)

    def arguments_from_yaml(self, path: Path, overridden: set[str]) -> list[str]:
        """The file's keys as ``--key=value`` arguments, less those that the command line overrides.

        Raises :class:`UserError` if the file is not one flat mapping of options to values, with the line.
        """
        arguments: list[str] = []
        with reading_yaml(path) as read:
            for name, (line, node) in read.options().items():
                place = f"--config {path}, line {line}"
                if name == "config":
                    raise UserError(f"{place}: a file cannot name another one; move its options here")
                if name not in self._names:
                    raise UserError(f"{place}: {name} is not an option{self.nearest(str(name))}")
                is_list = isinstance(node, yaml.SequenceNode) and name in self._lists
                items = node.value if is_list else [node]
                if any(not isinstance(item, yaml.ScalarNode) for item in items):
                    # Shortened: aliases can make billions of values out of a few lines.
                    shown = reprlib.repr(read.value(node))
                    raise UserError(f"{place}: {name} must be one plain value, not {shown}; options are flat")
                if name not in overridden and node.tag != NULL:
                    self.places[name] = place
                    arguments += [f"--{name}={self._written(read, name, item)}" for item in items]
        return arguments

    def _written(self, read: YamlOptions, name: str, item: yaml.Node) -> Any:
        """A value as the command line would have it. Text is what the file says, whatever YAML 1.1 makes of
        it: it takes no for False, 12:30 for 750 and 012 for 10. Raises :class:`UserError`."""
        kind = next(action.type for action in self._actions if action.dest == name)
        place = f"--config {read.path}, line {item.start_mark.line + 1}: {name}"
        if kind not in (int, float, string_to_bool):
            if item.tag == NULL:
                shown = f"has {item.value}" if item.value else "has an item without a value"
                raise UserError(
                    f"{place} {shown}, which is nothing in YAML: write it in quotes, or leave it out"
                )
            return item.value if item.tag in PLAIN_TAGS else read.value(item)
        value = read.value(item)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not says(item.value, value):
            raise UserError(
                f"{place} is {item.value}, which is {value} in YAML: write it as a decimal number"
            )
        return value


class ShowHelp(argparse.Action):
    """``--help``: the main options; ``--help all``: all of them."""

    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: Any, values: Any, _option: str | None = None
    ) -> None:
        assert isinstance(parser, OptionParser)
        sys.stdout.write(parser.format_help() if values == "all" else parser.main_help())
        parser.exit()


class OptionHelp(argparse.HelpFormatter):
    """One name for each option, and its default once."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        name = action.option_strings[0 if action.option_strings[0].startswith("--") else -1]
        metavar = self._get_default_metavar_for_optional(action)
        return name if action.nargs == 0 else f"{name} {self._format_args(action, metavar)}"

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_told = "default" in text or action.default in (None, False, "", argparse.SUPPRESS)
        return text if is_told else f"{text} (default: %(default)s)"


def groups_of(config_class: type[DataclassInstance]) -> Iterator[type]:
    """A dataclass for each group of options: the configuration's own first, then those it inherits from."""
    redefined: set[str] = set()
    for group in config_class.__mro__:
        if not dataclasses.is_dataclass(group):
            continue
        own = [item for item in dataclasses.fields(group) if item.name in inspect.get_annotations(group)]
        own = [item for item in own if item.name not in redefined]
        redefined |= {item.name for item in own}
        if own:
            part = dataclasses.make_dataclass(
                group.__name__,
                [(item.name, item.type, _copied(item)) for item in own],
                kw_only=True,
                namespace={GROUP_TITLE: getattr(group, GROUP_TITLE, "Options")},
            )
            # Where its annotations are read; from Python 3.12 on a module in the namespace is overwritten.
            part.__module__ = group.__module__
            yield part


def _copied(item: Any) -> Any:
    factory: Any = {"default": item.default} if item.default is not dataclasses.MISSING else {}
    # The parser takes the others as its own.
    return field(metadata={name: value for name, value in item.metadata.items() if name != RULE}, **factory)


def resolved_yaml(config: DataclassInstance) -> str:
    """The configuration in force, as the run folder's ``config.yaml``: feeding it back continues the run."""
    values = dataclasses.asdict(config) | {"overwrite": False}
    names = [item.name for group in groups_of(type(config)) for item in dataclasses.fields(group)]
    return yaml.safe_dump({name: values[name] for name in names}, sort_keys=False)


def check_paths(values: Mapping[str, Any]) -> None:
    """Refuse URLs where a path is expected.

    ``values`` are options by name; those that are not paths may hold anything. Raises :class:`UserError`.
    """
    for name in PATH_OPTIONS.intersection(values):
        value = values[name]
        instead = "a folder or a hub id (owner/name)" if name in MODEL_OPTIONS else "a path"
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, str):
                check_local(item, label=f"--{name} ", instead=instead)


def check_local(text: str, *, label: str = "", instead: str = "a path") -> None:
    """Refuse a URL, of which ``Path`` would make the folder ``s3:/bucket``. Raises :class:`UserError`."""
    if URL.match(text):
        raise UserError(
            f"{label}{text} is a URL, but here specdist reads and writes local files only: give {instead} "
            "instead, after copying the files to this machine (--prompts, and --output of specdist generate, "
            "take URLs)"
        )


def local_path(text: str) -> Path:
    """A path given on the command line, for ``argparse``. Raises ``argparse.ArgumentTypeError`` for a URL."""
    try:
        check_local(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)
