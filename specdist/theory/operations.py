"""Operations and target calls per token of a run, beside how SPRINTER's authors count them.

A model's operations for a token are two per weight that it is multiplied with; attention is left out, which
depends on the context, and so are prompts. What is measured counts all tokens that were run: a target pass
runs a row's next token and all its candidates, verified or not, since else the target could not remember
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specdist.stats.shard import Stats
from specdist.theory.formulas import flops_verifying_all, flops_verifying_one
from specdist.theory.predictions import Comparison


@dataclass(frozen=True, kw_only=True)
class TokenFlops:
    """Operations of one token in each model; the head's is 0 where there is none."""

    target: float
    draft: float
    head: float = 0.0


def operations_of(stats: Stats, flops: TokenFlops, *, is_exact: bool) -> Mapping[str, Comparison]:
    """Per token of the completions, by name; nothing where nothing was drafted.

    The papers' side is a round of γ tokens, γ being the run's mean block, as if all of them were kept.
    """
    num_tokens, num_drafts = stats.num_completion_tokens, stats.num_drafts
    if not num_drafts or not num_tokens:
        return {}
    length = stats.num_block_candidates / num_drafts
    if is_exact:
        paper, paper_target = (flops_verifying_all(length, draft=draft, target=flops.target)
                               for draft in (flops.draft, 0.0))  # fmt: skip
    else:
        paper = flops_verifying_one(length, draft=flops.draft, target=flops.target, verifier=flops.head)
        paper_target = flops_verifying_one(length, draft=0.0, target=flops.target, verifier=0.0)
    num_target_tokens = stats.num_row_steps + stats.num_block_candidates
    num_draft_tokens = sum(size * count for size, count in stats.num_draft_passes_per_size.items())
    target = num_target_tokens * flops.target
    total = target + num_draft_tokens * flops.draft + stats.num_head_tokens * flops.head
    return {
        "target_calls_per_token": Comparison(1 / length, stats.num_row_steps / num_tokens),
        "target_flops_per_token": Comparison(paper_target / length, target / num_tokens),
        "flops_per_token": Comparison(paper / length, total / num_tokens),
    }
