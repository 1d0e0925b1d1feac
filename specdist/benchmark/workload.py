"""What every method has to generate: the same prompts, each with a limit of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from specdist.benchmark.config import BenchmarkConfig
from specdist.benchmark.pair import Pair
from specdist.data import Prompts, RowError, open_prompts
from specdist.errors import UserError
from specdist.job.tokens import PromptEncoder

# The group of all rows where no column says groups.
EVERYTHING = "all"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One completion to generate."""

    prompt_ids: list[int]
    max_new_tokens: int


def make_workload(config: BenchmarkConfig, pair: Pair) -> dict[str, list[Row]]:
    """Rows of every group, from ``--prompts`` or random ones; limits are uniform from a quarter of
    ``--max_new_tokens`` up.

    Raises :class:`UserError` for a prompt that cannot be used; in groups another one takes its place.
    """
    generator = np.random.default_rng(config.seed)
    if config.prompts is None:
        lengths = _spread(generator, config.max_prompt_tokens, config.num_prompts)
        groups = {
            EVERYTHING: [generator.integers(pair.vocab_size, size=length).tolist() for length in lengths]
        }
    else:
        groups = _FileOfPrompts(config, config.prompts, pair).groups()
    longest = max(len(prompt) for prompts in groups.values() for prompt in prompts) + config.max_new_tokens
    if longest > pair.max_positions:
        raise UserError(
            f"the longest prompt and --max_new_tokens {config.max_new_tokens} make {longest} tokens, but the "
            f"models were made for {pair.max_positions}: lower it, or leave long prompts out"
        )
    return {
        name: [
            Row(prompt_ids, limit)
            for prompt_ids, limit in zip(
                prompts, _spread(generator, config.max_new_tokens, len(prompts)), strict=True
            )
        ]
        for name, prompts in groups.items()
    }


def _spread(generator: np.random.Generator, longest: int, count: int) -> list[int]:
    return generator.integers(max(1, longest // 4), longest, size=count, endpoint=True).tolist()


class _FileOfPrompts:
    """``--prompts``, and which of its rows are used."""

    def __init__(self, config: BenchmarkConfig, path: str, pair: Pair) -> None:
        self._config = config
        self._path = path
        self._pair = pair
        self._prompts: Prompts = open_prompts(
            path,
            prompt_column=config.prompt_column,
            messages_column=config.messages_column,
            limit=None if config.group_column else config.num_prompts,
        )

    def groups(self) -> dict[str, list[list[int]]]:
        """The first rows of the file; or of each group equally many, spread evenly over the group."""
        column = self._config.group_column
        if column is None:
            encoder = self._encoder(self._pair.max_positions - 1)
            return {EVERYTHING: list(self._all(encoder))}
        groups = self._prompts.groups("--group_column", column)
        share = self._config.num_prompts // len(groups)
        if not share:
            raise UserError(
                f"--num_prompts {self._config.num_prompts} is less than a row for each of the {len(groups)} "
                f"groups of --group_column {column} ({', '.join(groups)}): raise it"
            )
        encoder = self._encoder(self._pair.max_positions - self._config.max_new_tokens)
        return {name: list(self._usable(name, rows, share, encoder)) for name, rows in groups.items()}

    def _all(self, encoder: PromptEncoder) -> Iterator[list[int]]:
        row = -1
        try:
            for row in range(self._prompts.num_rows):
                yield self._encode(row, encoder)
        except RowError as error:
            raise UserError(
                f"--prompts {self._path}, row {row}: {error.reason}; leave the row out"
            ) from error

    def _usable(
        self, name: str, rows: Sequence[int], share: int, encoder: PromptEncoder
    ) -> Iterator[list[int]]:
        """One row of each of ``share`` stretches, the first that can be used."""
        num_wanted, num_found = min(share, len(rows)), 0
        bounds = [index * len(rows) // num_wanted for index in range(num_wanted + 1)]
        for first, end in pairwise(bounds):
            for row in rows[first:end]:
                try:
                    prompt_ids = self._encode(row, encoder)
                except RowError as error:
                    logger.warning("row %d is left out: %s", row, error.reason)
                    continue
                num_found += 1
                yield prompt_ids
                break
        if not num_found:
            raise UserError(
                f"--prompts {self._path}: no row of the group {name} can be used with --max_new_tokens "
                f"{self._config.max_new_tokens}: lower it, or leave the group out"
            )

    def _encoder(self, max_prompt_tokens: int) -> PromptEncoder:
        return PromptEncoder(self._pair.tokenizer, max_prompt_tokens=max_prompt_tokens)

    def _encode(self, row: int, encoder: PromptEncoder) -> list[int]:
        return encoder.prompt_ids(self._prompts.prompt(row))
