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
NGRAM_POLICIES = ("goodput", "fixed")
# The rule of a job that measures or trains with a draft model.
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
    head: str | None = option(
        None, help="specdecpp, sprinter: folder of a head trained for the draft by jobs/train_head.py"
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
         f"--policy {' or '.join(NGRAM_POLICIES)}, or leave it out"),
        ("head draft_placement draft_quantization draft_adapter", lambda o: o.draft == NGRAM,
         f"is for a draft model, and --draft {NGRAM} has none: leave it out"),
        ("overlap", lambda o: o.draft == NGRAM and o.overlap == ASYNCHRONOUS,
         f"is for a draft model, and --draft {NGRAM} has none: leave it out"),
    )  # fmt: skip

    @property
    def uses_draft(self) -> bool:
        return self.policy != TARGET_ONLY

    @property
    def is_exact(self) -> bool:
        """Whether the completions follow the target's own distribution; with sprinter they may not."""
        return not (self.policy == "sprinter" and self.verify == "doubted")
