"""LoRA adapters: the loaded model is PEFT's, and what cannot be merged is refused by name.

Over two ranks: ``test_parity.py``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdist.models.files.checkpoint import ADAPTER_CONFIG_NAME, Checkpoint, open_checkpoint
from specdist.models.loading.adapter_folder import WEIGHTS_NAME, open_adapter
from specdist.models.loading.loading import load_whole
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.models.start_check.loading_check import check_loading
from specdist.utils.errors import UserError
from tests.models.families import VOCAB_SIZE, tiny_model
from tests.models.peft_adapters import with_adapter, write_adapter

pytest.importorskip("peft")

CPU = torch.device("cpu")
PROJECTIONS = ["q_proj", "o_proj", "gate_proj", "down_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ranks and scales of modules": (
        "llama",
        {
            "target_modules": PROJECTIONS,
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 6},
            "alpha_pattern": {r"layers\.\d+\.self_attn\.o_proj": 17},
        },
    ),
    "vocabulary": ("llama", {"target_modules": ["v_proj", "embed_tokens", "lm_head"]}),
    "whole modules": ("llama", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "biases": ("qwen2", {"target_modules": ["k_proj", "up_proj"], "bias": "all"}),
    "joined projections": ("gpt_neox", {"target_modules": ["query_key_value", "dense_4h_to_h"]}),
    # Matrices of Conv1D are stored the other way round.
    "GPT-2": ("gpt2", {"target_modules": ["c_attn", "c_proj"]}),
}


def saved(folder: Path, family: str, **options: Any) -> tuple[Any, Path, Path]:
    model = tiny_model(family, tie_word_embeddings=False)
    model.save_pretrained(folder / "model")
    return model, folder / "model", write_adapter(model, folder / "adapter", **options)


def opened(model: Path, adapter: Path, **changes: Any) -> Checkpoint:
    checkpoint = replace(open_checkpoint("--target", str(model)), **changes)
    return replace(checkpoint, adapter=open_adapter("--target_adapter", str(adapter), checkpoint))


def refused(model: Path, adapter: Path, *words: str) -> None:
    """Opening them is refused with these words, and those of the option."""
    with pytest.raises(UserError) as raised:
        opened(model, adapter)
    for word in (f"--target_adapter {adapter}", *words):
        assert word in str(raised.value)


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_merged_model_is_peft_s(tmp_path: Path, name: str) -> None:
    family, options = ADAPTERS[name]
    plain, model, adapter = saved(tmp_path, family, **options)
    checkpoint = opened(model, adapter)
    loaded = load_whole(checkpoint, dtype=torch.float32, device=CPU)
    wanted = with_adapter(plain, adapter).merge_and_unload().state_dict()
    before = plain.state_dict()
    changed = set()
    for parameter, found in loaded.state_dict().items():
        torch.testing.assert_close(found, wanted[parameter], atol=2e-6, rtol=2e-6)
        if not torch.allclose(found, before[parameter], atol=1e-3):
            changed.add(parameter)
    assert checkpoint.adapter is not None and changed == checkpoint.adapter.parameters
    check = check_loading(loaded, checkpoint, dtype=torch.float32, device=CPU, vocab_size=VOCAB_SIZE)
    assert check.is_checked or family == "gpt2", check.reason


def test_a_model_that_is_quantised_while_it_is_loaded_is_quantised_with_its_adapter(tmp_path: Path) -> None:
    plain, model, adapter = saved(tmp_path, "llama", target_modules=PROJECTIONS)
    with_adapter(plain, adapter).merge_and_unload().save_pretrained(tmp_path / "merged")
    found, wanted = (
        load_whole(checkpoint, dtype=torch.float32, device=CPU)
        for checkpoint in (
            opened(model, adapter, quantization="int8"),
            replace(open_checkpoint("--target", str(tmp_path / "merged")), quantization="int8"),
        )
    )
    num_layers = 0
    for name, layer in found.named_modules():
        if isinstance(layer, QuantizedLinear):
            other = wanted.get_submodule(name)
            assert isinstance(other, QuantizedLinear)
            # A number on the border between two of 8 bits' may fall on the other side.
            is_same = layer.weight.numbers == other.weight.numbers
            assert is_same.float().mean() > 0.999
            num_layers += 1
    assert num_layers == 21
    check = check_loading(
        found, opened(model, adapter, quantization="int8"), dtype=torch.float32, device=CPU,
        vocab_size=VOCAB_SIZE,
    )  # fmt: skip
    assert check.is_checked, check.reason


def test_an_adapter_is_identified_by_its_contents(tmp_path: Path) -> None:
    _, model, adapter = saved(tmp_path, "llama", target_modules=["q_proj"])
    before = opened(model, adapter).adapter
    tensors = load_file(adapter / WEIGHTS_NAME)
    next(iter(tensors.values()))[0, 0] += 1
    assert before is not None
    digest = before.fingerprint()
    save_file(tensors, adapter / WEIGHTS_NAME)
    assert before.fingerprint() != digest


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "kind": ({"peft_type": "IA3"}, ["type IA3", "only LORA", "merge_and_unload"]),
    "start": ({"init_lora_weights": "pissa"}, ["init_lora_weights 'pissa'", "weight_conversion"]),
    "more than LoRA": ({"trainable_token_indices": [1, 2]}, ["trainable_token_indices", "merge_and_unload"]),
    "rank": ({"r": 8}, ["adapter_config.json", "r = 8", "has 4"]),
    "DoRA": ({"use_dora": True}, ["use_dora True", "not merged here", "merge_and_unload"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, words = REFUSED[case]
    _, model, adapter = saved(tmp_path, "llama", target_modules=["q_proj"])
    config = json.loads((adapter / ADAPTER_CONFIG_NAME).read_text())
    (adapter / ADAPTER_CONFIG_NAME).write_text(json.dumps(config | changes))
    refused(model, adapter, *words)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    _, _, adapter = saved(tmp_path, "llama", target_modules=["q_proj"])
    others = {
        "wider": tiny_model("llama", hidden_size=32, tie_word_embeddings=False),
        "other names": tiny_model("gpt_neox", tie_word_embeddings=False),
    }
    for name, words in (("wider", "of shape [4, 64]"), ("other names", "nothing in GPTNeoXForCausalLM")):
        others[name].save_pretrained(tmp_path / name)
        refused(tmp_path / name, adapter, words, "another model")


def test_missing_files_and_shared_or_quantised_weights_are_refused(tmp_path: Path) -> None:
    _, model, adapter = saved(tmp_path, "llama", target_modules=["lm_head"])
    tied = tiny_model("llama", tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "tied")
    with pytest.raises(UserError, match="the same weights for its embedding and its output head"):
        opened(tmp_path / "tied", adapter)
    (model / "quantize_config.json").write_text('{"bits": 4, "quant_method": "gptq"}')
    with pytest.raises(UserError, match=r"is quantised \(quantize_config.json declares gptq\): name the unq"):
        opened(model, adapter)
    (model / "quantize_config.json").unlink()
    (adapter / WEIGHTS_NAME).unlink()
    with pytest.raises(UserError, match=r"has no adapter_model.safetensors: name a folder that PEFT"):
        opened(model, adapter)


def test_an_adapter_file_without_plain_numbers_is_refused(tmp_path: Path) -> None:
    _, model, adapter = saved(tmp_path, "llama", target_modules=["q_proj"])
    tensors = load_file(adapter / WEIGHTS_NAME)
    name = next(iter(tensors))
    for changed, words in (
        (tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, f"{name} is stored as F8_E4M3: save the"),
        ({}, "holds no tensors: save the adapter again"),
    ):
        save_file(changed, adapter / WEIGHTS_NAME)
        refused(model, adapter, words)


def test_an_adapter_of_a_resized_vocabulary_is_refused_by_its_reason(tmp_path: Path) -> None:
    """PEFT saves the embedding and the head with it; that these are of another model would not be true."""
    _, model, _ = saved(tmp_path, "llama", target_modules=["q_proj"])
    resized = tiny_model("llama", tie_word_embeddings=False)
    resized.resize_token_embeddings(VOCAB_SIZE + 3, mean_resizing=False)
    adapter = write_adapter(
        resized, tmp_path / "resized", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
    )
    refused(
        model, adapter,
        f"trained with a vocabulary of {VOCAB_SIZE + 3} tokens", f"--target {model} has {VOCAB_SIZE}",
        f"resize_token_embeddings({VOCAB_SIZE + 3})", "adapter's tokenizer",
    )  # fmt: skip
