"""The job's options: one flat dataclass, one YAML file, and the command line, which wins.

The YAML file is turned into arguments placed before the command line's, so one parser checks the types
and choices of both, and an unknown key is the same error as an unknown option.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import yaml
from transformers import HfArgumentParser

from specdist.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
BYTES_PER_UNIT = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


def option(default: Any = dataclasses.MISSING, *, help: str, **metadata: Any) -> Any:
    """A dataclass field with the help text that ``--help`` prints."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(kw_only=True)
class GenerateConfig:
    """Every option of ``jobs/generate.py``. Raises :class:`UserError` for a value out of its range."""

    # What goes in and out
    prompts: str = option(help="Arrow IPC file or folder, save_to_disk folder, Parquet or JSONL")
    output: str = option(help="folder of the run: shards/, stats/, manifest.json, ...")
    prompt_column: str | None = option(None, help="column that holds the prompt text (default: prompt)")
    messages_column: str | None = option(None, help="column of chat messages, put through the chat template")
    limit: int | None = option(None, help="take only the first N rows")
    rows_per_shard: int = option(512, help="input rows per output file")
    overwrite: bool = option(False, help="delete what an earlier run left in the output folder")

    # Models
    target: str = option(help="hub id or folder of the large model, whose distribution the output follows")
    draft: str | None = option(None, help="hub id or folder of the small model; none = target only")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", help="auto = the checkpoint's")
    device: Literal["auto", "cpu", "cuda"] = option("auto", help="auto = cuda where there is one")
    tp_size: int = option(1, help="ranks that share the target; must divide its heads and key/value heads")

    # Speculation
    policy: Literal["fixed", "none"] = option("fixed", help="how many tokens to draft; none = target only")
    num_draft_tokens: int = option(5, help="draft tokens per round of --policy fixed")
    acceptance: Literal["rejection", "gumbel"] = option(
        "rejection",
        help="rejection accepts most; gumbel emits the tokens of the target alone, whatever the draft",
    )
    overlap: Literal["none", "ahead"] = option(
        "none", help="ahead = on a rank of its own the draft drafts on while the target verifies"
    )
    num_branches: int | None = option(
        None,
        help="likely misses that --overlap ahead prepares per row, 0 = none (default: from measured times)",
    )

    # Sampling
    temperature: float = option(1.0, help="0 = greedy")
    top_k: int = option(0, help="keep the k likeliest tokens; 0 = all")
    top_p: float = option(1.0, help="keep the smallest set of tokens with this probability; 1 = all")
    max_new_tokens: int = option(256, help="longest completion, in tokens")
    stop: list[str] | None = option(
        None, help="strings that end a completion; they are not part of it", action="extend"
    )
    num_samples: int = option(1, help="completions per prompt")
    seed: int = option(0, help="the same seed gives the same completions")

    # Capacity
    max_batch_rows: int = option(32, help="most rows generated at a time; free cache pages decide below it")
    max_batch_tokens: int = option(2048, help="most tokens of one target pass (prompts are cut into chunks)")
    max_seq_len: int | None = option(
        None, help="longest prompt plus completion (default: what the models allow)"
    )
    cache_memory: str | None = option(
        None, help="bytes for keys and values on each rank, such as 8GiB (default: what the device has left)"
    )

    def __post_init__(self) -> None:
        self.draft = None if self.draft in (None, "none", "") else self.draft
        self.stop = list(self.stop or [])
        for name in ("rows_per_shard", "tp_size", "num_draft_tokens", "max_new_tokens", "num_samples",
                     "max_batch_rows", "max_batch_tokens"):  # fmt: skip
            self._require(name, getattr(self, name) >= 1, "must be at least 1")
        for name in ("limit", "max_seq_len"):
            self._require(name, getattr(self, name) is None or getattr(self, name) >= 1, "must be at least 1")
        self._require(
            "num_branches",
            self.num_branches is None or self.num_branches >= 0,
            "must not be negative; 0 prepares none",
        )
        self._require("temperature", 0 <= self.temperature < math.inf, "must be 0 (greedy) or a number above")
        self._require("top_k", self.top_k >= 0, "must not be negative; 0 keeps every token")
        self._require("top_p", 0 < self.top_p <= 1, "must be in (0, 1]; 1 keeps every token")
        self._require("seed", 0 <= self.seed < 2**63, "must be in [0, 2**63)")
        self._require("stop", all(self.stop), "must not contain an empty string; leave it out instead")
        if self.prompt_column and self.messages_column:
            raise UserError(
                f"--prompt_column {self.prompt_column} and --messages_column {self.messages_column} exclude "
                "each other: name the column of plain prompts or the column of chat messages"
            )
        if self.messages_column is None:
            self.prompt_column = self.prompt_column or "prompt"
        if self.policy == "fixed" and self.draft is None:
            self.policy = "none"
        if self.max_batch_tokens < self.block_tokens:
            raise UserError(
                f"--max_batch_tokens {self.max_batch_tokens} is less than one row's verification block of "
                f"{self.block_tokens} tokens (--num_draft_tokens + 1): raise it or lower --num_draft_tokens"
            )
        self.cache_bytes()

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise UserError(f"--{name} {getattr(self, name)!r} {rule}")

    @property
    def uses_draft(self) -> bool:
        return self.policy != "none"

    @property
    def drafts_ahead(self) -> bool:
        """Whether the draft works while the target does, which takes a rank of its own."""
        return self.uses_draft and self.overlap == "ahead"

    @property
    def block_tokens(self) -> int:
        """Most tokens that one row can add to a target pass after its prompt: the candidates and one more."""
        return (self.num_draft_tokens if self.uses_draft else 0) + 1

    @property
    def num_world_ranks(self) -> int:
        """Ranks of the separate placement: the target's, and one for the draft where there is a draft."""
        return self.tp_size + int(self.uses_draft)

    def cache_bytes(self) -> int | None:
        """``--cache_memory`` in bytes; None where the device decides."""
        if self.cache_memory is None:
            return None
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", self.cache_memory)
        if not match or match[2].upper() not in BYTES_PER_UNIT:
            raise UserError(f"--cache_memory {self.cache_memory!r} is not a size: write it like 8GiB")
        return int(float(match[1]) * BYTES_PER_UNIT[match[2].upper()])

    def warnings(self) -> list[str]:
        """Options that were set and have no effect in this run, one sentence each."""
        found = []
        if self.draft is not None and not self.uses_draft:
            found.append(f"--draft {self.draft} has no effect with --policy none: the draft is not loaded")
        if self.overlap == "ahead" and not self.uses_draft:
            found.append("--overlap ahead has no effect without a draft")
        if self.num_branches is not None and not self.drafts_ahead:
            found.append(f"--num_branches {self.num_branches} has no effect without --overlap ahead")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            found.append(
                "--top_k and --top_p have no effect with --temperature 0: it takes the likeliest token"
            )
        if self.temperature == 0 and self.num_samples > 1:
            found.append(f"--num_samples {self.num_samples} with --temperature 0 gives identical completions")
        return found

    def check_world(self, world_size: int) -> None:
        """Refuse a number of ranks that is neither 1 nor the target's ranks plus the draft's."""
        if world_size == 1 and self.tp_size == 1:
            if self.drafts_ahead:
                raise UserError(
                    "--overlap ahead needs a rank for the draft, but 1 rank was launched: launch with "
                    f"--num_processes {self.num_world_ranks}, or use --overlap none"
                )
            return
        if world_size != self.num_world_ranks:
            draft_ranks = "1 rank for the draft" if self.uses_draft else "none for a draft"
            lone = (
                ", or 1 to hold both models in one process" if self.uses_draft and self.tp_size == 1 else ""
            )
            launched = "1 rank was" if world_size == 1 else f"{world_size} ranks were"
            raise UserError(
                f"{launched} launched, but --tp_size {self.tp_size} needs "
                f"{self.num_world_ranks}: {self.tp_size} for the target and {draft_ranks}. "
                f"Launch with --num_processes {self.num_world_ranks}{lone}"
            )


