"""Quantised checkpoints: the model is that of the file, whole or sharded, as transformers itself loads it.

A small Llama in every layout of `tests.models.quantized_checkpoints`, and plain and quantised while it is
loaded, in float32 on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading.loading import load_whole
from specdist.models.loading.places import check_weights
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.compiled_check import DenseAttention
from specdist.models.passes.runner import ModelRunner
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.models.start_check.loading_check import check_loading, relative_difference
from tests.models.families import VOCAB_SIZE, tiny_model
from tests.models.quantized_checkpoints import GROUP, LAYOUTS, uneven, write
from tests.ranks import run_ranks

# Parts of two ranks are whole blocks and groups.
SIZES = {"intermediate_size": 128, "num_key_value_heads": 4}
DEEPSEEK = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "max_position_embeddings": 256,
}  # fmt: skip
NUM_LAYERS = 21
# Of a plain checkpoint, while it is loaded.
KINDS = ("float8", "int8")
# What two ranks share: a layout of each kind of scales, and kinds; the projections of Phi-3 are joined, and
# DeepSeek V3 has experts with a shared one, and projections to latents, which stay whole.
SHARED = (
    ("FP8, one scale, static inputs", "llama"), ("FP8 per channel, inputs per token", "llama"),
    ("FP8 in blocks, inputs in groups", "llama"), ("INT8 W8A8, inputs per token", "llama"),
    ("INT4 W4A16 packed in groups, zero points", "llama"), ("NVFP4", "llama"), ("float8", "llama"),
    ("FP8 in blocks (fp8)", "phi3"), ("INT4 W4A16 packed in groups", "phi3"), ("int8", "phi3"),
    ("FP8 in blocks (fp8)", "deepseek_v3"),
)  # fmt: skip
TOKENS = torch.arange(40) * 37 % VOCAB_SIZE
# Sums in another order; where inputs are rounded, some move to the next of 8 bits' numbers. With the scales
# of whole tokens where ranks have their own, integers differ by 0.04 to 0.12, and FP8 by more.
TOLERANCE, ROUNDED_TOLERANCE = 1e-4, 0.035


def saved(folder: Path, layout: str | None = None, family: str = "llama") -> Path:
    if family == "deepseek_v3":
        torch.manual_seed(0)
        model: PreTrainedModel = DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK)).float()
    else:
        model = tiny_model(family, **SIZES)
        uneven(model)
    model.save_pretrained(folder)
    if layout is not None:
        write(folder, *LAYOUTS[layout])
    return folder


def logits_of(model: torch.nn.Module, token_ids: Tensor) -> Tensor:
    """[T, V] of specdist's model on one sequence."""
    positions = torch.arange(len(token_ids))
    runner = ModelRunner(model, torch.device("cpu"), Acceleration(), model_impl="transformers")
    return runner.torch_pass.compute(token_ids, positions, positions, DenseAttention()).logits_NV


def as_transformers_loads(folder: Path, layout: str) -> torch.nn.Module:
    if "zero points" not in layout and "FP4" not in layout:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu").eval()
    # transformers 5.23 refuses packed zero points by their shape, and makes bfloat16 of four-bit floats: the
    # library's own functions unpack them.
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    tensors = load_file(folder / "model.safetensors")
    model = tiny_model("llama", **SIZES)
    for name, weight in model.named_parameters():
        owner = name.removesuffix("weight")
        if name in tensors:
            weight.data = tensors[name]
            continue
        if "FP4" in layout:
            packed, scales = tensors[f"{owner}weight_packed"], tensors[f"{owner}weight_scale"]
            if scales.dtype == torch.uint8:
                scales = 2.0 ** (scales.float() - 127)
            else:
                scales = scales.float() / tensors[f"{owner}weight_global_scale"]
            numbers = unpack_fp4_from_uint8(packed, *weight.shape, dtype=torch.float32)
            weight.data = numbers * scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
            continue
        numbers = unpack_from_int32(tensors[f"{owner}weight_packed"], 4, weight.shape)
        scales = tensors[f"{owner}weight_scale"]
        zeros = unpack_from_int32(tensors[f"{owner}weight_zero_point"], 4, scales.shape, packed_dim=0)
        assert zeros.unique().numel() > 3
        values = (numbers.unflatten(1, (-1, GROUP)) - zeros[..., None]) * scales[..., None]
        weight.data = values.flatten(1)
    return model.eval()


