"""The exhaustive trace: the draft's tokens from every position of a completion, and how many are accepted.

A length policy decides at which positions of a completion rounds begin, but not what is drafted and accepted
there. So the trace holds, for every position of the target's own completion, the draft's tokens from there
on, up to the cap, as if a round began there. The rounds of any policy can be read from it.

- Greedy and coupled draws: the draft's token is accepted if it equals the target's. The trace is exactly what
  a live run sees.
- Rejection: the draft's token is drawn *given* the completion's, by the joint distribution that the rejection
  rule gives the two (Leviathan et al. 2023, appendix A.1): it is the completion's own token x with
  probability min(1, Q(x)/P(x)), else drawn from norm(max(0, Q - P)). Then it follows Q, is accepted with
  probability min(1, P/Q), and the committed token is x. Rounds read from the trace have the distribution of
  a live run's.

P prompts, N tokens of a completion, D depths (the cap), T places of all completions, one after the other, E
trained heads on the draft.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from specdist.data.store.files import write_atomically
from specdist.utils.errors import UserError

METADATA = b"specdist_exhaustive_trace_2"
INTS, FLOATS = pa.list_(pa.int32()), pa.list_(pa.float64())


@dataclass(frozen=True, kw_only=True)
class PromptTrace:
    """One completion, and the draft's tokens from each of its positions on.

    Entry [n, d] is about the token drafted for position n + d in a round whose first drafted token is for
    position n. Nothing is drafted for the last position that the completion may have, nor after a stop token:
    these entries are zero.

    Attributes:
        prompt_ids, completion_ids: [prompt's length], [N]; the completion is the target's own.
        max_new_tokens: most tokens that the completion may have had.
        num_accepted_N: leading tokens of each line that the target accepts.
        num_drafted_N: tokens of each line.
        token_ids_ND, is_stop_ND: the drafted tokens, and whether they end a completion.
        entropies_ND, probabilities_ND, top_probabilities_ND: the draft's features, as policies get them.
        acceptance_ND: min(1, P/Q) of tokens up to the first rejected one; NaN after it.
        estimates_END: each head's estimates of the drafted tokens; NaN for a line's last one, over which no
            pass is run.
    """

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    max_new_tokens: int
    num_accepted_N: np.ndarray
    num_drafted_N: np.ndarray
    token_ids_ND: np.ndarray
    is_stop_ND: np.ndarray
    entropies_ND: np.ndarray
    probabilities_ND: np.ndarray
    top_probabilities_ND: np.ndarray
    acceptance_ND: np.ndarray
    estimates_END: np.ndarray

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.completion_ids)


@dataclass(frozen=True)
class ExhaustiveTrace:
    """Traces of several prompts with one cap; ``origin``: the settings they were collected with."""

    prompts: Sequence[PromptTrace]
    origin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max_draft_tokens(self) -> int:
        """D."""
        return self.prompts[0].token_ids_ND.shape[1]

    def repeated(self, times: int) -> ExhaustiveTrace:
        """All prompts, ``times`` times over, to keep a large batch full."""
        return ExhaustiveTrace(list(self.prompts) * times, self.origin)

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all prompts."""
        return sum(prompt.num_tokens for prompt in self.prompts)

    @cached_property
    def first_place_P(self) -> np.ndarray:
        """Index of each prompt's position 0 among the T places."""
        lengths_P = np.array([prompt.num_tokens for prompt in self.prompts])
        return np.cumsum(lengths_P) - lengths_P

    @cached_property
    def num_accepted_T(self) -> np.ndarray:
        return np.concatenate([prompt.num_accepted_N for prompt in self.prompts])

    @cached_property
    def is_stop_TD(self) -> np.ndarray:
        return np.concatenate([prompt.is_stop_ND for prompt in self.prompts])

    @cached_property
    def features_3TD(self) -> np.ndarray:
        """Entropies, probabilities of the drawn tokens, and of the likeliest ones."""
        return np.stack(
            [
                np.concatenate([prompt.entropies_ND for prompt in self.prompts]),
                np.concatenate([prompt.probabilities_ND for prompt in self.prompts]),
                np.concatenate([prompt.top_probabilities_ND for prompt in self.prompts]),
            ]
        )

    @cached_property
    def estimates_ETD(self) -> np.ndarray:
        return np.concatenate([prompt.estimates_END for prompt in self.prompts], axis=1)

    @property
    def num_heads(self) -> int:
        """E."""
        return len(self.prompts[0].estimates_END)

    @cached_property
    def run_lengths_T(self) -> np.ndarray:
        """How many tokens from each place on would be accepted without a cap."""
        found = []
        for prompt in self.prompts:
            runs_N = prompt.num_accepted_N.astype(np.int64)
            for position in range(prompt.num_tokens - self.max_draft_tokens - 1, -1, -1):
                if runs_N[position] == self.max_draft_tokens:
                    runs_N[position] += runs_N[position + self.max_draft_tokens]
            found.append(runs_N)
        return np.concatenate(found)

    def write(self, path: Path) -> None:
        """Write one Arrow record per prompt; matrices are flattened to lists."""
        arrays = {
            item.name: [getattr(prompt, item.name) for prompt in self.prompts] for item in fields(PromptTrace)
        }
        schema = pa.schema(
            [(name, _arrow_type(values[0])) for name, values in arrays.items()],
            metadata={METADATA: json.dumps([self.max_draft_tokens, dict(self.origin)])},
        )
        table = pa.table(
            [
                pa.array([np.ravel(value) if np.ndim(value) else value for value in values], column.type)
                for column, values in zip(schema, arrays.values(), strict=True)
            ],
            schema=schema,
        )

        def write(file: BinaryIO) -> None:
            with pa.ipc.new_file(file, schema) as writer:
                writer.write_table(table)

        write_atomically(path, write)

    @staticmethod
    def read(path: Path) -> ExhaustiveTrace:
        """Raises :class:`UserError` for a file that is not an exhaustive trace."""
        try:
            table = pa.ipc.open_file(path.read_bytes()).read_all()
            num_depths, origin = json.loads(table.schema.metadata[METADATA])
        except (OSError, pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is not an exhaustive trace of this program: collect it again") from error
        prompts = [_prompt_trace(table.slice(row, 1), num_depths) for row in range(table.num_rows)]
        return ExhaustiveTrace(prompts, origin)


def _arrow_type(value: np.ndarray | int) -> pa.DataType:
    if not isinstance(value, np.ndarray):
        return pa.int32()
    if value.dtype == bool:
        return pa.list_(pa.bool_())
    return INTS if np.issubdtype(value.dtype, np.integer) else FLOATS


def _prompt_trace(record: pa.Table, num_depths: int) -> PromptTrace:
    values: dict[str, Any] = {"max_new_tokens": record.column("max_new_tokens")[0].as_py()}
    for name in record.column_names:
        if name not in values:
            array = record.column(name)[0].values.to_numpy(zero_copy_only=False)
            values[name] = array.reshape(-1, num_depths) if name.endswith("_ND") else array
    values["estimates_END"] = values["estimates_END"].reshape(-1, *values["token_ids_ND"].shape)
    return PromptTrace(**values)
