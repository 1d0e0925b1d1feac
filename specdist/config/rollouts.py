"""The options of rollouts: a function of the user that judges completions, or goes on with conversations."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, ClassVar

from specdist.config.arguments import option
from specdist.utils.rules import Refusals, within


@dataclass(kw_only=True)
class RolloutOptions:
    """Own code after every completion of a row."""

    _argument_group_name = "Rollouts"

    rollout: str | None = option(
        None,
        help="function that is called with a row and its conversation after every completion, and accepts, "
        "rejects or answers it: module:function or file.py:function; --num_samples completions of each row "
        "are then accepted ones",
    )
    max_attempts: int = option(
        8, at_least=1, help="attempts at a completion, before its row is an error, that --rollout may reject"
    )
    max_turns: int = option(
        8,
        at_least=1,
        help="completions of one attempt, where --rollout answers with messages; then it is rejected",
    )
    rollout_workers: int | None = option(
        None, at_least=1, help="processes that call it (default: as many as there are CPU cores, at most 16)"
    )
    rollout_timeout: float = option(
        60.0, rule=within(above=0, below=math.inf), help="seconds after which a call is an error of its row"
    )

    _refusals: ClassVar[Refusals] = (
        ("max_attempts max_turns rollout_workers rollout_timeout", lambda o: o.rollout is None,
         "has no effect without --rollout: name a function there, or leave it out"),
        ("turns_column", lambda o: o.rollout is not None,
         "and --rollout {o.rollout} exclude each other: its function can answer with the next message"),
        ("trace logprobs prompt_logprobs", lambda o: o.rollout is not None,
         "describes one completion of a row, and with --rollout {o.rollout} a row has several: leave one of "
         "them out"),
    )  # fmt: skip

    @property
    def num_rollout_workers(self) -> int:
        return self.rollout_workers or min(len(os.sched_getaffinity(0)), 16)

    @property
    def rollout_fingerprint(self) -> dict[str, Any]:
        """What decides rows, without the function's own code, wherever its file is; nothing without one."""
        if self.rollout is None:
            return {}
        limits = {name: getattr(self, name) for name in ("max_attempts", "max_turns")}
        return {"rollout": self.rollout.rpartition("/")[2], **limits}
