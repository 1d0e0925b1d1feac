"""The papers' formulas: the expected gain of speculation for an acceptance rate and the costs of passes.

Tokens are accepted independently with probability a; K tokens are drafted; c is the time of a draft step over
that of a target pass. No emitted token depends on these formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple


def tokens_per_call(acceptance: float, num_draft_tokens: Any, *, later: float | None = None) -> Any:
    """Expected tokens of a target pass, (1 - a^(K+1)) / (1 - a) (Leviathan et al. 2023, Eq. 1); of an array
    of lengths, of each. ``later``: the acceptance of a token after an accepted one, where it is another than
    that of a block's first token."""
    later = acceptance if later is None else later
    in_stretch = num_draft_tokens if later == 1 else (1 - later**num_draft_tokens) / (1 - later)
    return 1 + acceptance * in_stretch


def ready_share(acceptance: float, num_candidates: Any, caught: Any, *, later: float | None = None) -> Any:
    """The share of a sequence's rounds with candidates ready when the draft works ahead; of arrays, of each.

    ``caught`` is the share of misses for which a branch was prepared; ``later`` as in
    :func:`tokens_per_call`. A sequence is *ready* if it has its n candidates; otherwise it has none:

        P(ready | ready) = a^(n+1) + (1 - a^(n+1)) c        P(ready | not) = a + (1 - a) c
    """
    hit = acceptance * (acceptance if later is None else later) ** num_candidates
    stays = hit + (1 - hit) * caught
    comes = acceptance + (1 - acceptance) * caught
    return comes / (1 - stays + comes)


class RoundWork(NamedTuple):
    """What a round is for each sequence, on average; of arrays, of each.

    Attributes:
        num_tokens: that it commits.
        num_verified: that the target's pass runs.
        num_first, num_later, num_steps: that the draft's first step runs, that each of its further steps
            does, and the number of these.
    """

    num_tokens: Any
    num_verified: Any
    num_first: Any
    num_later: Any
    num_steps: Any


def synchronous_round(acceptance: float, num_candidates: Any, *, later: float | None = None) -> RoundWork:
    """The work of a round with so many candidates, drafted before the pass. After a block that was accepted
    whole the draft runs its last token too."""
    is_whole = acceptance * (acceptance if later is None else later) ** (num_candidates - 1)
    num_tokens = tokens_per_call(acceptance, num_candidates, later=later)
    return RoundWork(num_tokens, 1 + num_candidates, 1 + is_whole, 1, num_candidates - 1)


def asynchronous_round(
    acceptance: float, num_candidates: Any, caught: Any, num_branches: Any, *, later: float | None = None
) -> RoundWork:
    """The work of a round with so many candidates where a sequence is ready, drafted during the pass before:
    the first step drafts the possible next token, and the branches join in the others."""
    ready = ready_share(acceptance, num_candidates, caught, later=later)
    num_tokens = 1 + ready * (tokens_per_call(acceptance, num_candidates, later=later) - 1)
    return RoundWork(num_tokens, 1 + ready * num_candidates, 1, 1 + num_branches, num_candidates)


def caught_share(num_branches: int) -> float:
    """The share of misses that this many branches per sequence catch: 0.29, 0.42, 0.55, 0.67 for 1, 2, 4, 8.

    Measured for greedy and coupled draws of a distilled draft; other drafts catch less, and random draws
    about half of it.
    """
    return 1.0 - (1 + num_branches) ** -0.5


def branches_for(caught: float) -> int:
    """The fewest branches per sequence with at least this :func:`caught_share`."""
    num_branches = 0
    while caught_share(num_branches) < caught:
        num_branches += 1
    return num_branches
