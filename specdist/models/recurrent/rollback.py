"""How far passes may go back in a slot's tokens. No tensors."""

from __future__ import annotations

from typing import NamedTuple


class Rollback(NamedTuple):
    """How far states go back: at most ``num_tokens`` are ever rolled back. ``follows_committed``: no token is
    rolled back after another forward has consumed it, so that each pass leaves the state after what it
    follows."""

    num_tokens: int
    follows_committed: bool = False


# Each pass follows all tokens of the ones before it.
NO_ROLLBACK = Rollback(1)
