"""What is read of ``/proc``, beside psutil's own reading."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from specdist.utils import host

# Other processes take and release memory between two looks.
SHARE = 0.2


def test_a_process_is_described_as_psutil_describes_it() -> None:
    known = psutil.Process()
    # psutil takes the machine's start in whole seconds.
    assert abs(host.process_start_s() - known.create_time()) < 2
    assert host.available_memory_bytes() == pytest.approx(psutil.virtual_memory().available, rel=SHARE)


def test_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: Path, *_: object, **__: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", absent)
    assert host.available_memory_bytes() == psutil.virtual_memory().total
    assert host.process_start_s.__wrapped__() >= psutil.Process().create_time()
