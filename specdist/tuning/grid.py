"""Which policies are tried, with which hyperparameters: the papers' grids, and beyond them where they end at
a border."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdist.policies.options import HEAD_KINDS, TARGET_ONLY
from specdist.tuning.heads import HeadChoice

# Of options that are not named the default is taken.
FIRST_LENGTHS = (2, 5, 8)
GRIDS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "fixed": {"num_draft_tokens": (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20)},
    "hf_heuristic": {"num_draft_tokens": FIRST_LENGTHS},
    "confidence": {"stop_probability": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)},
    "svip": {"stop_root_entropy": (0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5, 1.8)},
    "adaedl": {"stop_bound": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)},
    "gammatune": {
        "num_draft_tokens": FIRST_LENGTHS,
        "length_bonus": (0.5, 1.0, 2.0, 4.0),
        "length_rate": (0.25, 0.5, 0.75),
    },
    "gammatune_plus": {
        "length_bonus": (1.0, 2.0, 4.0),
        "length_rate": (0.25, 0.5, 0.75),
        "stop_probability": (0.2, 0.4, 0.6, 0.8),
    },
    "goodput": {},
}
# With each head of the policy's kind.
HEAD_GRIDS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "specdecpp": {"stop_threshold": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)},
    "sprinter": {"verifier_threshold": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)},
}


@dataclass(frozen=True)
class Candidate:
    """A policy with the options that a run with it is given."""

    policy: str
    options: Mapping[str, float]
    head: HeadChoice | None = None

    @property
    def name(self) -> str:
        """The policy; with a head that it could do without, it is another one."""
        is_extra = self.head is not None and self.policy != self.head.policy
        return f"{self.policy} with head" if is_extra else self.policy

    @property
    def run_options(self) -> dict[str, Any]:
        """As the main job takes them, the head and what makes sprinter exact among them."""
        found: dict[str, Any] = dict(self.options)
        if self.head is not None:
            found["head"] = self.head.path
        if self.policy == "sprinter":
            found["verify"] = "all"
        return found

    def label(self) -> str:
        """The options that the grid varies, as they are written on a command line."""
        shown = {name: value for name, value in self.options.items() if name != "max_draft_tokens"}
        settings = " ".join(f"{name}={value:g}" for name, value in shown.items())
        return settings if self.head is None else f"head={self.head.path} {settings}".strip()


def candidates(max_draft_tokens: int, heads: Sequence[HeadChoice] = ()) -> Iterator[Candidate]:
    """The target alone, and every policy with every setting whose blocks are not longer than the cap; those
    that read a head, or may, with each of the heads."""
    yield Candidate(TARGET_ONLY, {})
    for policy, grid in GRIDS.items():
        cap = {} if policy == "fixed" else {"max_draft_tokens": max_draft_tokens}
        for values in itertools.product(*grid.values()):
            options = dict(zip(grid, values, strict=True))
            if options.get("num_draft_tokens", 1) <= max_draft_tokens:
                yield Candidate(policy, {**options, **cap})
    for head in heads:
        for name, thresholds in HEAD_GRIDS[head.policy].items():
            for value in thresholds:
                yield Candidate(head.policy, {name: value, "max_draft_tokens": max_draft_tokens}, head)
        if head.info.kind == HEAD_KINDS["goodput"]:
            yield Candidate("goodput", {"max_draft_tokens": max_draft_tokens}, head)
