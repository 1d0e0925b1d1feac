"""The options of speculation: what drafts, how far, and how it is verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specdist.config.arguments import option
from specdist.policies.registry import AUTO, TARGET_ONLY, PolicyName
from specdist.utils.errors import UserError

# --draft memory: candidates from a sequence's own tokens, without a draft model.
MEMORY = "memory"
MEMORY_POLICIES = ("goodput", "confidence", "fixed")
# Most candidates of one block from memory, unless the batch has room for fewer, but not for less than these;
# and the least chance of one that is proposed.
MEMORY_BLOCK, SHORTEST_MEMORY_BLOCK = 64, 8
MEMORY_CHANCE = 0.1
SMALLEST_MEMORY = 1024


@dataclass(kw_only=True)
class SpeculationOptions:
    """What the draft does, and how it is verified."""

    _argument_group_name = "Speculation"

    policy: PolicyName = option(
        AUTO,
        help="how many tokens to draft per round; auto = goodput, which learns what pays; none = target only",
    )
    acceptance: Literal["rejection", "gumbel"] = option(
        "rejection",
        help="rejection = highest acceptance; gumbel = the tokens that the target alone would sample with "
        "this seed, whatever the draft",
    )
    overlap: Literal["auto", "none", "ahead"] = option(
        AUTO,
        help="none = target and draft take turns; ahead = the draft, on a rank of its own, keeps drafting "
        "while the target verifies; auto = with such a rank every round is whichever is faster by measured "
        "times and learned acceptance, or plain decoding, in which the draft is not asked",
    )
    num_branches: int | None = option(
        None,
        help="branches per sequence that a draft working ahead prepares for likely misses; 0 = none "
        "(default: as many as pay)",
    )
    draft_window: int | None = option(
        None,
        help="the draft sees only a sequence's first 16 tokens and its last ones, at least this many, and "
        "has memory for no more; changes what is accepted, not the distribution (default: all tokens)",
    )
    draft_memory: list[str] | None = option(
        None,
        help="with --draft memory: folders of earlier runs, or Arrow or Parquet files with a text column, "
        "whose texts it proposes, too",
    )
    memory_column: str | None = option(
        None,
        help="with --draft_memory: the column of texts of its files (default: the first of completion, text, "
        "response, output, answer)",
    )
    memory_rows: bool = option(
        False,
        help="with --draft memory: propose from what other rows of this run have said, too, finished or not, "
        "other samples of a prompt among them; a relaunch begins with its finished shards",
    )
    memory_size: int = option(
        2**22, help="with --draft_memory or --memory_rows: most tokens of other texts; the oldest go first"
    )
    head: str | None = option(
        None,
        help="specdecpp, sprinter, optionally goodput: folder of a head trained for the draft by "
        "jobs/train_head.py",
    )
    verify: Literal["doubted", "all"] | None = option(
        None,
        help="sprinter: doubted = the target verifies only the last token of a block and the others are "
        "accepted unverified, which is NOT exact; all = it verifies every token, which is exact (default "
        "doubted)",
    )

    @property
    def uses_draft(self) -> bool:
        return self.policy != TARGET_ONLY

    @property
    def is_exact(self) -> bool:
        """Whether the completions follow the target's own distribution; with sprinter they may not."""
        return not (self.policy == "sprinter" and self.verify == "doubted")

    def check_memory(self, *, is_coupled: bool, **of_model: str | None) -> None:
        """Of ``--draft memory``: choose the policy, and refuse what needs a draft model. ``is_coupled``: no
        token depends on a block's length. ``of_model``: other options of a draft model that were given.
        Raises :class:`UserError`."""
        if self.policy == AUTO:
            # By the costs of passes and the whole batch, unless a seed is to fix the tokens.
            self.policy = "goodput" if is_coupled or self.memory_rows else "confidence"
        if self.policy not in (*MEMORY_POLICIES, TARGET_ONLY):
            raise UserError(
                f"--policy {self.policy} decides by what a draft model says of its tokens, and --draft "
                f"{MEMORY} has no model: use --policy {', '.join(MEMORY_POLICIES[:-1])} or "
                f"{MEMORY_POLICIES[-1]}, or leave it out"
            )
        given = {"overlap": "ahead" if self.overlap == "ahead" else None, **of_model}
        given["draft_window"] = None if self.draft_window is None else str(self.draft_window)
        for name, value in given.items():
            if value is not None:
                raise UserError(
                    f"--{name} {value} is for a draft model, and --draft {MEMORY} has none: leave it out"
                )

    def check_other_texts(self, draft: str | None) -> None:
        """Of what memory looks through besides a sequence's own text. Raises :class:`UserError`."""
        if self.memory_size < SMALLEST_MEMORY:
            raise UserError(f"--memory_size {self.memory_size} must be at least {SMALLEST_MEMORY} tokens")
        if self.memory_column is not None and not self.draft_memory:
            raise UserError(
                f"--memory_column {self.memory_column} has no effect without --draft_memory: leave it out"
            )
        for name, value in (("draft_memory", self.draft_memory), ("memory_rows", self.memory_rows)):
            if value and draft != MEMORY:
                raise UserError(f"--{name} has no effect without --draft {MEMORY}: use that, or leave it out")

    def memory_defaults(self, num_tokens_per_row: int) -> dict[str, float]:
        """Of the policy's options with memory, where a pass has so many tokens for each row."""
        found: dict[str, float] = {"max_draft_tokens": memory_block(num_tokens_per_row)}
        if self.policy == "confidence":
            found["stop_probability"] = MEMORY_CHANCE
        return {} if self.policy == "fixed" else found


def memory_block(num_tokens_per_row: int) -> int:
    """Most candidates of a block from memory, where a pass has so many tokens for each row."""
    return max(SHORTEST_MEMORY_BLOCK, min(MEMORY_BLOCK, num_tokens_per_row - 1))


def require_model(draft: str | None) -> None:
    """Of a job that measures or trains with a draft model. Raises :class:`UserError`."""
    if draft == MEMORY:
        raise UserError(
            f"--draft {MEMORY} is not a model, and this job needs a draft model: give its folder or hub id; "
            "jobs/generate.py takes candidates from memory"
        )
