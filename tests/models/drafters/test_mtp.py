"""MTP heads in published files: every tensor is read where it belongs, and the target leaves them unread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdist.models.drafters.drafters import check_drafter, load_drafter
from specdist.models.drafters.mtp_loading import open_mtp
from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.files.fitting import check_weights
from specdist.models.files.sizes import size_of
from specdist.models.loading.loading import load_whole
from specdist.utils.errors import UserError
from tests.engine.mtp import FAMILIES, mtp_head, mtp_target, save_head

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_published_files_give_the_head_and_the_target(family: str, tmp_path: Path) -> None:
    target = mtp_target(family, 96)
    head = mtp_head(target)
    target.save_pretrained(tmp_path)
    save_head(head, family, target.config.num_hidden_layers, tmp_path)
    checkpoint = open_checkpoint("--target", str(tmp_path))
    check_weights(checkpoint, 1)
    loaded = load_whole(checkpoint, dtype=torch.float32, device=CPU)
    for name, weight in target.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight, rtol=0, atol=0)
    draft = open_mtp(checkpoint, "mtp")
    check_drafter(draft, checkpoint)
    runner = load_drafter(draft, checkpoint, dtype=torch.float32, device=CPU)
    found, expected = runner.model.state_dict(), head.state_dict()
    assert set(found) == set(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0)
    size = size_of(draft, 4)
    assert size.num_parameters == sum(weight.numel() for weight in head.parameters())
    assert (size.num_read_numbers, size.num_state_numbers) == (64, 64)
    assert runner.bytes_per_page(16) == 16 * size.cache_bytes_per_token(1)


def test_a_target_without_a_head_is_refused(tmp_path: Path) -> None:
    mtp_target("glm4_moe", 96).save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="holds no multi-token prediction head in its files"):
        open_mtp(open_checkpoint("--target", str(tmp_path / "bare")), "mtp")
    mtp_target("qwen3", 96).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="of the family qwen3, whose"):
        open_mtp(open_checkpoint("--target", str(tmp_path / "other")), "mtp")
