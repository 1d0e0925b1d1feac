"""The policies and options to try: the grids that policies declare, from the papers and beyond their ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdist.lab.tune.heads import HeadChoice
from specdist.policies.registry import HEAD_POLICIES, POLICIES, TARGET_ONLY


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
