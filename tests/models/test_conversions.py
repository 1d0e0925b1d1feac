"""Tensors that transformers joins or splits while it loads a model, put in their places one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading import conversions, loading, weight_names
from specdist.models.loading.conversions import Conversion, Piece, TracedTensor
from tests.models.all_families import build
from tests.models.live_bytes import LiveBytes

CPU = torch.device("cpu")
JOINED = [MergeModulelist(0), Concatenate(1)]
# Patterns of stored names, parameters, operations, and the shape of the stored tensors.
CONVERTERS: dict[str, tuple[Any, Any, list[ConversionOps], tuple[int, ...]]] = {
    "experts' halves": (["e.*.gate.weight", "e.*.up.weight"], "e.gate_up", JOINED, (6, 4)),
    "experts' halves, turned": (
        ["e.*.gate.weight", "e.*.up.weight"], "e.gate_up", [*JOINED, Transpose(1, 2)], (6, 4),
    ),
    "experts": ("e.*.down.weight", "e.down", [MergeModulelist(0)], (6, 4)),
    "columns": (["q.weight", "k.weight"], "qk.weight", [Concatenate(1)], (6, 4)),
    "turned": ("down.weight", "turned.weight", [Transpose(0, 1)], (6, 4)),
    "split": ("qkv.weight", ["q.weight", "k.weight", "v.weight"], [Chunk(0)], (6, 4)),
    "split along columns": ("qk.weight", ["q.weight", "k.weight"], [Chunk(1)], (6, 4)),
}  # fmt: skip


@pytest.mark.parametrize("case", CONVERTERS)
def test_every_piece_lies_where_transformers_puts_it(case: str) -> None:
    sources, targets, operations, shape = CONVERTERS[case]
    converter = WeightConverter(sources, targets, operations)
    names = {
        pattern: [f"m.{pattern}".replace("*", str(i)) for i in range(3 if "*" in pattern else 1)]
        for pattern in converter.source_patterns
    }
    conversion = Conversion(f"m.{converter.target_patterns[0]}", converter, names)
    generator = torch.Generator().manual_seed(0)
    stored = {name: torch.randn(shape, generator=generator) for name in sorted(conversion.stored_names)}
    model: Any = type("Model", (), {"config": None})
    wanted = conversion.converted(stored, model)
    traced = {name: TracedTensor(shape, [Piece(name, (0, 0), shape)]) for name in stored}
    found = conversion.converted(traced, model)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        made = torch.full(tensor.shape, torch.nan)
        for piece in found[name].pieces:
            ends = [begin + length for begin, length in zip(piece.begin, piece.shape, strict=True)]
            place = made[tuple(slice(*each) for each in zip(piece.begin, ends, strict=True))]
            place.copy_(piece.of(stored[piece.source]))
        assert torch.equal(made, tensor), name


def test_twelve_experts_are_in_the_order_of_their_numbers(mixture: Path) -> None:
    names = weight_names.WeightNames(AutoModelForCausalLM.from_pretrained(mixture))
    stored = [f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in (11, 2, 10, 1)]
    (conversion,) = conversions._grouped(names, stored)
    assert list(conversion.sources.values()) == [[stored[3], stored[1], stored[2], stored[0]]]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    build("qwen3_moe").save_pretrained(folder)
    return folder


def test_what_transformers_alone_can_convert_it_does(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("llama").save_pretrained(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    checkpoint = open_checkpoint("--target", str(tmp_path))
    plain = loading.load_whole(checkpoint, dtype=torch.float32, device=CPU).get_parameter(name).clone()
    converter = WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [Interleave(0)])
    monkeypatch.setattr(weight_names, "get_model_conversion_mapping", lambda _: [converter])
    found = loading.load_whole(checkpoint, dtype=torch.float32, device=CPU).get_parameter(name)
    assert torch.equal(found, torch.stack([plain[0::2], plain[1::2]]).flatten(0, 1))


def test_experts_are_loaded_as_transformers_does_one_by_one(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint("--target", str(mixture))
    wanted = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).state_dict()
    live, read = LiveBytes(), loading._read_weights

    def watched(*arguments: Any) -> None:
        with live:
            read(*arguments)

    monkeypatch.setattr(loading, "_read_weights", watched)
    model = loading.load_whole(checkpoint, dtype=torch.float32, device=CPU)
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    # Beside the window of the files no more is held than one stored tensor, which is never a layer's experts.
    assert live.peak < found["model.layers.0.mlp.experts.gate_up_proj"].nbytes / 2
