"""The cheapest way to find out a pair's acceptance, where drafting for a sequence begins with its prompt.

R sequences, S numbers of draft tokens of each: 1, 2, ...
"""

from __future__ import annotations

import numpy as np

from specdist.policies.base import PutOff

# What is assumed of it until then: how many tokens of a block are verified.
LIKELY_ACCEPTANCE = 0.7


def cheapest_exploration(
    put_off: PutOff, added_ns_RS: np.ndarray, *, num_lacking: float, prefill_ns: float, saved_ns: float
) -> np.ndarray:
    """Lengths [R] of blocks of a few sequences, those with the shortest prompts to run, until so many tokens
    are verified; none where that takes longer than all further rounds may save.

    Args:
        added_ns_RS: to a round by drafting for 1, 2, ... sequences.
        prefill_ns: of a token of a prompt.
        saved_ns: of each round that has drafts, at best.
    """
    num_rows, num_steps = added_ns_RS.shape
    lengths_R = np.zeros(num_rows, np.int64)
    if not num_steps:
        return lengths_R
    order_R = put_off.num_missing_R.argsort(kind="stable")
    verified_S = (LIKELY_ACCEPTANCE ** np.arange(num_steps)).cumsum()
    num_rounds_RS = np.ceil(num_lacking / (np.arange(1, num_rows + 1)[:, None] * verified_S))
    prompts_ns_R = prefill_ns * put_off.num_missing_R[order_R].cumsum()
    ns_RS = num_rounds_RS * added_ns_RS + prompts_ns_R[:, None]
    last_row, last_step = divmod(int(ns_RS.argmin()), num_steps)
    if saved_ns * put_off.num_left_R.mean() > ns_RS[last_row, last_step]:
        lengths_R[order_R[: last_row + 1]] = last_step + 1
    return lengths_R
