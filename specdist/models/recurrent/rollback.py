"""How far passes may go back in a slot's tokens. No tensors."""

from __future__ import annotations

from typing import NamedTuple


class Rollback(NamedTuple):
    """At most ``num_tokens`` are ever rolled back. ``follows_committed``: none is that a pass has followed,
    so that each pass leaves the state after what it follows."""

    num_tokens: int
    follows_committed: bool = False


# Each pass follows all tokens of the ones before it.
NO_ROLLBACK = Rollback(1)
