"""The loading check on models that two ranks share, also in half precision and far into a text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_loading_check import saved
from tests.ranks import run_ranks


@pytest.mark.ranks
def test_planted_faults_of_slices_are_found(tmp_path: Path) -> None:
    """Each of them went unnoticed: the run ended with 0, and its manifest said that it was exact. One family
    of each kind of cut is within the check's tolerance in bfloat16, and not with frequencies in it."""
    sound = saved(tmp_path / "sound", initializer_range=0.05)
    fp8 = saved(tmp_path / "fp8", initializer_range=0.05)
    tensors = load_file(fp8 / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].reshape(rows // 16, 16, columns // 16, 16)
        scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
        tensors[name] = (blocks / scales).reshape(rows, columns).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales[:, 0, :, 0].clone()
    save_file(tensors, fp8 / "model.safetensors", metadata={"format": "pt"})
    config = (fp8 / "config.json").read_text().rstrip().removesuffix("}")
    declared = '"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}'
    (fp8 / "config.json").write_text(f"{config}, {declared}}}")
    others = [str(saved(tmp_path / family, family)) for family in ("gemma2", "gpt_neox", "olmo2", "youtu")]
    run_ranks("tests.models.planted_loading", 2, str(sound), str(fp8), *others)
