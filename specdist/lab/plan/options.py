"""The options of ``jobs/plan.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from specdist.config.arguments import option
from specdist.config.groups import (
    EXPERT_PARALLEL,
    MTP,
    DrawingOptions,
    ExpertParallel,
    GpuCostOptions,
    QuantizationOptions,
    TrustOptions,
)
from specdist.config.speculation import NGRAM
from specdist.lab.plan.hardware import GPUS, named_gpu
from specdist.lab.plan.shapes import EAGLE3, NAMED
from specdist.utils.errors import UserError
from specdist.utils.rules import Refusals, check_options, within


@dataclass(kw_only=True)
class PlanConfig(DrawingOptions, QuantizationOptions, GpuCostOptions, TrustOptions):
    """Every option of ``jobs/plan.py``. Raises :class:`UserError` for values that do not go together."""

    _argument_group_name = "Planning"

    # Models: configurations are enough
    target: str = option(help=f"hub id or folder of the large model, or one of {', '.join(NAMED)}")
    draft: str | None = option(
        None,
        help=f"the same of the small model; {EAGLE3} = such a draft of the target's shape; {MTP} = the "
        f"target's own head; {NGRAM} = lookup, without a model; none = target only",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", help="auto = the configuration's; bfloat16 for a shape"
    )

    # Hardware
    gpu: str = option(help=f"one of {', '.join(GPUS)}")
    calibration: str | None = option(
        None,
        help="calibration.json of a first day on such a GPU (python -m tests.gpu.first_day): what was "
        "measured there, instead of published and assumed figures",
    )
    gpus_per_node: int = option(1, help="GPUs of a node; a target is on one node", at_least=1)
    nodes: int = option(1, help="nodes", at_least=1)

    # Work
    prompt_tokens: int = option(512, help="tokens per prompt", at_least=1)
    output_tokens: int = option(256, help="tokens per completion", at_least=1)
    num_prompts: int = option(10_000, help="number of completions to generate", at_least=1)
    acceptance: float | None = option(
        None, help="probability that a drafted token is accepted, 0 to 1", rule=within(at_least=0, at_most=1)
    )
    expert_parallel: ExpertParallel = option("auto", help=EXPERT_PARALLEL)
    caught: float = option(
        0.5,
        help="share of the misses that branches catch, from 0 to below 1",
        rule=within(at_least=0, below=1, note="branches never catch every miss"),
    )
    max_num_seqs: int | None = option(
        None, help="maximum number of running sequences (default: what memory allows)", at_least=1
    )

    # What to do
    output_config: str | None = option(None, help="write the recommendation as a YAML file for generate.py")

    _refusals: ClassVar[Refusals] = (
        ("draft_quantization", lambda o: o.draft == NGRAM,
         f"is for a draft model, and --draft {NGRAM} has none: leave it out"),
        ("acceptance", lambda o: o.draft is None,
         "has no effect without --draft: add it or leave this option out"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        self.draft = None if self.draft in (None, "none", "") else self.draft
        check_options(self)
        named_gpu(self.gpu)
        if self.draft is not None and self.acceptance is None:
            raise UserError(
                "--acceptance is missing: give the share of drafted tokens that you expect the target to "
                "accept (0.6 to 0.8 for a draft of the target's family; a run reports its own), or leave out "
                "--draft"
            )
