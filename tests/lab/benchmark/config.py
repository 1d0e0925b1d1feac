"""The options of ``python -m tests.lab.benchmark`` and ``tests.lab.profile``: those of ``jobs/benchmark.py``,
and more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specdist.config.arguments import option
from specdist.lab.benchmark.config import BenchmarkConfig
from specdist.policies import HeadKind
from specdist.policies.choice import PolicyChoice
from specdist.policies.costs import BRANCH_COUNTS
from specdist.policies.registry import HEAD_KINDS, HEAD_POLICIES
from specdist.utils.errors import UserError
from specdist.utils.rules import Refusals
from tests.lab.benchmark.choices import READERS, PolicyOptions, policy_choices

COLOCATED, SEPARATE = "colocated", "separate"
# What a draft on a rank of its own does while the target verifies.
SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"
OVERLAPS = (SYNCHRONOUS, ASYNCHRONOUS)


@dataclass(kw_only=True)
class ComparisonConfig(PolicyOptions, BenchmarkConfig):
    """Raises :class:`UserError` for values that do not go together. ``output``: of a profile, its folder."""

    _argument_group_name = "Comparison"

    group_column: str | None = option(
        None,
        help="column of --prompts that names groups; each group is timed separately, with the same number of "
        "rows",
    )
    head: str | None = option(
        None, help="folder of the trained head for specdecpp, sprinter (exact here) or goodput+head"
    )
    placements: list[str] | None = option(
        None,
        help="placement of specdist's draft: colocated = in the target's process; separate = in its own "
        "(default: colocated)",
        action="extend",
        choices=(COLOCATED, SEPARATE),
    )
    overlaps: list[str] | None = option(
        None,
        help="with a separate draft: synchronous = draft and target take turns; asynchronous = the draft "
        "keeps drafting while the target verifies (default: both)",
        action="extend",
        choices=OVERLAPS,
    )
    num_branches: int | None = option(
        None,
        help="branches that an asynchronous draft prepares per sequence for likely misses; 0 = none "
        "(default: from measured times)",
        at_least=0,
        at_most=BRANCH_COUNTS[-1],
    )
    overhead_repeats: int = option(
        20,
        help="single passes timed per case, compared with transformers; with --policies, pairs of runs that "
        "measure the cost of features and policies; 0 = none",
        at_least=0,
    )

    _refusals: ClassVar[Refusals] = (
        ("overlaps num_branches", lambda o: not o.is_separate,
         "has no effect without --placements separate: add it, or leave it out"),
        ("num_branches", lambda o: ASYNCHRONOUS not in (o.overlaps or OVERLAPS),
         "has no effect without --overlaps asynchronous: add it, or leave it out"),
        ("initial_lengths max_draft_tokens head", lambda o: o.policies is None,
         "has no effect without --policies: add them, or leave it out"),
        ("head", lambda o: o.is_separate,
         "is measured with the draft in the target's process: leave out --placements separate"),
        ("peers", lambda o: o.policies is not None, "has no effect with --policies: leave one of them out"),
        ("group_column", lambda o: o.prompts is None, "has no effect without --prompts: leave it out"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        self.placements = sorted(set(self.placements or [COLOCATED]))
        super().__post_init__()
        self.overlaps = [name for name in OVERLAPS if name in (self.overlaps or OVERLAPS)]
        self._check_policies()

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
            return
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
