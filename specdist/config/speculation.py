"""The options of speculation: what drafts, how far, and how it is verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from specdist.config.arguments import option
from specdist.policies.registry import AUTO, TARGET_ONLY, PolicyName
from specdist.utils.rules import Refusal, Refusals

# --draft ngram: candidates from a sequence's own tokens, without a draft model.
NGRAM = "ngram"
SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"
NGRAM_POLICIES = ("goodput", "confidence", "fixed")
# Most candidates of one block of n-grams, unless the batch has room for fewer, but not for less than these;
# and the least chance of one that is proposed.
NGRAM_BLOCK, SHORTEST_NGRAM_BLOCK = 64, 8
NGRAM_CHANCE = 0.1
# Of a job that measures or trains with a draft model.
NEEDS_MODEL: Refusal = (
    "draft", lambda o: o.draft == NGRAM,
    "is not a model, and this job needs a draft model: give its folder or hub id; jobs/generate.py takes "
    "candidates of n-grams",
)  # fmt: skip


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
    overlap: Literal["auto", "synchronous", "asynchronous"] = option(
        AUTO,
        help="synchronous = target and draft take turns; asynchronous = the draft, on a rank of its own, "
        "keeps drafting while the target verifies; auto = with such a rank every round is whichever is "
        "faster by measured times and learned acceptance, or plain decoding, in which the draft is not asked",
    )
    num_branches: int | None = option(
        None, at_least=0, note="0 prepares none",
        help="branches per sequence that asynchronous drafting prepares for likely misses; 0 = none "
        "(default: as many as pay)",
    )  # fmt: skip
    draft_window: int | None = option(
        None, at_least=1,
        help="the draft sees only a sequence's first 16 tokens and its last ones, at least this many, and "
        "has memory for no more; changes what is accepted, not the distribution (default: all tokens)",
    )  # fmt: skip
    ngram_texts: list[str] | None = option(
        None,
        help="with --draft ngram: folders of earlier runs, or Arrow or Parquet files with a text column, "
        "whose texts it proposes, too",
    )
    ngram_column: str | None = option(
        None,
        help="with --ngram_texts: the column of texts of its files (default: the first of completion, "
        "text, response, output, answer)",
    )
    ngram_rows: bool = option(
        False,
        help="with --draft ngram: propose from what other rows of this run have said, too, finished or "
        "not, other samples of a prompt among them; a relaunch begins with its finished shards",
    )
    ngram_size: int = option(
        2**22, at_least=1024,
        help="with --ngram_texts or --ngram_rows: most tokens of other texts; the oldest go first",
    )  # fmt: skip
    head: str | None = option(
        None,
        help="specdecpp, sprinter, optionally goodput: folder of a head trained for the draft by "
        "jobs/train_head.py",
    )
    verify: Literal["doubted", "all"] | None = option(
        None,
        help="sprinter: doubted = the target verifies only the last token of a block and the others are "
        "accepted unverified, which is NOT exact; all = it verifies every token, which is exact "
        "(default doubted)",
    )

    _refusals: ClassVar[Refusals] = (
        ("policy", lambda o: o.draft == NGRAM and o.policy not in (*NGRAM_POLICIES, TARGET_ONLY),
         f"decides by what a draft model says of its tokens, and --draft {NGRAM} has no model: use "
         f"--policy {', '.join(NGRAM_POLICIES[:-1])} or {NGRAM_POLICIES[-1]}, or leave it out"),
        ("draft_window head draft_placement draft_quantization draft_adapter", lambda o: o.draft == NGRAM,
         f"is for a draft model, and --draft {NGRAM} has none: leave it out"),
        ("overlap", lambda o: o.draft == NGRAM and o.overlap == ASYNCHRONOUS,
         f"is for a draft model, and --draft {NGRAM} has none: leave it out"),
        ("ngram_column", lambda o: not o.ngram_texts, "has no effect without --ngram_texts: leave it out"),
        ("ngram_texts ngram_rows", lambda o: o.draft != NGRAM,
         f"has no effect without --draft {NGRAM}: use that, or leave it out"),
    )  # fmt: skip

    @property
    def uses_draft(self) -> bool:
        return self.policy != TARGET_ONLY

    @property
    def is_exact(self) -> bool:
        """Whether the completions follow the target's own distribution; with sprinter they may not."""
        return not (self.policy == "sprinter" and self.verify == "doubted")

    def ngram_defaults(self, num_tokens_per_row: int) -> dict[str, float]:
        """Of the policy's options with n-grams, where a pass has so many tokens for each row."""
        if self.policy not in NGRAM_POLICIES or self.policy == "fixed":
            return {}
        most = max(SHORTEST_NGRAM_BLOCK, min(NGRAM_BLOCK, num_tokens_per_row - 1))
        chance = {"stop_probability": NGRAM_CHANCE} if self.policy == "confidence" else {}
        return {"max_draft_tokens": most, **chance}