def test_modelopts_fp8_is_that_of_compressed_tensors(tmp_path: Path) -> None:
    """As NVIDIA publishes it: scales without a dimension, those of a cache in 8 bits, a declaration beside
    config.json. Fault: weights without their scales, or a refusal."""
    layout = "FP8, one scale, static inputs"
    known, folder = saved(tmp_path / "known", layout), saved(tmp_path / "modelopt", layout)
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        if name.endswith("_scale"):
            tensors[name] = tensors[name].reshape(())
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[f"{name.removesuffix('weight')}{name.split('_proj')[0][-1]}_scale"] = torch.tensor(2.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    declared = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": declared})
    )
    check_weights(open_checkpoint("--target", str(folder)), 1)
    found, expected = (
        load_whole(open_checkpoint("--target", str(each)), dtype=torch.float32, device=torch.device("cpu"))
        for each in (folder, known)
    )
    assert sum(isinstance(module, QuantizedLinear) for module in found.modules()) == NUM_LAYERS
    assert torch.equal(logits_of(found, TOKENS), logits_of(expected, TOKENS))


def whole_difference(folder: Path, layout: str) -> tuple[torch.nn.Module, float]:
    """The loaded model, and the relative difference of its logits to transformers'."""
    checkpoint = open_checkpoint("--target", str(folder))
    check_weights(checkpoint, 1)
    model = load_whole(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == NUM_LAYERS
    plain = as_transformers_loads(folder, layout)
    with torch.inference_mode():
        expected = plain(TOKENS[None]).logits[0]
    return model, relative_difference(logits_of(model, TOKENS), expected)


def sharded_differences(folder: Path) -> dict[tuple[str, str], float]:
    """By layout, or kind of ``--target_quantization``, and family: of two ranks' logits to those of the whole
    model that rounds inputs as they do, the larger one."""
    arguments = []
    for index, (layout, family) in enumerate(SHARED):
        is_kind = layout in KINDS
        path = saved(folder / str(index), None if is_kind else layout, family)
        arguments.append(f"{path}={layout}" if is_kind else str(path))
    output = folder / "differences.json"
    run_ranks("tests.models.quantized_parity", 2, str(output), *arguments)
    return dict(zip(SHARED, json.loads(output.read_text()), strict=True))


def tolerance_of(layout: str) -> float:
    return ROUNDED_TOLERANCE if "inputs" in layout or layout in KINDS else TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_layout_is_read_as_transformers_reads_it(tmp_path: Path, layout: str) -> None:
    declared, _ = LAYOUTS[layout]
    if declared["quant_method"] == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    model, difference = whole_difference(saved(tmp_path, layout), layout)
    assert difference < tolerance_of(layout)
    checkpoint = open_checkpoint("--target", str(tmp_path))
    check = check_loading(
        model, checkpoint, dtype=torch.float32, device=torch.device("cpu"), vocab_size=VOCAB_SIZE
    )
    assert check.is_checked, check.reason


@pytest.mark.ranks
def test_a_quantised_model_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    """Every kind of scales, and a plain checkpoint that is quantised while it is loaded: the parts are cut
    with their scales, zero points and packed columns, joined projections each by itself, and the logits are
    those of the whole model whose inputs have the scales that they have on the ranks."""
    for (layout, family), difference in sharded_differences(tmp_path).items():
        assert 0 <= difference < tolerance_of(layout), (layout, family)
