"""The parts of a launch in which several target groups share drafts (``--num_targets``, ``--num_drafts``).

Ranks 0 .. num_targets * tp_size - 1 are the target groups, the others are drafts. Each group has a process
group of its own, and each draft none: a part that ends takes no other down. What they know of one another
stands in the launch's key-value store.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from specdist.config.generate import GenerateConfig

# Of this process: kind and number of its part, and how often that has been started again.
PART, PART_STARTS = "SPECDIST_PART", "SPECDIST_PART_STARTS"


@dataclass(frozen=True)
class Part:
    """A target group or a draft, and how often it has been started again."""

    kind: Literal["target", "draft"]
    index: int
    num_starts: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.index}"


def own_part() -> Part | None:
    """The part that this process belongs to; None where a launch has no parts, or is not divided yet."""
    words = os.environ.get(PART, "").split()
    if not words:
        return None
    kind: Literal["target", "draft"] = "draft" if words[0] == "draft" else "target"
    return Part(kind, int(words[1]), int(os.environ.get(PART_STARTS, "0")))


def place_of(config: GenerateConfig, rank: int) -> tuple[Part, int, int]:
    """The part of a rank of the launch, its rank in that part, and the number of ranks there."""
    num_target_ranks = config.num_targets * config.tp_size
    if rank >= num_target_ranks:
        return Part("draft", rank - num_target_ranks), 0, 1
    return Part("target", rank // config.tp_size), rank % config.tp_size, config.tp_size


def environment_of(part: Part, rank: int, num_ranks: int) -> dict[str, str]:
    """The variables of a process of a part."""
    return {
        PART: f"{part.kind} {part.index}",
        PART_STARTS: str(part.num_starts),
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        # Whoever hosts it, it is not one of the part's ranks.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # Its launcher is the supervisor.
        "TORCHELASTIC_RUN_ID": os.environ.get("TORCHELASTIC_RUN_ID", "specdist"),
    }
