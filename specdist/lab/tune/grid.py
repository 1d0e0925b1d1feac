"""The policies and options to try: the grids that policies declare, from the papers and beyond their ends;
and the heads whose thresholds are tuned.

On-path tokens are those up to the first rejected one; the target does not verify the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdist.lab.replay import ExhaustiveTrace
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.heads.drafts import identify_draft
from specdist.models.heads.head import TokenHead, load_head
from specdist.models.heads.info import POLICY_OF_KIND, HeadInfo, read_head_info
from specdist.models.heads.roc import roc_curve
from specdist.policies.registry import HEAD_POLICIES, POLICIES, TARGET_ONLY


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


@dataclass(frozen=True)
class Candidate:
    """A policy, and options of a run with it."""

    policy: str
    options: Mapping[str, float]
    head: HeadChoice | None = None

    @property
    def name(self) -> str:
        """The policy's name, which also tells of an optional head."""
        is_extra = self.head is not None and self.policy != self.head.policy
        return f"{self.policy} with head" if is_extra else self.policy

    @property
    def run_options(self) -> dict[str, Any]:
        """All options of the main job, with the head and with the one that makes sprinter exact."""
        found: dict[str, Any] = dict(self.options)
        if self.head is not None:
            found["head"] = self.head.path
        if self.policy == "sprinter":
            found["verify"] = "all"
        return found

    def label(self) -> str:
        """The options that the grid varies, as text."""
        shown = {name: value for name, value in self.options.items() if name != "max_draft_tokens"}
        settings = " ".join(f"{name}={value:g}" for name, value in shown.items())
        return settings if self.head is None else f"head={self.head.path} {settings}".strip()


def candidates(max_draft_tokens: int, heads: Sequence[HeadChoice] = ()) -> Iterator[Candidate]:
    """The target alone, and every policy with every setting within the cap; policies that read a head, or
    may read one, with each of the heads."""
    yield Candidate(TARGET_ONLY, {})
    for policy, grid in ((name, POLICIES[name].grid) for name in POLICIES if name not in HEAD_POLICIES):
        cap = {} if policy == "fixed" else {"max_draft_tokens": max_draft_tokens}
        for values in itertools.product(*grid.values()):
            options = dict(zip(grid, values, strict=True))
            if options.get("num_draft_tokens", 1) <= max_draft_tokens:
                yield Candidate(policy, {**options, **cap})
    for head in heads:
        for name, thresholds in POLICIES[head.policy].grid.items():
            for value in thresholds:
                yield Candidate(head.policy, {name: value, "max_draft_tokens": max_draft_tokens}, head)
        for name, policy in POLICIES.items():
            if policy.optional_head == head.info.kind:
                yield Candidate(name, {"max_draft_tokens": max_draft_tokens}, head)
