"""Text models inside models of texts and images: what else their files hold is neither read nor kept, and
they run beside plain text models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdist.job.ranks.topology import Topology
from specdist.models.files.checkpoint import Checkpoint, open_checkpoint
from specdist.models.loading import loading
from specdist.models.loading.places import check_weights
from specdist.models.sizes.sizes import model_size
from specdist.models.start_check.loading_check import check_loading
from specdist.utils.errors import UserError
from tests.models.all_families import VOCAB_SIZE, build, tokenizer
from tests.models.family_runs import difference, reference, run_family

CPU = torch.device("cpu")
# By the names in published files: text models before their towers were given a common model, and after; the
# last has names for the parts of its tower, too.
TOWERS = {
    "mistral3": "vision_tower.",
    "qwen2_vl": "visual.",
    "lfm3_vl": "model.vision_tower.",
}


@pytest.fixture(scope="module", params=TOWERS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp(request.param)
    build(request.param).save_pretrained(folder)
    return folder, TOWERS[request.param]


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint("--target", str(folder))


def test_a_tower_s_weights_are_neither_read_nor_kept(saved: tuple[Path, str]) -> None:
    folder, tower = saved
    stored = load_file(folder / "model.safetensors")
    read: list[str] = []
    tensors_of = loading._tensors

    def noted(checkpoint: Any, needed: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors_of(checkpoint, needed):
            read.append(name)
            yield name, tensor

    checkpoint = opened(folder)
    check_weights(checkpoint, 1)
    with mock.patch.object(loading, "_tensors", noted):
        model = loading.load_whole(checkpoint, dtype=torch.float32, device=CPU)
    assert set(read) == {name for name in stored if not name.startswith(tower)} < set(stored)
    num_read = sum(stored[name].numel() for name in read)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_read
    assert model_size("it", checkpoint.config, 4).num_parameters == num_read
    checked = check_loading(model, checkpoint, dtype=torch.float32, device=CPU, vocab_size=VOCAB_SIZE)
    assert checked.is_checked, checked.reason


def test_what_no_tower_of_the_model_has_is_refused(saved: tuple[Path, str], tmp_path: Path) -> None:
    folder, tower = saved
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, f"{tower}more": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(UserError, match=f"takes {tower}more"):
        check_weights(opened(tmp_path), 1)


def test_a_wrapped_model_and_a_plain_one_run_as_a_pair(tmp_path: Path) -> None:
    for name, family in (("target", "mistral3"), ("draft", "ministral3")):
        build(family).save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    alone = Topology(rank=0, world_size=1, tp_size=1, uses_draft=True, device=CPU)
    found, _ = run_family(tmp_path, alone)
    assert found is not None and not difference(found, reference(tmp_path / "target"))
