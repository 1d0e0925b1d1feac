"""The options of ``jobs/benchmark.py``."""

from __future__ import annotations

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
from specdist.config.speculation import NEEDS_MODEL
from specdist.lab.benchmark.peers.environments import PEERS
from specdist.lab.synthetic.config import ACCEPTANCE, EPSILON, PAIR_SEED, SHAPE, SHAPES, check_dial
from specdist.utils.errors import UserError
from specdist.utils.rules import Refusals, check_options

DEFAULT_BATCH_SIZES = (1, 8, 32)


@dataclass(kw_only=True)
class BenchmarkConfig(PromptOptions, ModelOptions, QuantizationOptions, SamplingOptions, TrustOptions):
    """Every option of ``jobs/benchmark.py``. Raises :class:`UserError` for values that do not go together."""

    _argument_group_name = "Benchmark"

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
    num_prompts: int = option(32, help="number of rows per measurement", at_least=1)
    max_prompt_tokens: int = option(
        64, help="maximum length of a random prompt; the minimum is a quarter of it", at_least=1
    )
    max_new_tokens: int = option(
        64, help="maximum length of a completion; each row's limit is between a quarter of it and all of it"
    )
    temperature: float = option(0.0, help="0 = greedy")
    acceptance_rule: Literal["rejection", "gumbel"] = option(
        "rejection", help="acceptance rule of specdist; the two are equivalent at temperature 0"
    )
    seed: int = option(0, help="seed of the random pair, prompts, length limits and samples", rule=PAIR_SEED)

    # Methods and measurement
    batch_sizes: list[int] | None = option(
        None, help="batch sizes (default: 1 8 32)", action="extend", at_least=1
    )
    num_draft_tokens: int = option(5, help="draft tokens per round, for all systems", at_least=1)
    peers: list[str] | None = option(
        None,
        help="other engines to measure in the same run instead of transformers, on the CPU: "
        f"{', '.join(PEERS)}; each is installed once (greedy tokens are compared, too)",
        action="extend",
        choices=tuple(PEERS),
    )
    peers_folder: str = option("runs/peers", help="folder of their environments")
    repeats: int = option(3, help="number of measurements of every method, taken in turn", at_least=1)

    _refusals: ClassVar[Refusals] = (
        NEEDS_MODEL,
        ("peers", lambda o: o.target_quantization or o.draft_quantization or o.cache_dtype
         or (o.draft or "").startswith(SELF),
         "would run the models as they are stored, beside quantised ones: leave it out, or "
         "--target_quantization, --draft_quantization, --cache_dtype and --draft self:..."),
        ("target draft", lambda o: o.synthetic,
         "is of another pair than --synthetic {o.synthetic}: leave out --target and --draft, or --synthetic"),
        ("acceptance epsilon", lambda o: o.target and o.draft,
         "shapes a random pair: add --synthetic instead of --target and --draft, or leave it out"),
        ("prompt_column messages_column split_special_tokens", lambda o: o.prompts is None,
         "describes --prompts, which was not given: add it"),
        ("acceptance_rule", lambda o: o.temperature == 0,
         "has no effect with --temperature 0: add --temperature 1, or leave the rule out"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        self.batch_sizes = sorted(set(self.batch_sizes or DEFAULT_BATCH_SIZES))
        self.peers = list(dict.fromkeys(self.peers or ())) or None
        check_options(self)
        self._check_pair()
        self._check_sampling()

    @property
    def longest_draft(self) -> int:
        """Most draft tokens of a round of any method."""
        return self.num_draft_tokens

    def _check_pair(self) -> None:
        if self.synthetic is not None:
            check_dial("synthetic", self.synthetic, acceptance=self.acceptance, epsilon=self.epsilon)
            return
        if self.target is None or self.draft is None:
            raise UserError(
                "no models given: use --target and --draft for a trained pair, or --synthetic for a random "
                "one"
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
