"""The arguments with which a draft calls a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specdist.policies import DraftFeatures, DraftSequences, LengthPolicy, RoundContext, VerifiedBlocks


def begun(policy: LengthPolicy, num_rows: int = 1) -> np.ndarray:
    """[R, H]: the histories of new rows."""
    return np.tile(np.array(policy.initial_history, float), (num_rows, 1))


def after(policy: LengthPolicy, histories_RH: np.ndarray, *blocks: Sequence[tuple[int, int]]) -> np.ndarray:
    """The histories after blocks of (drafted, accepted), each given for all rows."""
    for block in blocks:
        num_drafted_R, num_accepted_R = np.array(block).T
        histories_RH = policy.next_histories(
            VerifiedBlocks(
                histories_RH=histories_RH, num_drafted_R=num_drafted_R, num_accepted_R=num_accepted_R
            )
        )
    return histories_RH


def sequences(
    histories_RH: np.ndarray, num_drafted: int, features: DraftFeatures | None = None, **of_round: Any
) -> DraftSequences:
    """Rows that all take part, in a round of their own."""
    num_rows = len(histories_RH)
    usual = {"num_rows": num_rows, "num_pass_tokens": num_rows, "is_asynchronous": False}
    return DraftSequences(
        slots_R=np.arange(num_rows),
        draft_slots_R=np.arange(num_rows),
        histories_RH=histories_RH,
        num_drafted=num_drafted,
        features=features,
        reach_R=np.ones(num_rows),
        round=RoundContext(**usual | of_round),
    )


def asked(
    policy: LengthPolicy,
    histories_RH: np.ndarray,
    num_drafted: int,
    *,
    entropies: Sequence[float] | None = None,
    chances: Sequence[float] | None = None,
    top_chances: Sequence[float] | None = None,
    estimates: Sequence[float] | None = None,
    earlier: Sequence[float] | None = None,
    chains: Sequence[int] | None = None,
) -> list[bool]:
    """The answer for every row. What is not given of the features is not a number: a policy that looks at it
    stops. ``estimates`` are a trained head's of the last token, ``earlier`` of the one before it; ``chains``
    by default the rows' numbers."""
    num_rows = len(histories_RH)
    nothing = np.full(num_rows, np.nan)
    given = [nothing if x is None else np.array(x) for x in (entropies, chances, top_chances)]
    features = DraftFeatures(*np.array(given)[:, None], None if estimates is None else np.array([estimates]))
    is_told = num_drafted and (policy.uses_features or estimates is not None)
    rows = replace(
        sequences(histories_RH, num_drafted, features if is_told else None),
        draft_slots_R=np.arange(num_rows) if chains is None else np.array(chains),
        earlier_estimates_DR=None if earlier is None else np.array([earlier]),
    )
    return (policy.wants(rows) > num_drafted).tolist()


def length(policy: LengthPolicy, histories_RH: np.ndarray, row: int = 0) -> int:
    """Tokens that a row's next block would have, of a policy that does not look at them."""
    num_drafted = 0
    while asked(policy, histories_RH, num_drafted, top_chances=np.ones(len(histories_RH)))[row]:
        num_drafted += 1
    return num_drafted
