"""Mixtures stored by expert: sound files open, and a message about others is true of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdist.models.families.family_check import check_family
from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading.places import check_weights
from specdist.utils.errors import UserError
from tests.models.all_families import build

EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of six experts in each layer, one tensor each."""
    folder = tmp_path_factory.mktemp("mixtral")
    build("mixtral").save_pretrained(folder)
    return folder


def changed(mixture: Path, folder: Path, change: Callable[[Tensors], Tensors], **config: object) -> Path:
    tensors = load_file(mixture / "model.safetensors")
    assert EXPERT in tensors
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((mixture / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    return folder


def check(folder: Path, tp_size: int = 1, quantization: str | None = None) -> None:
    checkpoint = replace(open_checkpoint("--target", str(folder)), quantization=quantization)
    check_family(checkpoint, tp_size)
    check_weights(checkpoint, tp_size)


def without(tensors: Tensors, *words: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not all(word in name for word in words)}


FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], list[str]]] = {
    "an expert is missing": (
        lambda tensors: without(tensors, EXPERT),
        ["model.layers.0.mlp.experts.gate_up_proj", "one of them is missing", "fetch it again"],
    ),
    "an expert of another shape": (
        lambda tensors: tensors | {EXPERT: torch.zeros(159, 128)},
        ["layers.0.mlp.experts.gate_up_proj cannot be made", "[160, 128]", "of another shape"],
    ),
    "an expert more in one layer": (
        lambda tensors: tensors | {
            EXPERT.replace("1.w1", f"6.{kind}"): tensors[EXPERT.replace("w1", kind)].clone()
            for kind in ("w1", "w2", "w3")
        },
        ["layers.0.mlp.experts.gate_up_proj of shape [7, 320, 128]", "[6, 320, 128]", "fetch both again"],
    ),
    "quantised without a word": (
        lambda tensors: tensors | {EXPERT: tensors[EXPERT].to(torch.float8_e4m3fn)},
        ["F8_E4M3", "declares how it was quantised"],
    ),
    "a layer more than config.json has": (
        lambda tensors: tensors | {EXPERT.replace("layers.0", "layers.7"): tensors[EXPERT].clone()},
        ["nothing in MixtralForCausalLM takes model.layers.7"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_said_of_a_mixture_is_true(mixture: Path, tmp_path: Path, fault: str) -> None:
    change, words = FAULTS[fault]
    with pytest.raises(UserError) as raised:
        check(changed(mixture, tmp_path, change))
    for word in (f"--target {tmp_path}", *words):
        assert word in str(raised.value)


def test_a_sound_mixture_is_refused_only_for_what_is_not_done_with_it(mixture: Path, tmp_path: Path) -> None:
    check(mixture, tp_size=1)
    check(mixture, tp_size=2)
    with pytest.raises(UserError, match="has split or joined, as those of single experts") as raised:
        check(mixture, quantization="int8")
    assert "leave --target_quantization out" in str(raised.value) and "fetch" not in str(raised.value)
    plain = [f"{each}_proj" for each in "qkvo"]
    declared = {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": plain}
    folder = changed(mixture, tmp_path, lambda tensors: tensors, quantization_config=declared)
    with pytest.raises(UserError, match=r"experts.*is stored as F32, which its quantisation"):
        check(folder)
