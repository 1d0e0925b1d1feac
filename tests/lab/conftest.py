"""Sizes of models are counted once in a session: building a model of 70B, without memory, takes seconds."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from specdist.lab.plan import job
from tests.lab.emulation import run


@pytest.fixture(scope="session", autouse=True)
def sizes_are_counted_once() -> Iterator[None]:
    known = functools.cache(job.open_model)
    with pytest.MonkeyPatch.context() as patch:
        for module in (job, run):
            patch.setattr(module, "open_model", known)
        yield
