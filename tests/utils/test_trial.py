"""What a device can do is tried: the first right candidate is used, and the log says why others are not."""

import logging
import math

import pytest

from specdist.utils.trial import check_difference, first_right, why_not

logger = logging.getLogger(__name__)


def broken() -> float:
    raise RuntimeError("no such instruction\nat line 3")


def check(found: float) -> str:
    check_difference("its numbers differ", found, 0.1)
    return f"by {found:g}"


def test_the_first_right_candidate_is_used(caplog: pytest.LogCaptureFixture) -> None:
    made = {"broken": broken, "wrong": lambda: 0.5, "unclear": lambda: math.nan, "right": lambda: 0.0}
    trial = first_right({**made, "too late": broken}, check)
    assert (trial.found, trial.name, trial.note) == (0.0, "right", "by 0")
    others = iter((False, True))
    voted = first_right({"here": float, "all": float}, check, lambda is_right: is_right and next(others))
    assert (voted.name, voted.reasons) == ("all", {"here": "another rank cannot use it"})
    with caplog.at_level(logging.INFO):
        trial.report(logger, "sums", "plain")
        first_right({"broken": broken}, check).report(logger, "sums", "plain")
    assert caplog.record_tuples == [
        (
            __name__,
            logging.INFO,
            "sums: right (by 0); not used: broken: RuntimeError: no such instruction; "
            "wrong: its numbers differ by 0.5, more than 0.1; "
            "unclear: its numbers differ by nan, more than 0.1",
        ),
        (__name__, logging.WARNING, "sums: plain; not used: broken: RuntimeError: no such instruction"),
    ]


def test_why_not() -> None:
    assert why_not(broken) == "RuntimeError: no such instruction"
    assert why_not(lambda: None) is None
