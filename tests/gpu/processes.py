"""Runs checks in a process of their own, in which there is a fake device until it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.forked import started_world
from tests.gpu.guard import why_not

TIMEOUT_S = 240

needs_fake_device = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def on_device(check: Callable[..., Any], *arguments: Any) -> str:
    """Call a function of a module where a fake device is installed; what it printed.

    Fails with the function's own words if it raises, or has not ended in time.
    """
    with started_world(1, _installed, check, *arguments, environment={"OMP_NUM_THREADS": "1"}) as world:
        code = world.end(TIMEOUT_S)
        (out,), (error,) = world.words("stdout"), world.words("stderr")
    if code != 0:
        pytest.fail(f"{check.__name__}{arguments} ended with {code}\n{out}{error}", pytrace=False)
    return out


def _installed(check: Callable[..., Any], *arguments: Any) -> None:
    from tests.gpu import device

    device.prepare()
    device.install()
    check(*arguments)
