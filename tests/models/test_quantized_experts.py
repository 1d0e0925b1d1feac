"""Experts that are stored quantised become the numbers that transformers, or the layout's own rule, gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specdist.models.families.family_check import check_family
from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading.loading import load_whole
from specdist.models.loading.packed_experts import PackedExperts, packed_experts_of
from specdist.models.loading.places import check_weights
from specdist.models.quantized.quantized import quantization_of
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.models.sharding.experts import experts_of
from specdist.models.sizes.sizes import model_size
from specdist.models.start_check.loading_check import check_loading
from specdist.utils.errors import UserError
from tests.models import quantized_checkpoints as layouts
from tests.models.all_families import VOCAB_SIZE, build, near_copy, tokenizer
from tests.models.family_runs import EXACT, WANTED, reference, through

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]


def float8_block(weight: Tensor) -> tuple[Tensors, Tensor]:
    parts = layouts.float8_block(weight)
    scales = parts["weight_scale_inv"].repeat_interleave(32, 0).repeat_interleave(32, 1)
    return parts, parts["weight"].float() * scales


def int4_group(weight: Tensor) -> tuple[Tensors, Tensor]:
    grouped = weight.reshape(len(weight), -1, layouts.GROUP)
    scales = grouped.abs().amax(-1) / 7.5
    numbers = (grouped / scales[..., None]).round().clamp(-8, 7)
    parts = {
        "weight_packed": layouts.words(numbers.reshape(weight.shape), 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts, (numbers * scales[..., None]).reshape(weight.shape)


def nvfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    parts = layouts.float4(16, "weight_global_scale")(weight)
    return parts, nvfp4_numbers(parts, "weight_packed", 1 / parts["weight_global_scale"])


def nvfp4_numbers(parts: Tensors, name: str, scale: Tensor) -> Tensor:
    """Of a byte the lower half is first."""
    codes = torch.stack([parts[name] % 16, parts[name] // 16], dim=-1).flatten(1)
    return layouts.FLOAT4[codes.long()] * (parts["weight_scale"].float() * scale).repeat_interleave(16, 1)


def compressed(form: str, **weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["re:.*self_attn.*", "re:.*mlp.gate$", "lm_head"],
    }  # fmt: skip


FORMATS: dict[str, tuple[Callable[[Tensor], tuple[Tensors, Tensor]], dict[str, object]]] = {
    "blocks of FP8": (
        float8_block,
        {
            "quant_method": "fp8",
            "weight_block_size": [32, 32],
            "modules_to_not_convert": [f"{each}_proj" for each in "qkvo"],
        },
    ),
    "groups of INT4": (
        int4_group,
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=layouts.GROUP),
    ),
    "NVFP4": (
        nvfp4,
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
}


def is_expert(name: str) -> bool:
    return ".experts." in name and name.endswith("_proj.weight")


def write(folder: Path, tensors: Tensors, declared: dict[str, object] | None) -> None:
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    if declared is not None:
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))


def stored_pair(
    folder: Path, store: Callable[[Tensor], tuple[Tensors, Tensor]], is_stored: Callable[[str], bool]
) -> Tensors:
    """Two folders: ``plain`` has what is meant by the tensors of ``quantised``, which are returned and not
    written there."""
    for name in ("plain", "quantised"):
        build("qwen3_moe").save_pretrained(folder / name)
    plain, stored = load_file(folder / "plain/model.safetensors"), Tensors()
    for each, weight in plain.items():
        if is_stored(each):
            parts, plain[each] = store(weight)
            stored |= {each.replace("weight", part): tensor for part, tensor in parts.items()}
        else:
            stored[each] = weight
    save_file(plain, folder / "plain/model.safetensors", metadata={"format": "pt"})
    return stored


@pytest.mark.parametrize("name", FORMATS)
def test_experts_stored_one_by_one_are_the_numbers_that_are_meant(tmp_path: Path, name: str) -> None:
    store, declared = FORMATS[name]
    write(tmp_path / "quantised", stored_pair(tmp_path, store, is_expert), declared)
    check_alike(tmp_path / "plain", tmp_path / "quantised")


def as_parameter(experts: PackedExperts) -> Tensor:
    """The parameter as transformers has it, dequantised."""
    weights = [experts.matrix(index).dequantized(torch.float32) for index in range(experts.num_experts)]
    return torch.stack(weights).permute(experts.dims)


def check_alike(plain: Path, quantised: Path) -> None:
    checkpoint = open_checkpoint("--target", str(quantised))
    check_family(checkpoint, 2)
    check_weights(checkpoint, 2)
    model = load_whole(checkpoint, dtype=torch.float32, device=CPU)
    wanted = load_whole(open_checkpoint("--target", str(plain)), dtype=torch.float32, device=CPU).state_dict()
    packed = dict(packed_experts_of(model))
    assert len(packed) == 2 * sum(1 for _ in experts_of(model)) > 0
    size = model_size("it", checkpoint.config, 4, quantization=quantization_of(checkpoint))
    biases = sum(each.numel() for name, each in model.named_parameters() if name.endswith("_proj_bias"))
    planned = sum(each.num_layers * each.num_experts * each.rank_bytes(1, 4) for each in size.experts)
    assert planned == sum(each.num_bytes for each in packed.values()) + 4 * biases
    found = {name: each for name, each in model.state_dict().items() if name.rpartition(".")[0] not in packed}
    found |= {name: as_parameter(each) for name, each in packed.items()}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            of_others = {key for key in found if key.rpartition(".")[0] != name or key.endswith(".bias")}
            found = {key: found[key] for key in of_others}
            found[f"{name}.weight"] = layer.weight.dequantized(torch.float32)
    assert found.keys() == wanted.keys()
    for each in wanted:
        torch.testing.assert_close(found[each], wanted[each], atol=1e-6, rtol=1e-6)
    result = check_loading(model, checkpoint, dtype=torch.float32, device=CPU, vocab_size=VOCAB_SIZE)
    assert result.is_checked, result.reason


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders: ``plain`` has what transformers makes of the experts of ``quantised``."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    for name in ("plain", "quantised"):
        build("gpt_oss").save_pretrained(folder / name)
    plain = load_file(folder / "plain/model.safetensors")
    generator = torch.Generator().manual_seed(2)
    stored: Tensors = {}
    for each, weight in plain.items():
        if not each.endswith("experts.gate_up_proj") and not each.endswith("experts.down_proj"):
            stored[each] = weight
            continue
        num_experts, num_inputs, num_outputs = weight.shape
        shape = (num_experts, num_outputs, num_inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(120, 126, shape, generator=generator).to(torch.uint8)
        stored |= {f"{each}_blocks": blocks, f"{each}_scales": scales}
        plain[each] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert plain[each].shape == weight.shape
    save_file(plain, folder / "plain/model.safetensors", metadata={"format": "pt"})
    write(folder / "quantised", stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return folder


def test_mxfp4_experts_are_what_transformers_makes_of_them(mxfp4: Path) -> None:
    check_alike(mxfp4 / "plain", mxfp4 / "quantised")


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_share_quantised_experts(mxfp4: Path, tmp_path: Path) -> None:
    """The tokens are those of transformers with the numbers that the experts mean."""
    pair = tmp_path / "mxfp4"
    shutil.copytree(mxfp4 / "quantised", pair / "target")
    near_copy(build("gpt_oss")).save_pretrained(pair / "draft")
    for name in ("target", "draft"):
        tokenizer().save_pretrained(pair / name)
    torch.save(reference(mxfp4 / "plain"), pair / WANTED)
    (found,) = through(["mxfp4"], tmp_path, 2)
    assert found.kind == EXACT and found.unchecked is None, found


def test_parts_that_do_not_fit_are_told(mxfp4: Path, tmp_path: Path) -> None:
    tensors = load_file(mxfp4 / "quantised/model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    for changed, words in (
        ({**tensors, f"{name}_scales": tensors[f"{name}_scales"][:, :-1].clone()}, "asks for"),
        ({**tensors, f"{name}_scales": tensors[f"{name}_scales"].float()}, "is stored as F32"),
        ({each: tensor for each, tensor in tensors.items() if each != f"{name}_scales"}, "hold no scales"),
    ):
        (tmp_path / "config.json").write_bytes((mxfp4 / "quantised/config.json").read_bytes())
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=words) as raised:
            check_weights(open_checkpoint("--target", str(tmp_path)), 1)
        assert name in str(raised.value)


def test_stored_quantised_experts_are_not_quantised_anew(mxfp4: Path) -> None:
    checkpoint = replace(open_checkpoint("--target", str(mxfp4 / "quantised")), quantization="int8")
    with pytest.raises(UserError, match="leave --target_quantization out"):
        check_weights(checkpoint, 1)


def modelopt(weight: Tensor) -> tuple[Tensors, Tensor]:
    parts = layouts.float4(16, "weight_scale_2", "weight")(weight)
    return parts, nvfp4_numbers(parts, "weight", parts["weight_scale_2"])


@pytest.mark.parametrize("is_beside", [False, True])
def test_modelopts_nvfp4_is_read_in_experts_and_in_layers(tmp_path: Path, is_beside: bool) -> None:
    """As config.json declares it, or a file beside it; excluded layers are plain."""
    projections = ("q_proj.weight", "o_proj.weight")
    stored = stored_pair(tmp_path, modelopt, lambda name: is_expert(name) or name.endswith(projections))
    excluded = {"exclude_modules": ["lm_head", "model.layers.*.mlp.gate", "*.k_proj", "*.v_proj"]}
    if is_beside:
        write(tmp_path / "quantised", stored, None)
        declared = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"} | excluded}
        (tmp_path / "quantised/hf_quant_config.json").write_text(json.dumps(declared))
    else:
        write(tmp_path / "quantised", stored, layouts.MODELOPT | excluded)
    check_alike(tmp_path / "plain", tmp_path / "quantised")
