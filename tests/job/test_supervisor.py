"""A part of a launch that fails is started again, so often and no more."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from specdist.config.generate import GenerateConfig
from specdist.job import supervisor
from specdist.job.parts import PART_STARTS


@pytest.mark.parametrize(
    ("max_restarts", "num_failures", "code", "starts"),
    [
        # Killed, then failed, then done.
        (2, 2, 0, ["0", "1", "2"]),
        # Given up after one more failure than it may have; the other group completes the run.
        (1, 5, 0, ["0", "1"]),
        (0, 5, 0, ["0"]),
    ],
)
def test_a_part_that_fails_is_started_again(
    max_restarts: int,
    num_failures: int,
    code: int,
    starts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(supervisor, "launch_store", lambda **_: store)
    monkeypatch.setattr(supervisor, "find_launcher", lambda: None)
    monkeypatch.setattr(supervisor, "POLL_S", 0.01)
    monkeypatch.setattr(supervisor, "PAUSE_S", 0.0)
    monkeypatch.setenv("RANK", "1")
    log = tmp_path / "starts"

    def run() -> int:
        with log.open("a") as file:
            file.write(f"{os.environ[PART_STARTS]}\n")
        num_before = len(log.read_text().split()) - 1
        if num_before == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1 if num_before < num_failures else 0

    # The other group is done, which ends a launch whose second group is given up.
    store.set("target-0/end", "0")
    config = GenerateConfig(
        prompts="p", target="t", draft="d", output="o", num_targets=2, max_restarts=max_restarts
    )
    assert supervisor.supervise(config, run) == code
    assert log.read_text().split() == starts
    assert ("the others go on without it" in caplog.text) == (num_failures > max_restarts)
    assert f"({len(starts) - 1} of at most" in caplog.text or len(starts) == 1
    expected = "0" if num_failures <= max_restarts else str(128 + signal.SIGKILL if not max_restarts else 1)
    assert store.get("target-1/end").decode() == expected
