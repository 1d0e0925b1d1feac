"""The options of ``jobs/tune.py``: those of the run to tune for, and what to try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from specdist.config.arguments import option
from specdist.config.generate import GenerateConfig
from specdist.config.groups import (
    BatchOptions,
    ModelOptions,
    QuantizationOptions,
    SamplingOptions,
    TrustOptions,
    values_of,
)
from specdist.config.prompts import PromptOptions
from specdist.config.speculation import NEEDS_MODEL
from specdist.utils.rules import Refusals, check_options


@dataclass(kw_only=True)
class TuneConfig(
    PromptOptions, ModelOptions, QuantizationOptions, SamplingOptions, BatchOptions, TrustOptions
):
    """Every option of ``jobs/tune.py``. Raises :class:`UserError` for a value out of its range."""

    _argument_group_name = "Tuning"
    _options_of_runs = GenerateConfig.__dataclass_fields__

    # What goes in and out
    output: str = option(help="output folder: best.yaml, pareto.png, table.txt, trace.arrow, costs.json")
    num_prompts: int = option(32, at_least=1, help="calibration prompts, spread evenly over the file")
    replay_only: bool = option(
        False, help="reuse trace.arrow and costs.json of an earlier run in --output; loads no model"
    )

    # Models
    draft: str = option(help="hub id or folder of the small model, or self:int4")
    head: list[str] | None = option(
        None, action="extend",
        help="heads trained for the draft by jobs/train_head.py, for specdecpp and sprinter (exact)",
    )  # fmt: skip

    # The run that is tuned for
    max_draft_tokens: int = option(20, at_least=1, help="maximum number of draft tokens per round to try")
    acceptance: Literal["rejection", "gumbel"] = option("rejection", help="as in jobs/generate.py")
    max_new_tokens: int = option(64, at_least=1, help="maximum length of a calibration completion, in tokens")
    max_num_seqs: int = option(8, help="batch size (running sequences) for which the policy is chosen")
    max_seq_len: int | None = option(
        None,
        help="maximum length of prompt plus completion, in tokens (default: that of the calibration prompts)",
    )
    seed: int = option(0, help="seed of the calibration completions")

    _refusals: ClassVar[Refusals] = (
        NEEDS_MODEL,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        # Refuse at once what a run would refuse.
        self.run_config("goodput", max_draft_tokens=self.max_draft_tokens)

    def run_config(self, policy: str, **options: Any) -> GenerateConfig:
        """The options of a run with this policy. Raises :class:`UserError` for what it would refuse."""
        groups = (
            PromptOptions, ModelOptions, QuantizationOptions, SamplingOptions, BatchOptions, TrustOptions
        )  # fmt: skip
        values: dict[str, Any] = {
            "policy": policy, "overlap": "synchronous", "acceptance": self.acceptance, **options
        }  # fmt: skip
        return GenerateConfig(output=self.output, **values_of(self, *groups), **values)
