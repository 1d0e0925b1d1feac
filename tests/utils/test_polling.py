"""Waiting for a file descriptor, however many are open."""

from __future__ import annotations

import os
import resource

import pytest

from specdist.utils.polling import is_readable


@pytest.mark.parametrize("least", [0, 1100])
def test_a_descriptor_of_any_number_is_waited_for(least: int) -> None:
    """``select`` refuses those from 1,024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= least:
        pytest.skip(f"no process has {least} files open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, least + 100), hard))
    reader, writer = os.pipe()
    moved = os.dup2(reader, max(reader, least))
    try:
        assert not is_readable(moved) and not is_readable(moved, 0.01)
        os.write(writer, b"1")
        assert is_readable(moved) and is_readable(moved, None)
        os.close(writer)
        assert os.read(moved, 2) == b"1" and is_readable(moved)
    finally:
        for descriptor in {reader, moved}:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
