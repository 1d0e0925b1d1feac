"""The options of ``jobs/collect.py``: those of the runs that the head is for, and what to collect."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from specdist.config.arguments import option
from specdist.config.generate import GenerateConfig
from specdist.config.groups import (
    BatchOptions,
    ModelOptions,
    QuantizationOptions,
    RankOptions,
    SamplingOptions,
    values_of,
)
from specdist.config.prompts import PromptOptions
from specdist.config.speculation import NEEDS_MODEL
from specdist.models.heads.info import HiddenState
from specdist.policies import HeadKind
from specdist.utils.rules import Refusals, check_options

RESPONSES_FOLDER = "responses"
TOKEN_MIXING = 0.15


@dataclass(kw_only=True)
class CollectConfig(
    PromptOptions, ModelOptions, QuantizationOptions, SamplingOptions, BatchOptions, RankOptions
):
    """Every option of ``jobs/collect.py``. Raises :class:`UserError` for a value out of its range."""

    _argument_group_name = "Collection"
    _options_of_runs = GenerateConfig.__dataclass_fields__

    # What goes in and out
    kind: HeadKind = option(
        help="acceptance: examples for --policy specdecpp; verifier: prefixes of four kinds, for --policy "
        "sprinter",
    )
    output: str = option(help="folder of the collection: shards/, stats/, manifest.json, responses/, ...")
    limit: int | None = option(None, help="use only the first N rows")
    rows_per_shard: int = option(64, help="input rows per output file; one shard at a time is held in memory")
    overwrite: bool = option(False, help="delete the results of an earlier collection in the output folder")

    # Models
    draft: str = option(help="hub id or folder of the small model, which the head will read")
    tp_size: int = option(
        1, help="tensor-parallel ranks of the target; must divide its attention heads and key/value heads"
    )

    # What is collected
    token_mixing: float | None = option(
        None, at_least=0, below=1,
        help="acceptance: share of the target's own tokens in the contexts, the rest being drafted tokens "
        f"(r, default {TOKEN_MIXING})",
    )  # fmt: skip
    hidden_dtype: Literal["float16", "float32"] = option(
        "float16", help="data type of the stored hidden states, which take most of the space"
    )
    num_draft_tokens: int = option(
        5, help="draft tokens per round while the target's responses are generated speculatively"
    )

    # Sampling, of the runs that the head is for
    max_new_tokens: int = option(256, help="maximum length of a response, in tokens")
    seed: int = option(0, help="seed of the responses and of the drafted tokens")

    # Capacity
    max_seq_len: int | None = option(
        None, help="maximum length of prompt plus response, in tokens (default: what the models allow)"
    )

    _refusals: ClassVar[Refusals] = (
        NEEDS_MODEL,
        ("token_mixing", lambda o: o.kind == "verifier",
         "has no effect with --kind verifier, which uses four fixed kinds of prefixes: leave it out"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        if self.kind == "acceptance" and self.token_mixing is None:
            self.token_mixing = TOKEN_MIXING
        # Refuse at once what a run would refuse.
        self.run_config()

    def run_config(self) -> GenerateConfig:
        """The run that generates the target's responses, speculatively but exactly."""
        groups = (
            PromptOptions, ModelOptions, QuantizationOptions, SamplingOptions, BatchOptions, RankOptions
        )  # fmt: skip
        shared: dict[str, Any] = values_of(self, *groups) | {"num_draft_tokens": self.num_draft_tokens}
        return GenerateConfig(
            output=str(Path(self.output) / RESPONSES_FOLDER),
            policy="fixed",
            overlap="synchronous",
            limit=self.limit,
            rows_per_shard=self.rows_per_shard,
            overwrite=self.overwrite,
            tp_size=self.tp_size,
            **shared,
        )

    @property
    def hidden_state(self) -> HiddenState:
        """Of each token: SPRINTER's verifiers read the one that it was drawn from, as in its experiments;
        acceptance heads the one with the token as input."""
        return "drawing" if self.kind == "verifier" else "own"

    def fingerprint(self) -> dict[str, Any]:
        """The options that decide the examples, besides those of the responses."""
        names = ["kind", "token_mixing", "hidden_dtype"]
        # Collections that do not say so have the own state.
        names += ["hidden_state"] * (self.hidden_state != "own")
        return {name: getattr(self, name) for name in names}
