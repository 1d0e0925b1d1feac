"""What every method has to generate: the same prompts, each with a limit of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdist.benchmark.config import BenchmarkConfig
from specdist.benchmark.pair import Pair
from specdist.data import Prompts, RowError, open_prompts
from specdist.errors import UserError
from specdist.job.tokens import PromptEncoder


@dataclass(frozen=True)
class Row:
    """One completion to generate."""

    prompt_ids: list[int]
    max_new_tokens: int


def make_workload(config: BenchmarkConfig, pair: Pair) -> list[Row]:
    """Rows from ``--prompts``, or random ones; limits are uniform from a quarter of ``--max_new_tokens`` up.

    Raises :class:`UserError` for a prompt that cannot be used.
    """
    generator = np.random.default_rng(config.seed)
    if config.prompts is not None:
        prompts = _prompts_from_file(config, config.prompts, pair)
    else:
        prompts = [
            generator.integers(pair.vocab_size, size=length).tolist()
            for length in _spread(generator, config.max_prompt_tokens, config.num_prompts)
        ]
    limits = _spread(generator, config.max_new_tokens, len(prompts))
    longest = max(map(len, prompts)) + config.max_new_tokens
    if longest > pair.max_positions:
        raise UserError(
            f"the longest prompt and --max_new_tokens {config.max_new_tokens} make {longest} tokens, but the "
            f"models were made for {pair.max_positions}: lower it, or leave long prompts out"
        )
    return [Row(prompt_ids, limit) for prompt_ids, limit in zip(prompts, limits, strict=True)]


def _spread(generator: np.random.Generator, longest: int, count: int) -> list[int]:
    return generator.integers(max(1, longest // 4), longest, size=count, endpoint=True).tolist()


def _prompts_from_file(config: BenchmarkConfig, path: str, pair: Pair) -> list[list[int]]:
    prompts = open_prompts(
        path,
        prompt_column=config.prompt_column,
        messages_column=config.messages_column,
        limit=config.num_prompts,
    )
    encoder = PromptEncoder(pair.tokenizer, max_prompt_tokens=pair.max_positions - 1)
    return [_encode(path, prompts, row, encoder) for row in range(prompts.num_rows)]


def _encode(path: str, prompts: Prompts, row: int, encoder: PromptEncoder) -> list[int]:
    try:
        prompt = prompts.prompt(row)
        return encoder.token_ids(encoder.text(prompt), is_chat=not isinstance(prompt, str))
    except RowError as error:
        raise UserError(f"--prompts {path}, row {row}: {error.reason}; leave the row out") from error
