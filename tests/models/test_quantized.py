"""Quantised checkpoints: the model is that of the file, whole or sharded, as transformers itself loads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdist.models.checkpoint import open_checkpoint
from specdist.models.fitting import check_weights
from specdist.models.loading import load_whole
from specdist.models.loading_check import check_loading, relative_difference
from specdist.models.quantized_linear import QuantizedLinear
from specdist.models.reference import RecordingAttention
from tests.models.families import VOCAB_SIZE, tiny_model
from tests.models.quantized_checkpoints import GROUP, LAYOUTS, uneven, write
from tests.ranks import run_ranks

CPU = torch.device("cpu")
# Sums in another order; where inputs are rounded, some move to the next of 8 bits' numbers.
TOLERANCE, ROUNDED_TOLERANCE = 1e-4, 0.02


def saved(folder: Path, layout: str | None = None) -> Path:
    model = tiny_model("llama", **SIZES)
    uneven(model)
    model.save_pretrained(folder)
    if layout is not None:
        write(folder, *LAYOUTS[layout])
    return folder


def logits_of(model: torch.nn.Module, token_ids: Tensor) -> Tensor:
    """[T, V] of specdist's model on one sequence."""
    positions = torch.arange(len(token_ids))
    attention = RecordingAttention(positions, range(3))
    with torch.inference_mode():
        found = model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            paged_attention=attention,
        )
    return found.logits[0]


def as_transformers_loads(folder: Path, layout: str) -> torch.nn.Module:
    if "zero points" not in layout:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu").eval()
    # transformers 5.23 refuses packed zero points by their shape: the library's own functions unpack them.
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    tensors = load_file(folder / "model.safetensors")
    model = tiny_model("llama", **SIZES)
    for name, weight in model.named_parameters():
        owner = name.removesuffix("weight")
        if name in tensors:
            weight.data = tensors[name]
            continue
        numbers = unpack_from_int32(tensors[f"{owner}weight_packed"], 4, weight.shape)
        scales = tensors[f"{owner}weight_scale"]
        zeros = unpack_from_int32(tensors[f"{owner}weight_zero_point"], 4, scales.shape, packed_dim=0)
        assert zeros.unique().numel() > 3
        values = (numbers.unflatten(1, (-1, GROUP)) - zeros[..., None]) * scales[..., None]
        weight.data = values.flatten(1)
    return model.eval()


# Parts of two ranks are whole blocks and groups.
SIZES = {"intermediate_size": 128, "num_key_value_heads": 4}
KINDS = ("float8", "int8")
TOKENS = torch.arange(40) * 37 % VOCAB_SIZE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_layout_is_read_as_transformers_reads_it(tmp_path: Path, layout: str) -> None:
    declared, _ = LAYOUTS[layout]
    if declared["quant_method"] == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    checkpoint = open_checkpoint("--target", str(saved(tmp_path, layout)))
    check_weights(checkpoint, 1)
    model = load_whole(checkpoint, dtype=torch.float32, device=CPU)
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 21
    plain = as_transformers_loads(tmp_path, layout)
    with torch.inference_mode():
        expected = plain(TOKENS[None]).logits[0]
    is_rounded = "inputs" in layout
    difference = relative_difference(logits_of(model, TOKENS), expected)
    assert difference < (ROUNDED_TOLERANCE if is_rounded else TOLERANCE)
    check = check_loading(model, checkpoint, dtype=torch.float32, device=CPU, vocab_size=VOCAB_SIZE)
    assert check.is_checked, check.reason


@pytest.mark.ranks
def test_a_quantised_model_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    """Every layout, and a plain checkpoint that is quantised while it is loaded: the parts are cut with their
    scales, zero points and packed columns, and the logits are those of the whole model."""
    folders = [str(saved(tmp_path / str(index), layout)) for index, layout in enumerate(LAYOUTS)]
    plain = saved(tmp_path / "plain")
    run_ranks("tests.models.quantized_parity", 2, *folders, *(f"{plain}={kind}" for kind in KINDS))
