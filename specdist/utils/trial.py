"""What a device or a library can do is found out at the start by trying it: the first candidate that can be
made and that a check finds right is used, and the log says why others are not."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from specdist.utils.errors import MAX_TEXT_CHARACTERS, first_line, short_text

# Largest differences that rounding explains, of the largest number or of the norm, by what is tried and by
# dtype. A factor, a scale or a mask that is forgotten changes numbers by as much as they are.
TOLERANCES = {
    # Sums in another order, and keys, values and latents that are rounded at other places.
    "attention": {"torch.float32": 1e-4, "torch.float16": 5e-3, "torch.bfloat16": 4e-2},
    # All layers of a model, in which roundings add up.
    "pass": {"torch.float32": 1e-4, "torch.float16": 1e-2, "torch.bfloat16": 5e-2},
    # Rounded scales (bfloat16 in torch's weight-only kernels) and sums in another order.
    "quantised product": {"torch.float32": 1e-4, "torch.float16": 1e-2, "torch.bfloat16": 2e-2},
    # A formula of each number: the last places.
    "formula": {"torch.float32": 1e-5, "torch.float16": 2.0**-9, "torch.bfloat16": 2.0**-6},
    "sum over ranks": {"torch.float32": 1e-5, "torch.float16": 4e-3, "torch.bfloat16": 3e-2},
}
ELSEWHERE = "another rank cannot use it"

Found = TypeVar("Found")


@dataclass(frozen=True)
class Trial(Generic[Found]):
    """What is used.

    Attributes:
        found: the first right candidate; None if there is none.
        name: of ``found``.
        note: what its check has to say.
        reasons: by the names of those before it, why they are not used.
    """

    found: Found | None
    name: str
    note: str
    reasons: Mapping[str, str]

    @property
    def refused(self) -> str:
        """The reasons, after what is used; empty if there are none."""
        return said_of(self.reasons)

    def report(
        self, logger: logging.Logger, what: str, otherwise: str, *, otherwise_level: int = logging.WARNING
    ) -> None:
        """Log what is used for ``what``: ``otherwise`` if nothing was found."""
        level, used = (otherwise_level, otherwise) if self.found is None else (logging.INFO, self.name)
        logger.log(level, "%s: %s%s%s", what, used, self.note and f" ({self.note})", self.refused)


def first_right(
    candidates: Mapping[str, Callable[[], Found]],
    check: Callable[[Found], str | None],
    agree: Callable[[bool], bool] = bool,
) -> Trial[Found]:
    """Make and check one candidate after the other. ``check`` raises an error for one that is wrong, and may
    return a note on one that is right. ``agree``: whether all ranks find it right, which are at the same
    candidate of as many."""
    reasons: dict[str, str] = {}
    for name, make in candidates.items():
        found, note = None, None
        try:
            found = make()
            note = check(found)
        except Exception as error:  # kernels, compilers, drivers and libraries raise errors of many kinds
            reasons[name] = reason_of(error)
        if agree(name not in reasons):
            return Trial(found, name, note or "", reasons)
        reasons.setdefault(name, ELSEWHERE)
    return Trial(None, "", "", reasons)


def agreed(group: Any, is_right: bool) -> bool:
    """Whether it is right on all ranks of a process group, which call this at the same time. None: alone."""
    if group is None:
        return is_right
    import torch

    vote = torch.tensor(is_right)
    torch.distributed.all_reduce(vote, torch.distributed.ReduceOp.MIN, group=group)
    return bool(vote)


def why_not(trial: Callable[[], object]) -> str | None:
    """Why it fails; None if it does not."""
    return first_right({"": trial}, lambda _: None).reasons.get("")


def reason_of(error: Exception) -> str:
    """An error as a reason: without its type where the text says enough."""
    if isinstance(error, (ValueError, ImportError)):
        return short_text(error)
    return textwrap.shorten(first_line(error), MAX_TEXT_CHARACTERS)


def said_of(reasons: Mapping[str, str]) -> str:
    """Reasons by name, for the end of a line of the log."""
    text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return f"; not used: {text}" if text else ""


def tolerance_of(kind: str, dtype: object) -> float:
    """The largest difference that rounding explains, of one of :data:`TOLERANCES`, in this torch dtype."""
    return TOLERANCES[kind][str(dtype)]


def check_difference(what: str, difference: float, tolerance: float) -> None:
    """Raises ValueError if a difference is more than rounding explains."""
    # Not "difference > tolerance": NaN is also wrong.
    if not difference <= tolerance:
        raise ValueError(f"{what} by {difference:.3g}, more than {tolerance:.3g}")
