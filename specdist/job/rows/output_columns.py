"""Which columns a run writes beside those of every run."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa

from specdist.config.generate import GenerateConfig
from specdist.data.columns import OPTIONAL_COLUMNS
from specdist.data.formats.prompts import Prompts
from specdist.data.run.publishing import write_table
from specdist.data.stats.rows import repeated
from specdist.engine.request import Completion
from specdist.engine.schedule.detokenizer import Detokenizer
from specdist.sampling.constraints.masker import ThinkingMarkers
from specdist.utils.errors import UserError


def column_options(config: GenerateConfig) -> list[str]:
    """The options of the run that have columns of their own."""
    is_on = {
        "logprobs": config.logprobs is not None,
        "prompt_logprobs": config.prompt_logprobs is not None,
        "turns_column": config.turns_column is not None or config.rollout is not None,
        "rollout": config.rollout is not None,
        "split_thinking": config.splits_thinking,
    }
    return [option for option in OPTIONAL_COLUMNS if is_on[option]]


def check_column_names(config: GenerateConfig, prompts: Prompts) -> None:
    """Raises :class:`UserError` for columns of the input that have the names of columns to be written."""
    for option in column_options(config):
        taken = [name for name in prompts.schema.names if name in OPTIONAL_COLUMNS[option]]
        if taken:
            raise UserError(
                f"--prompts {prompts.files[0]} has columns with names that --{option} writes: "
                f"{', '.join(taken)}; rename them"
            )


def check_writable(prompts: Prompts) -> None:
    """Raises :class:`UserError` for a column of the input that no shard, or no merged run, could hold."""
    for field in prompts.schema:
        _check_type(prompts, field)


def _check_type(prompts: Prompts, field: pa.Field) -> None:
    """Check what becomes of the column's first value."""
    try:
        first = prompts.rows.read(0, 1, [field.name])
        column = repeated(pa.concat_tables([first] * 2).column(0), np.array([0, 0, 1, 1]))
        table = pa.table([column], schema=pa.schema([field]))
        write_table(io.BytesIO(), table)
        pa.concat_tables([table, table]).unify_dictionaries()
    except pa.ArrowException as error:
        raise UserError(
            f"--prompts {prompts.files[0]}: column {field.name} has type {field.type}, which the output "
            f"cannot hold ({error}): write it as plain values or as text, or leave it out"
        ) from error


class ThinkingColumns:
    """The thinking and the answer of a completion, each as a text."""

    def __init__(
        self, markers: ThinkingMarkers, detokenizer: Detokenizer, stop: tuple[str, ...] = ()
    ) -> None:
        """``stop``: stop strings of rows without their own."""
        self._markers, self._detokenizer, self._stop = markers, detokenizer, stop

    def of(self, completion: Completion) -> dict[str, Any]:
        """The parts by column. Newlines around each are left out."""
        request = completion.request
        thinking_ids, answer_ids = self._markers.split(request.prompt_ids, completion.token_ids)
        stop = self._stop if request.stop is None else request.stop

        def text(before_ids: list[int], token_ids: list[int]) -> str:
            return self._detokenizer.until_stop(before_ids, token_ids, stop).strip("\n")

        num_before = len(completion.token_ids) - len(answer_ids)
        before_answer = request.prompt_ids + completion.token_ids[:num_before]
        return {
            "completion_thinking": None if thinking_ids is None else text(request.prompt_ids, thinking_ids),
            "completion_answer": text(before_answer, answer_ids),
        }
