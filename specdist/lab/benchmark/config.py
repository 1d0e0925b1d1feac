"""The options of ``jobs/benchmark.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from specdist.config.arguments import option
from specdist.config.generate import GenerateConfig
from specdist.config.groups import (
    SELF,
    ModelOptions,
    PromptOptions,
    QuantizationOptions,
    SamplingOptions,
    TrustOptions,
    values_of,
)
from specdist.config.removed import OF_BENCHMARK, Removed
from specdist.config.speculation import require_model
from specdist.lab.benchmark.choices import INITIAL_LENGTHS, READERS, policy_choices
from specdist.lab.synthetic.config import check_dial
from specdist.lab.synthetic.shapes import SHAPES
from specdist.policies import HeadKind
from specdist.policies.choice import PolicyChoice
from specdist.policies.costs import BRANCH_COUNTS
from specdist.policies.registry import HEAD_KINDS, HEAD_POLICIES
from specdist.utils.errors import UserError

DEFAULT_BATCH_SIZES = (1, 8, 32)
COLOCATED, SEPARATE = "colocated", "separate"
# What a draft on a rank of its own does while the target verifies.
IN_TURNS, AHEAD = "none", "ahead"
OVERLAPS = (IN_TURNS, AHEAD)


@dataclass(kw_only=True)
class BenchmarkConfig(PromptOptions, ModelOptions, QuantizationOptions, SamplingOptions, TrustOptions):
    """Every option of ``jobs/benchmark.py``. Raises :class:`UserError` for values that do not go together."""

    _argument_group_name = "Benchmark"
    _removed_options: ClassVar[dict[str, Removed]] = OF_BENCHMARK

    output: str | None = option(None, help="JSON file for the result")
    profile: str | None = option(
        None,
        help="instead of a comparison: folder for traces (torch.profiler), time shares by kind of work, and "
        "lower bounds of pass times",
    )

    # Models: a trained pair, or a synthetic one
    target: str | None = option(None, help="hub id or folder of the large model")  # type: ignore[assignment]
    draft: str | None = option(None, help="hub id or folder of the small model, or self:int4")
    synthetic: str | None = option(None, help=f"use a random pair of this shape instead: {', '.join(SHAPES)}")
    acceptance: float | None = option(
        None, help="greedy acceptance rate of the random pair, above 0 and at most 1"
    )
    epsilon: float | None = option(
        None, help="instead of the acceptance rate: weight of the random target's later layers"
    )
    synthetic_folder: str = option("runs/synthetic", help="folder in which random pairs are kept")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", help="auto = the checkpoint's; float32 for a random pair"
    )

    # Work
    prompts: str | None = option(  # type: ignore[assignment]
        None, help="Arrow, Parquet, JSONL or CSV; without it, a random pair gets random token ids"
    )
    group_column: str | None = option(
        None,
        help="column of --prompts that names groups; each group is timed separately, with the same number of "
        "rows",
    )
    num_prompts: int = option(32, help="number of rows per measurement, over all groups")
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
    policies: list[str] | None = option(
        None,
        help="instead of transformers, compare these length policies with the target alone: all, or names, "
        "optionally with options: svip:stop_root_entropy=0.5",
        action="extend",
    )
    head: str | None = option(
        None, help="folder of the trained head for specdecpp, sprinter (exact here) or goodput+head"
    )
    initial_lengths: list[int] | None = option(
        None,
        help="draft tokens in the first round, for policies that have --num_draft_tokens (default: "
        f"{' '.join(map(str, INITIAL_LENGTHS))})",
        action="extend",
    )
    max_draft_tokens: int | None = option(
        None,
        help="maximum draft tokens per round, not for fixed (default: 20, or more for a longer first round)",
    )
    batch_sizes: list[int] | None = option(None, help="batch sizes (default: 1 8 32)", action="extend")
    num_draft_tokens: int = option(
        5,
        help="draft tokens per round, for both systems; with --policies, the length that the tables show "
        "first",
    )
    placements: list[str] | None = option(
        None,
        help="placement of specdist's draft: colocated = in the target's process; separate = in its own "
        "(default: colocated; separate for a profile)",
        action="extend",
        choices=(COLOCATED, SEPARATE),
    )
    overlaps: list[str] | None = option(
        None,
        help="with a separate draft: none = draft and target take turns; ahead = the draft keeps drafting "
        "while the target verifies (default: both)",
        action="extend",
        choices=OVERLAPS,
    )
    num_branches: int | None = option(
        None,
        help="branches that a draft ahead prepares per sequence for likely misses; 0 = none (default: from "
        "measured times)",
    )
    peers: list[str] | None = option(
        None,
        help="other engines to measure in the same run instead of transformers: vllm, which needs an "
        "environment that `bash jobs/benchmarks/peers.sh` makes (greedy tokens are compared, too)",
        action="extend",
        choices=("vllm",),
    )
    peers_folder: str = option("runs/peers", help="folder in which jobs/benchmarks/peers.sh made it")
    repeats: int = option(3, help="number of measurements of every method, taken in turn")
    overhead_repeats: int = option(
        20,
        help="single passes timed per case, compared with transformers; with --policies, pairs of runs that "
        "measure the cost of features and policies; 0 = none",
    )

    # The other mode: results into the README
    update_readme: str | None = option(
        None, help="write the tables of --results into this file, without measuring"
    )
    results: list[str] | None = option(None, help="result files for --update_readme", action="extend")
    brief: bool = option(False, help="with --update_readme: only the first table of each result")

    def __post_init__(self) -> None:
        require_model(self.draft)
        if (self.update_readme is None) != (not self.results):
            raise UserError("--update_readme FILE and --results FILE ... go together: give both or neither")
        if self.update_readme is not None:
            return
        if self.brief:
            raise UserError("--brief has no effect without --update_readme: leave it out")
        if self.output is not None and self.profile is not None:
            raise UserError(
                f"--output {self.output} asks for a comparison and --profile {self.profile} for a profile: "
                "leave one of them out"
            )
        if self.output is None and self.profile is None:
            raise UserError(
                "--output is missing: name the JSON file of the result (or a folder to --profile)"
            )
        self.batch_sizes = sorted(set(self.batch_sizes or DEFAULT_BATCH_SIZES))
        for name in ("num_prompts", "max_prompt_tokens", "num_draft_tokens", "repeats"):
            self._require(name, getattr(self, name) >= 1, "must be at least 1")
        self._require("batch_sizes", self.batch_sizes[0] >= 1, "must be at least 1")
        self._require("overhead_repeats", self.overhead_repeats >= 0, "must not be negative")
        self._require("seed", 0 <= self.seed < 2**31, "must be in [0, 2**31)")
        self._check_placements()
        self._check_peers()
        self._check_policies()
        self._check_pair()
        self.check_quantization(self.draft)
        self._check_prompts()
        self._check_sampling()

    @property
    def is_colocated(self) -> bool:
        return COLOCATED in (self.placements or [])

    @property
    def is_separate(self) -> bool:
        return SEPARATE in (self.placements or [])

    @property
    def choices(self) -> list[PolicyChoice]:
        """The settings of ``--policies``, each once. Raises :class:`UserError` as the main job does."""
        if self.policies is None:
            return []
        return policy_choices(self.policies, self.initial_lengths, self.max_draft_tokens)

    @property
    def longest_draft(self) -> int:
        """Most draft tokens of a round of any method."""
        return max([self.num_draft_tokens, *(choice.max_draft_tokens for choice in self.choices)])

    @property
    def head_kinds(self) -> set[HeadKind]:
        """Kinds of heads that the policies of ``--policies`` read."""
        return {HEAD_KINDS[choice.policy] for choice in self._head_choices}

    @property
    def _head_choices(self) -> list[PolicyChoice]:
        return [choice for choice in self.choices if choice.policy in HEAD_POLICIES or choice.reads_head]

    def _check_policies(self) -> None:
        if self.policies is None:
            for name in ("initial_lengths", "max_draft_tokens", "head"):
                if getattr(self, name) is not None:
                    raise UserError(f"--{name} has no effect without --policies: add them, or leave it out")
            return
        if self.profile is not None:
            raise UserError("--policies has no effect with --profile: leave one of them out")
        if self.initial_lengths is not None:
            self.initial_lengths = sorted(set(self.initial_lengths))
            self._require("initial_lengths", self.initial_lengths[0] >= 1, "must be at least 1")
        most = self.max_draft_tokens
        self._require("max_draft_tokens", most is None or most >= 1, "must be at least 1")
        # Also refuses what the main job would refuse.
        names = sorted({choice.policy for choice in self._head_choices})
        if self.head is None and names:
            raise UserError(
                f"--policies {names[0]} needs a trained head, and none was given: name its folder with --head"
            )
        if self.head is not None and len(self.head_kinds) != 1:
            raise UserError(
                f"--head {self.head} is for a policy among {', '.join(READERS)}, but --policies has "
                f"{' and '.join(names) or 'none of them'}: name policies that use a head of its kind"
            )
        if self.head is not None and self.is_separate:
            raise UserError(
                f"--head {self.head} is measured with the draft in the target's process: leave out "
                "--placements separate"
            )

    def _check_peers(self) -> None:
        if self.peers and (self.policies is not None or self.profile is not None):
            raise UserError("--peers has no effect with --policies or --profile: leave one of them out")
        is_self = self.draft is not None and self.draft.startswith(SELF)
        if self.peers and (self.target_quantization or self.draft_quantization or is_self):
            raise UserError(
                "--peers would run the models as they are stored, beside quantised ones: leave it out, or "
                "--target_quantization, --draft_quantization and --draft self:..."
            )

    def _check_placements(self) -> None:
        self.placements = sorted(set(self.placements or [SEPARATE if self.profile else COLOCATED]))
        if self.overlaps is not None and not self.is_separate:
            raise UserError(
                f"--overlaps {' '.join(self.overlaps)} has no effect without --placements separate: add it, "
                "or leave it out"
            )
        self.overlaps = [name for name in OVERLAPS if name in (self.overlaps or OVERLAPS)]
        if self.num_branches is None:
            return
        most = BRANCH_COUNTS[-1]
        self._require("num_branches", 0 <= self.num_branches <= most, f"must be in 0 .. {most}")
        if not self.is_separate or AHEAD not in self.overlaps:
            raise UserError(
                f"--num_branches {self.num_branches} has no effect without --placements separate and "
                "--overlaps ahead: add them, or leave it out"
            )

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

    def _check_prompts(self) -> None:
        if self.prompts is None and (self.prompt_column or self.messages_column or self.split_special_tokens):
            raise UserError(
                "--prompt_column, --messages_column and --split_special_tokens describe --prompts, which was "
                "not given: add it"
            )
        if self.group_column is not None and (self.prompts is None or self.profile is not None):
            raise UserError(
                f"--group_column {self.group_column} has no effect without --prompts, or with --profile: "
                "leave it out"
            )

    def _check_sampling(self) -> None:
        """The main job's checks of prompts and sampling; what it warns of is refused."""
        shared = values_of(self, PromptOptions, ModelOptions, SamplingOptions)
        job = GenerateConfig(output="", **shared)
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
