"""The options of ``jobs/benchmark.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from specdist.config.arguments import option
from specdist.config.generate import GenerateConfig
from specdist.config.groups import (
    OWN_KIND,
    SELF,
    ModelOptions,
    QuantizationOptions,
    SamplingOptions,
    TrustOptions,
    values_of,
)
from specdist.config.prompts import PromptOptions
from specdist.config.removed import OF_BENCHMARK, Removed
from specdist.config.speculation import NEEDS_MODEL
from specdist.lab.synthetic.config import ACCEPTANCE, EPSILON, SHAPE, SHAPES, check_dial
from specdist.utils.errors import UserError
from specdist.utils.rules import Refusals, check_options

DEFAULT_BATCH_SIZES = (1, 8, 32)


@dataclass(kw_only=True)
class BenchmarkConfig(PromptOptions, ModelOptions, QuantizationOptions, SamplingOptions, TrustOptions):
    """Every option of ``jobs/benchmark.py``. Raises :class:`UserError` for values that do not go together."""

    _argument_group_name = "Benchmark"
    _removed_options: ClassVar[Mapping[str, Removed]] = OF_BENCHMARK

    output: str = option(help="JSON file for the result")

    # Models: a trained pair, or a synthetic one
    target: str | None = option(None, help="hub id or folder of the large model")  # type: ignore[assignment]
    draft: str | None = option(None, help="hub id or folder of the small model, or self:int4", rule=OWN_KIND)
    synthetic: str | None = option(
        None, help=f"use a random pair of this shape instead: {', '.join(SHAPES)}", rule=SHAPE
    )
    acceptance: float | None = option(
        None, help="greedy acceptance rate of the random pair, above 0 and at most 1", rule=ACCEPTANCE
    )
    epsilon: float | None = option(
        None, help="instead of the acceptance rate: weight of the random target's later layers", rule=EPSILON
    )
    synthetic_folder: str = option("runs/synthetic", help="folder in which random pairs are kept")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", help="auto = the checkpoint's; float32 for a random pair"
    )

    # Work
    prompts: str | None = option(  # type: ignore[assignment]
        None, help="Arrow, Parquet, JSONL or CSV; without it, a random pair gets random token ids"
    )
    num_prompts: int = option(32, help="number of rows per measurement")
    max_prompt_tokens: int = option(
        64, help="maximum length of a random prompt; the minimum is a quarter of it"
    )
    max_new_tokens: int = option(
        64, help="maximum length of a completion; each row's limit is between a quarter of it and all of it"
    )
    temperature: float = option(0.0, help="0 = greedy")
    acceptance_rule: Literal["rejection", "gumbel"] = option(
        "rejection", help="acceptance rule of specdist; the two are equivalent at temperature 0"
    )
    seed: int = option(0, help="seed of the random pair, prompts, length limits and samples")

    # Methods and measurement
    batch_sizes: list[int] | None = option(None, help="batch sizes (default: 1 8 32)", action="extend")
    num_draft_tokens: int = option(5, help="draft tokens per round, for all systems")
    peers: list[str] | None = option(
        None,
        help="other engines to measure in the same run instead of transformers: vllm, which needs an "
        "environment that `bash jobs/benchmarks/peers.sh` makes (greedy tokens are compared, too)",
        action="extend",
        choices=("vllm",),
    )
    peers_folder: str = option("runs/peers", help="folder in which jobs/benchmarks/peers.sh made it")
    repeats: int = option(3, help="number of measurements of every method, taken in turn")

    _refusals: ClassVar[Refusals] = (NEEDS_MODEL,)

    def __post_init__(self) -> None:
        self.batch_sizes = sorted(set(self.batch_sizes or DEFAULT_BATCH_SIZES))
        for name in ("num_prompts", "max_prompt_tokens", "num_draft_tokens", "repeats"):
            self._require(name, getattr(self, name) >= 1, "must be at least 1")
        self._require("batch_sizes", self.batch_sizes[0] >= 1, "must be at least 1")
        self._require("seed", 0 <= self.seed < 2**31, "must be in [0, 2**31)")
        is_self = self.draft is not None and self.draft.startswith(SELF)
        if self.peers and (self.target_quantization or self.draft_quantization or is_self):
            raise UserError(
                "--peers would run the models as they are stored, beside quantised ones: leave it out, or "
                "--target_quantization, --draft_quantization and --draft self:..."
            )
        self._check_pair()
        check_options(self)
        if self.prompts is None and (self.prompt_column or self.messages_column or self.split_special_tokens):
            raise UserError(
                "--prompt_column, --messages_column and --split_special_tokens describe --prompts, which was "
                "not given: add it"
            )
        self._check_sampling()

    @property
    def longest_draft(self) -> int:
        """Most draft tokens of a round of any method."""
        return self.num_draft_tokens

    def _check_pair(self) -> None:
        if self.synthetic is not None:
            if self.target is not None or self.draft is not None:
                raise UserError(
                    f"--synthetic {self.synthetic} builds its own pair: leave out --target and --draft, or "
                    "--synthetic"
                )
            check_dial("synthetic", self.synthetic, acceptance=self.acceptance, epsilon=self.epsilon)
            return
        if self.target is None or self.draft is None:
            raise UserError(
                "no models given: use --target and --draft for a trained pair, or --synthetic for a random "
                "one"
            )
        if self.acceptance is not None or self.epsilon is not None:
            raise UserError(
                "--acceptance and --epsilon shape a random pair: add --synthetic or leave them out"
            )
        if self.prompts is None:
            raise UserError("--prompts is missing: the acceptance rate of a trained pair depends on the text")

    def _check_sampling(self) -> None:
        """The main job's checks of prompts and sampling; what it warns of is refused."""
        shared = values_of(self, PromptOptions, ModelOptions, SamplingOptions)
        job = GenerateConfig(**{**shared, "output": ""})
        for warning in job.warnings():
            raise UserError(f"{warning}: add --temperature 1, or leave them out")
        if self.prompts is not None:
            self.prompt_column = job.prompt_column
        if self.acceptance_rule == "gumbel" and self.temperature == 0:
            raise UserError(
                "--acceptance_rule gumbel has no effect with --temperature 0: add --temperature 1, or leave "
                "the rule out"
            )

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise UserError(f"--{name} {getattr(self, name)!r} {rule}")
