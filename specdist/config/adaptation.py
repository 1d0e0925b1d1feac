"""The options of a draft that learns on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdist.config.arguments import option
from specdist.config.sizes import bytes_of
from specdist.utils.errors import UserError

OPTIONS = ("adapt_rate", "adapt_memory")


@dataclass(kw_only=True)
class AdaptationOptions:
    """Training while the draft waits for its target."""

    _argument_group_name = "Learning during the run"

    adapt_draft: bool = option(
        False,
        help="while the draft, on a rank of its own, waits for the target, train a copy of it on the rows "
        "that are finished; where that drafts more of the latest rows' tokens it becomes the draft, and is "
        "kept in the output folder's draft_adapted/, with which a relaunch goes on",
    )
    adapt_rate: float | None = option(
        None, help="with --adapt_draft: learning rate of AdamW (default: 5e-5 x 2048 / hidden size)"
    )
    adapt_batch: int = option(512, help="with --adapt_draft: tokens of completions of a training step")
    adapt_buffer: int = option(
        2**20, help="with --adapt_draft: most tokens of finished rows to train on; the oldest go first"
    )
    adapt_interval: int = option(
        16, help="with --adapt_draft: training steps between two comparisons of the copy with the draft"
    )
    adapt_margin: float = option(
        0.002,
        help="with --adapt_draft: by which share more of the tokens the copy must draft to become the draft; "
        "a negative one lets a worse copy pass",
    )
    adapt_memory: str | None = option(
        None,
        help="with --adapt_draft: most memory for the copy, its gradients and the optimizer, such as 16GiB: "
        "a draft that needs more is refused (default: what there is)",
    )

    def check_adaptation(self) -> None:
        """Raises :class:`UserError` for values out of their range."""
        for name in ("adapt_batch", "adapt_buffer", "adapt_interval"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)} must be at least 1")
        if self.adapt_rate is not None and not 0 < self.adapt_rate < math.inf:
            raise UserError(f"--adapt_rate {self.adapt_rate} must be a number above 0")
        if not -1 <= self.adapt_margin <= 1:
            raise UserError(f"--adapt_margin {self.adapt_margin} must be between -1 and 1: it is a share")
        self.adapt_bytes()
        for name in OPTIONS:
            if getattr(self, name) is not None and not self.adapt_draft:
                raise UserError(
                    f"--{name} {getattr(self, name)} has no effect without --adapt_draft: add it, or leave "
                    "this out"
                )

    def adapt_bytes(self) -> int | None:
        """``--adapt_memory`` in bytes; None without a bound."""
        return None if self.adapt_memory is None else bytes_of("adapt_memory", self.adapt_memory)
