"""Heads whose thresholds are tuned.

On-path tokens are those up to the first rejected one; the target does not verify the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdist.lab.replay import ExhaustiveTrace
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.heads.drafts import identify_draft
from specdist.models.heads.head import TokenHead, load_head
from specdist.models.heads.info import POLICY_OF_KIND, HeadInfo, read_head_info
from specdist.models.heads.roc import roc_curve


@dataclass(frozen=True)
class HeadChoice:
    """A head that ``--head`` names; ``index`` is its place in the trace."""

    path: str
    index: int
    info: HeadInfo

    @property
    def policy(self) -> str:
        return POLICY_OF_KIND[self.info.kind]

    @property
    def rejected_weight(self) -> float | None:
        """Its w_rej in training; None for a verifier."""
        return self.info.options.get("rejected_weight")


def read_heads(paths: Sequence[str]) -> list[HeadChoice]:
    """Read the heads' descriptions. Raises :class:`UserError` for a folder without a head."""
    return [HeadChoice(path, index, read_head_info(path)) for index, path in enumerate(paths)]


def load_heads(heads: Sequence[HeadChoice], draft: Checkpoint) -> list[TokenHead]:
    """Load heads to the CPU, in single precision. Raises :class:`UserError` if one does not fit the draft."""
    identity = identify_draft(draft) if heads else None
    return [load_head(head.path, kind=head.info.kind, draft=identity) for head in heads if identity]


def acceptance_auc(trace: ExhaustiveTrace, heads: Sequence[HeadChoice]) -> dict[str, float | None]:
    """AUC of accepted against rejected on-path tokens, for the draft's own features and each head, by path.
    The last token of each branch, which no head has read, is left out for all."""
    labels_TD = np.concatenate([prompt.acceptance_ND for prompt in trace.prompts])
    known_TD = ~np.isnan(labels_TD)
    for estimates_TD in trace.estimates_ETD:
        known_TD &= ~np.isnan(estimates_TD)
    if not known_TD.any():
        return {}
    entropies_TD, probabilities_TD, top_TD = trace.features_3TD
    scores = {"entropy": -entropies_TD, "top_probability": top_TD, "probability": probabilities_TD}
    scores |= {head.path: trace.estimates_ETD[head.index] for head in heads}
    return {name: roc_curve(each[known_TD], labels_TD[known_TD]).auc for name, each in scores.items()}
