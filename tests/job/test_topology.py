"""What a rank says where its node does not let it work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdist.job.ranks.topology import local_device, why_no_gpu
from specdist.utils.errors import UserError

REPOSITORY = Path(__file__).parents[2]


def test_without_a_gpu_the_message_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(UserError, match="no GPU here: install its CUDA build, or use --device cpu"):
        local_device("cuda")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    driver = tmp_path / "version"
    assert "has no NVIDIA driver" in why_no_gpu(driver)
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\nGCC version: 12\n")
    words = why_no_gpu(driver)
    assert "built for CUDA 13.0" in words and "550.54.15" in words and "GCC" not in words
    # What it names is understood there.
    install = (REPOSITORY / "jobs/install.sh").read_text(encoding="utf-8")
    assert "SPECDIST_CUDA=cu126" in words and "SPECDIST_CUDA=cu126" in install
