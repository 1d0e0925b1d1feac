"""The job's options: one flat dataclass, one YAML file, and the command line, which wins."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from specdist.config.arguments import option, parse_arguments
from specdist.config.constraints import ConstraintOptions
from specdist.config.groups import (
    EXPERT_PARALLEL,
    GPU_SEQS,
    GPU_SEQS_WITH_DRAFT,
    HOST_SEQS,
    AdapterOptions,
    BatchOptions,
    CompletionOptions,
    ExpertParallel,
    GpuCostOptions,
    ModelOptions,
    QuantizationOptions,
    RankOptions,
    StorageOptions,
    bytes_of,
)
from specdist.config.names import launch_line
from specdist.config.processing import DISTRIBUTION_OPTIONS, RowOptions
from specdist.config.prompts import TurnOptions
from specdist.config.rollouts import RolloutOptions
from specdist.config.speculation import ASYNCHRONOUS, NGRAM, SpeculationOptions
from specdist.policies.registry import (
    AUTO,
    HEAD_KINDS,
    OPTION_NAMES,
    TARGET_ONLY,
    PolicyArguments,
    PolicyChoice,
    most_draft_tokens,
    needs_costs,
    resolve_policy_options,
)
from specdist.utils.errors import UserError
from specdist.utils.rules import Refusals, check_ranges, check_refusals, within, written


@dataclass(kw_only=True)
class ReplicaOptions(RankOptions):
    """A replica among others."""

    lease_timeout: float = option(
        60.0, rule=within(at_least=1, below=math.inf, text="must be a number of seconds, 1 or more"),
        help="seconds without a heartbeat after which other replicas take over a replica's shards",
    )  # fmt: skip


@dataclass(kw_only=True)
class GenerateConfig(
    TurnOptions,
    RowOptions,
    ModelOptions,
    QuantizationOptions,
    AdapterOptions,
    SpeculationOptions,
    CompletionOptions,
    ConstraintOptions,
    RolloutOptions,
    BatchOptions,
    PolicyArguments,
    ReplicaOptions,
    GpuCostOptions,
    StorageOptions,
):
    """Every option of ``jobs/generate.py``. Raises :class:`UserError` for a value out of its range."""

    _argument_group_name = "Run"
    _url_options: ClassVar[tuple[str, ...]] = ("prompts", "output")
    _main_options: ClassVar[tuple[str, ...]] = (
        "output", "preview", "limit", "tp_size", "draft_placement", "prompts", "prompt_column",
        "messages_column", "system_prompt", "target", "draft", "dtype", "device", "target_quantization",
        "policy", "overlap", "num_draft_tokens", "num_samples", "max_new_tokens", "stop", "seed",
        "temperature", "top_k", "top_p", "max_num_seqs", "max_seq_len",
    )  # fmt: skip

    output: str = option(
        "", help="folder of the run, or its URL, such as s3://bucket/run; --preview needs none"
    )
    limit: int | None = option(None, at_least=1, help="use only the first N rows")
    rows_per_shard: int | None = option(
        None,
        at_least=1,
        help="input rows per output file; a run has at most 1,000 files (default: 64, or as many as that "
        "takes)",
    )
    overwrite: bool = option(False, help="delete the results of an earlier run in the output folder")
    trace: bool = option(False, help="write a per-token acceptance trace next to the statistics")
    tp_size: int = option(
        1, at_least=1,
        help="tensor-parallel ranks of the target; must divide its attention heads and key/value heads",
    )  # fmt: skip
    expert_parallel: ExpertParallel = option(AUTO, help=EXPERT_PARALLEL)
    draft_placement: Literal["auto", "own", "shared"] = option(
        AUTO,
        help="own = the draft has a rank of its own: launch tp_size + 1; shared = it is on the target's "
        "rank 0: launch tp_size; auto = whichever the number of ranks fits",
    )
    generation_config: Literal["model", "none"] = option(
        "none",
        help="model = where they are not given, take the options of sampling, penalties and lengths from "
        "the target's generation_config.json; none = only its end tokens",
    )

    _refusals: ClassVar[Refusals] = (
        ("policy", lambda o: o.draft is None and o.policy != TARGET_ONLY,
         "needs a draft model, and none was given: name one with --draft, or use --policy none"),
        ("policy", lambda o: o.policy in HEAD_KINDS and not o.head,
         "needs a trained head, and none was given: name its folder with --head, or train one with "
         "jobs/collect.py and jobs/train_head.py"),
        ("head", lambda o: o.policy not in HEAD_KINDS and o.uses_draft_model,
         "has no effect with --policy {o.policy}: leave it out, or choose a policy that uses it "
         f"({', '.join(HEAD_KINDS)})"),
        ("verify", lambda o: o.policy != "sprinter" and o.uses_draft,
         "has no effect with --policy {o.policy}, which always verifies every token: leave it out, or "
         "choose --policy sprinter"),
        ("expert_parallel", lambda o: o.tp_size == 1 and o.expert_parallel == "always",
         "has no effect with --tp_size 1: leave it out, or raise --tp_size"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        self.draft = None if self.draft in (None, "none", "") else self.draft
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])  # from Python
        self.row_options = list(dict.fromkeys(self.row_options or []))
        self.check_lists()
        check_ranges(self)
        self.resolve_prompts()
        self._resolve_policy()
        check_refusals(self)
        if not self.output and self.preview is None:
            raise UserError("--output must be given: name the run's folder, or look first, with --preview 3")
        if self.max_num_batched_tokens < self.block_tokens:
            longest = "max_draft_tokens" if self.policy != "fixed" else "num_draft_tokens"
            lower = f" (--{longest} + 1): raise it or lower --{longest}" if self.uses_draft else ": raise it"
            raise UserError(
                f"--max_num_batched_tokens {self.max_num_batched_tokens} is less than one sequence's "
                f"verification block of {self.block_tokens} tokens{lower}"
            )

    def _resolve_policy(self) -> None:
        """Fill in the policy, its own options, and how its tokens are verified; refuse options of others."""
        if self.draft is None and self.policy in (AUTO, "fixed"):
            self.policy = TARGET_ONLY
        elif self.policy == AUTO:
            self.policy = "goodput"
        for name, value in resolve_policy_options(self.policy, self._given_policy_options()).items():
            setattr(self, name, value)
        if self.policy == "sprinter":
            self.verify = self.verify or "doubted"

    def _given_policy_options(self) -> dict[str, float]:
        values = {name: getattr(self, name) for name in OPTION_NAMES}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def uses_ngrams(self) -> bool:
        """Whether candidates come from a sequence's own tokens, without a draft model."""
        return self.uses_draft and self.draft == NGRAM

    @property
    def uses_draft_model(self) -> bool:
        return self.uses_draft and self.draft != NGRAM

    @property
    def shares_room(self) -> bool:
        """Whether blocks share the room of a pass: where block lengths depend on the batch anyway."""
        return self.policy == "goodput"

    @property
    def is_traced(self) -> bool:
        return self.uses_draft and self.trace

    @property
    def is_asynchronous(self) -> bool:
        """Whether a draft on a rank of its own works while the target does, in every round."""
        return self.uses_draft_model and self.overlap == ASYNCHRONOUS

    @property
    def chooses_rounds(self) -> bool:
        """Whether a draft on a rank of its own chooses what every round does. A lossy run takes turns: its
        tokens depend on where blocks end."""
        return self.uses_draft_model and self.overlap == AUTO and self.is_exact

    @property
    def needs_costs(self) -> bool:
        """Whether decisions of the run depend on times of passes, which are measured before it."""
        return self.is_asynchronous or self.chooses_rounds or needs_costs(self.policy)

    @property
    def policy_options(self) -> dict[str, float]:
        """The options of this run's policy, by name; none of a policy that does not draft."""
        return self._given_policy_options() if self.uses_draft else {}

    @property
    def policy_choice(self) -> PolicyChoice:
        return PolicyChoice(self.policy, self.policy_options)

    @property
    def is_coupled(self) -> bool:
        """Whether target and draft draw with the same noise, or greedily."""
        return self.is_greedy or self.acceptance == "gumbel"

    @property
    def is_greedy(self) -> bool:
        """Whether all rows are."""
        return self.temperature == 0 and not self.may_vary("temperature")

    @property
    def processes_logits(self) -> bool:
        """Whether distributions have more to them than one temperature, top-k and top-p for all rows."""
        return super().processes_logits or self.is_constrained or self.may_vary(*DISTRIBUTION_OPTIONS)

    @property
    def block_tokens(self) -> int:
        """Most tokens of one sequence in a target pass after its prompt: the candidates and one more."""
        num_rows = self.max_num_seqs or HOST_SEQS
        drawn, room = most_draft_tokens(self.policy_options), self.max_num_batched_tokens // num_rows
        forced = self.forced_room(drawn, room) if self.uses_draft_model else 0
        return drawn + forced + 1

    def fills_memory(self, device_type: str) -> bool:
        """Whether as many sequences run as the cache holds."""
        return self.max_num_seqs is None and device_type == "cuda"

    def most_seqs(self, device_type: str) -> int:
        """Sequences at a time, at most."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        if not self.fills_memory(device_type):
            return HOST_SEQS
        return GPU_SEQS_WITH_DRAFT if self.uses_draft_model else GPU_SEQS

    @property
    def num_world_ranks(self) -> int:
        """Ranks to launch: the target's, and one for a draft that need not be on one of these."""
        return self.tp_size + int(self.uses_draft_model and self.draft_placement != "shared")

    def cache_bytes(self) -> int | None:
        """``--cache_memory`` in bytes; None where the device decides."""
        return bytes_of(self.cache_memory)

    def warnings(self) -> list[str]:
        """Options that were set and have no effect in this run, one sentence each."""
        found = []
        if self.draft is not None and not self.uses_draft:
            found.append(f"--draft {self.draft} has no effect with --policy none: the draft is not loaded")
        if not self.uses_draft:
            given = {**self._given_policy_options(), "head": self.head, "verify": self.verify}
            given |= {
                "overlap": self.overlap if self.overlap == ASYNCHRONOUS else None,
                "trace": self.trace or None,
            }
            given["draft_placement"] = None if self.draft_placement == AUTO else self.draft_placement
            given |= {"draft_quantization": self.draft_quantization, "draft_adapter": self.draft_adapter}
            found += [
                f"{written(name, value)} has no effect without a draft, or with --policy none"
                for name, value in given.items()
                if value is not None
            ]
        if self.num_branches is not None and not (self.is_asynchronous or self.chooses_rounds):
            found.append(f"--num_branches {self.num_branches} has no effect without a draft that works ahead")
        return [*found, *_identical_draws(self)] if self.is_greedy else found

    def check_world(self, world_size: int) -> None:
        """Refuse a number of ranks other than the target's, and one more for a draft of its own."""
        fitting = {self.tp_size, self.num_world_ranks}
        if self.uses_draft and self.draft_placement == "own":
            fitting = {self.num_world_ranks}
        launched = "1 rank was" if world_size == 1 else f"{world_size} ranks were"
        if world_size not in fitting:
            others = "" if len(fitting) == 1 else (
                ", or 1 to hold both models in one process" if self.tp_size == 1
                else f", or {self.tp_size} to hold the draft on the target's rank 0"
            )  # fmt: skip
            placement = "" if self.draft_placement == AUTO else f" --draft_placement {self.draft_placement}"
            draft_ranks = (
                "1 rank for the draft" if self.num_world_ranks > self.tp_size else "none for a draft"
            )
            raise UserError(
                f"{launched} launched, but --tp_size {self.tp_size}{placement} needs "
                f"{self.num_world_ranks}: {self.tp_size} for the target and {draft_ranks}. "
                f"Launch with --num_processes {self.num_world_ranks}{others}: {self._launch_line()}"
            )
        if self.is_asynchronous and world_size == self.tp_size:
            raise UserError(
                f"--overlap asynchronous needs a rank for the draft, but {launched} launched: launch with "
                f"--num_processes {self.tp_size + 1}, or use --overlap synchronous: {self._launch_line()}"
            )

    def _launch_line(self) -> str:
        """With the options of this process, if it was started with some."""
        is_job = Path(sys.argv[0]).name == "generate.py"
        return launch_line(self.num_world_ranks, sys.argv[1:] if is_job else ["..."], device=self.device)


def _identical_draws(config: GenerateConfig) -> list[str]:
    """What has no effect where all rows are greedy."""
    found = []
    if config.top_k or config.top_p < 1 or config.min_p:
        found.append(
            "--top_k, --top_p and --min_p have no effect with --temperature 0, which always takes the "
            "likeliest token"
        )
    if config.rollout is not None and config.max_attempts > 1:
        found.append(
            f"--max_attempts {config.max_attempts} with --temperature 0 gives identical attempts: use "
            "--temperature 1, say, or --max_attempts 1"
        )
    if config.num_samples > 1:
        found.append(f"--num_samples {config.num_samples} with --temperature 0 gives identical completions")
    return found


def parse_generate_config(arguments: Sequence[str] | None = None) -> GenerateConfig:
    """The options of ``jobs/generate.py``."""
    return parse_arguments(GenerateConfig, arguments)
