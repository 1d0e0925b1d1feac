"""The rows that every method generates: prompts, each with a limit of its own."""

from __future__ import annotations

import numpy as np

from specdist.benchmark.config import BenchmarkConfig
from specdist.benchmark.methods import Row
from specdist.benchmark.pair import Pair
from specdist.data import Prompts, RowError, open_prompts
from specdist.job.tokens import PromptEncoder, check_split_special_tokens
from specdist.utils.errors import UserError

# The group of all rows without --group_column.
EVERYTHING = "all"


def make_workload(config: BenchmarkConfig, pair: Pair) -> dict[str, list[Row]]:
    """Rows of every group, from ``--prompts`` or random; limits are uniform from a quarter of
    ``--max_new_tokens`` up.

    Raises :class:`UserError` for a prompt that cannot be used; in groups another takes its place.
    """
    generator = np.random.default_rng(config.seed)
    if config.prompts is None:
        lengths = _spread(generator, config.max_prompt_tokens, config.num_prompts)
        groups = {
            EVERYTHING: [generator.integers(pair.vocab_size, size=length).tolist() for length in lengths]
        }
    else:
        groups = _prompts_of_file(config, config.prompts, pair)
    longest = max(len(prompt) for prompts in groups.values() for prompt in prompts) + config.max_new_tokens
    if longest > pair.max_positions:
        raise UserError(
            f"the longest prompt and --max_new_tokens {config.max_new_tokens} make {longest} tokens, but the "
            f"models support {pair.max_positions}: lower it, or leave long prompts out"
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


def _prompts_of_file(config: BenchmarkConfig, path: str, pair: Pair) -> dict[str, list[list[int]]]:
    """The first rows of the file; or equally many of each group, spread evenly over it."""
    column = config.group_column
    prompts = open_prompts(
        path,
        prompt_column=config.prompt_column,
        messages_column=config.messages_column,
        limit=config.num_prompts if column is None else None,
    )
    # Without groups a prompt that is too long is an error of :func:`make_workload`.
    room = 1 if column is None else config.max_new_tokens
    check_split_special_tokens(pair.target_checkpoint, config.split_special_tokens)
    encoder = PromptEncoder(
        pair.tokenizer,
        max_prompt_tokens=pair.max_positions - room,
        split_special_tokens=config.split_special_tokens,
    )

    if column is None:
        return {EVERYTHING: [_encoded(path, encoder, prompts, row) for row in range(prompts.num_rows)]}
    groups = prompts.groups("--group_column", column)
    share = config.num_prompts // len(groups)
    if not share:
        raise UserError(
            f"--num_prompts {config.num_prompts} is less than one row for each of the {len(groups)} groups "
            f"of --group_column {column} ({', '.join(groups)}): raise it"
        )
    found = {
        name: [prompt_ids for _, prompt_ids in encoder.usable_prompts(prompts, rows, share)]
        for name, rows in groups.items()
    }
    for name, usable in found.items():
        if not usable:
            raise UserError(
                f"--prompts {path}: no row of the group {name} can be used with --max_new_tokens "
                f"{config.max_new_tokens}: lower it, or leave the group out"
            )
    return found


def _encoded(path: str, encoder: PromptEncoder, prompts: Prompts, row: int) -> list[int]:
    try:
        return encoder.prompt_ids(prompts.prompt(row))
    except RowError as error:
        raise UserError(f"--prompts {path}, row {row}: {error.reason}; leave the row out") from error
