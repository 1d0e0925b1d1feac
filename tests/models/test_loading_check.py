"""The loading check: what was loaded is the model in the files, or the job does not begin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from specdist.models.checkpoint import open_checkpoint
from specdist.models.loading import load_whole
from specdist.models.loading_check import LoadingCheck, check_loading, relative_difference
from specdist.models.reference import MOST_POSITIONS, choose_sample
from specdist.utils.errors import UserError
from tests.models.families import FAMILIES, VOCAB_SIZE, tiny_model
from tests.ranks import run_ranks

CPU = torch.device("cpu")
LONG = {"max_position_embeddings": 4096}
# GPT-Neo keeps a mask of all positions in every layer.
POSITIONS = {"gpt2": {"n_positions": 4096}, "gpt_neo": {"max_position_embeddings": 1024}}


def saved(folder: Path, family: str = "llama", **overrides: object) -> Path:
    """A tiny model for long texts, with norms that are not all ones."""
    model = tiny_model(family, **{**POSITIONS.get(family, LONG), **overrides})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.3, 1.7) if "norm" in name else parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


def checked(folder: Path, dtype: torch.dtype, spoil: str | None = None) -> LoadingCheck:
    checkpoint = open_checkpoint("--target", str(folder))
    model: PreTrainedModel = load_whole(checkpoint, dtype=dtype, device=CPU)
    if spoil == "frequencies":
        model.to(torch.bfloat16)  # what DeepSpeed does to buffers
    elif spoil is not None:
        weight = model.get_parameter(spoil)
        weight.data = weight.data.flip(0)
    return check_loading(model, checkpoint, dtype=dtype, device=CPU, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_checked(tmp_path: Path, family: str) -> None:
    folder = saved(tmp_path, family)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check = checked(folder, dtype)
        assert check.is_checked, check.reason
        assert check.last_position >= 1023 and check.layers[0] == 0 and check.layers[-1] == 2
        assert check.difference <= check.tolerance < 0.5


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "phi"])
def test_frequencies_in_bfloat16_are_found(tmp_path: Path, family: str) -> None:
    """The attention of these models is flat, and their output hardly changes: their queries do."""
    folder = saved(tmp_path, family, initializer_range=0.02)
    with pytest.raises(UserError, match=r"layer 0 queries differ by .* of their size") as error:
        checked(folder, torch.bfloat16, "frequencies")
    assert "--target" in str(error.value) and "Nothing was generated" in str(error.value)


def test_a_reference_that_cannot_be_computed_is_reported_and_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a run may be right, but must not claim to be exact."""
    folder = saved(tmp_path)
    monkeypatch.setattr("specdist.models.reference.WeightNames", lambda _: 1 / 0)
    check = checked(folder, torch.float32)
    assert check.to_json() == {"is_checked": False, "reason": "ZeroDivisionError: division by zero"}


def test_nan_counts_as_a_difference(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert checked(folder, torch.float32).is_checked
    checkpoint = open_checkpoint("--target", str(folder))
    model = load_whole(checkpoint, dtype=torch.float32, device=CPU)
    model.get_parameter("model.norm.weight").data[3] = torch.nan
    with pytest.raises(UserError, match="logits differ by nan"):
        check_loading(model, checkpoint, dtype=torch.float32, device=CPU, vocab_size=VOCAB_SIZE)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_difference_is_that_of_the_worst_token() -> None:
    wanted = torch.tensor([[1.0, -1.0], [2.0, -2.0]])
    # All logits shifted alike are the same distribution; the second token has lost a quarter of its size.
    found = torch.tensor([[6.0, 4.0], [1.5, -1.5]])
    assert relative_difference(found, wanted) == pytest.approx(0.25)


def test_the_sample_is_of_every_kind_of_layer_and_far_apart(tmp_path: Path) -> None:
    checkpoint = open_checkpoint("--target", str(saved(tmp_path, "gemma2", max_position_embeddings=10**5)))
    sample = choose_sample(checkpoint, VOCAB_SIZE)
    kinds = [checkpoint.config.layer_types[layer] for layer in sample.layers]
    assert set(kinds) == {"full_attention", "sliding_attention"}
    (positions,) = sample.rows
    assert positions[:3] == (0, 1, 2) and positions[-1] == MOST_POSITIONS - 1
    assert sample.vocab_ids == tuple(range(VOCAB_SIZE)) and len(set(sample.token_ids(0))) > 20


@pytest.mark.ranks
def test_planted_faults_of_slices_are_found(tmp_path: Path) -> None:
    """Each of them went unnoticed: the run ended with 0, and its manifest said that it was exact."""
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
    run_ranks("tests.models.planted_loading", 2, str(sound), str(fp8))