def arguments_from_yaml(path: Path, overridden: set[str], lists: set[str]) -> list[str]:
    """The YAML file's keys as ``--key=value`` arguments, less those that the command line overrides.

    Raises :class:`UserError` if the file is not one flat mapping, or has several values for an option that is
    not one of ``lists``.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path} must be a mapping of option names to values")
    arguments: list[str] = []
    for name, value in values.items():
        if isinstance(value, dict) or (isinstance(value, list) and name not in lists):
            raise UserError(f"--config {path}: {name} must be one plain value, not {value}; options are flat")
        if name == "config":
            raise UserError(f"--config {path}: a file cannot name another one; move its options here")
        if name not in overridden and value is not None:
            arguments += [f"--{name}={item}" for item in (value if isinstance(value, list) else [value])]
    return arguments


def parse_arguments(config_class: type[Config], arguments: Sequence[str] | None = None) -> Config:
    """Parse ``[--config FILE] [--option value ...]`` into ``config_class``; the command line wins."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    config_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config_parser.add_argument("--config", type=Path, help="YAML file of options; the command line wins")
    chosen, options = config_parser.parse_known_args(arguments)
    if chosen.config is not None:
        overridden = {item[2:].split("=")[0] for item in options if item.startswith("--")}
        lists = {item.name for item in dataclasses.fields(config_class) if "action" in item.metadata}
        options = arguments_from_yaml(chosen.config, overridden, lists) + options
    parser = HfArgumentParser(config_class, allow_abbrev=False, parents=[config_parser])
    namespace = vars(parser.parse_args(options))
    del namespace["config"]
    return config_class(**namespace)


def parse_generate_config(arguments: Sequence[str] | None = None) -> GenerateConfig:
    """The options of ``jobs/generate.py``."""
    return parse_arguments(GenerateConfig, arguments)


def resolved_yaml(config: GenerateConfig) -> str:
    """The configuration in force, as the run folder's ``config.yaml``: feeding it back continues the run."""
    return yaml.safe_dump({**dataclasses.asdict(config), "overwrite": False}, sort_keys=False)
