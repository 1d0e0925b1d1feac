"""The loading check: what was loaded is the model in the files, or the job does not begin."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.attention.attention import AttentionRules
from specdist.models.batch.flat import causal_bias
from specdist.models.cache.branch_pages import BranchPageTable
from specdist.models.files.checkpoint import EXPERT_COUNTS, open_checkpoint
from specdist.models.loading.loading import load_whole
from specdist.models.sharding.experts import experts_of
from specdist.models.start_check.loaded_sample import run_loaded
from specdist.models.start_check.loading_check import LoadingCheck, check_loading, relative_difference
from specdist.models.start_check.reference import MOST_POSITIONS, Sample, choose_sample
from specdist.utils.errors import UserError
from tests.engine.test_rope_borders import BORDER
from tests.engine.test_rope_borders import model_of as with_border
from tests.models.all_families import build
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
def test_every_family_can_be_checked(tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture) -> None:
    """It says nothing of what it uses: the run says that."""
    caplog.set_level(logging.INFO)
    folder = saved(tmp_path, family)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check = checked(folder, dtype)
        assert check.is_checked, check.reason
        assert check.last_position >= 1023 and check.layers[0] == 0 and check.layers[-1] == 2
        # Numbers that have nothing to do with each other differ by about 1.4.
        assert check.difference <= check.tolerance < 0.7
    assert not [message for message in caplog.messages if message.startswith("layers of")]


@pytest.mark.parametrize(
    ("family", "changes", "layers"),
    [
        # Layers are what their numbers say.
        ("flint", {}, (0, 1, 2)),
        ("deepseek_v3", {"first_k_dense_replace": 2}, (0, 1, 2)),
        # Texts and images.
        ("got_ocr2", {}, (0, 2, 3)),
    ],
)
def test_families_in_which_a_few_layers_are_another_model_are_checked(
    tmp_path: Path, family: str, changes: dict[str, int], layers: tuple[int, ...]
) -> None:
    build(family, **changes).save_pretrained(tmp_path)
    check = checked(tmp_path, torch.float32)
    assert check.is_checked and check.layers == layers, check.reason


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe", "gpt_oss"])
def test_a_few_of_many_experts_are_compared(tmp_path: Path, family: str) -> None:
    """Stored one by one and joined; of routers that choose groups first, two of each."""
    counts = dict.fromkeys(EXPERT_COUNTS, 48)
    build(family, **counts, n_group=4, topk_group=2).save_pretrained(tmp_path)
    checkpoint = open_checkpoint("--target", str(tmp_path))
    model = load_whole(checkpoint, dtype=torch.float32, device=CPU)
    (*_, (_, experts)), before = experts_of(model), dict(vars(model.get_decoder().layers[-1].mlp))
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}

    def check() -> LoadingCheck:
        return check_loading(model, checkpoint, dtype=torch.float32, device=CPU, vocab_size=VOCAB_SIZE)

    chosen = choose_sample(checkpoint, VOCAB_SIZE, model).experts.chosen  # type: ignore[union-attr]
    assert len(chosen) == 16 and {number // 12 for number in chosen} == {0, 1, 2, 3}
    assert check().is_checked
    # The loaded model is as it was.
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert dict(vars(model.get_decoder().layers[-1].mlp)) == before
    others = [number for number in range(48) if number not in chosen]
    experts.down_proj.data[others] = 0
    assert check().is_checked, "only those that are compared are run"
    experts.down_proj.data[list(chosen[1:3])] = experts.down_proj.data[list(chosen[2:0:-1])]
    with pytest.raises(UserError, match="logits differ by"):
        check()


def test_why_a_family_is_not_checked_is_said(tmp_path: Path) -> None:
    build("gemma4_text").save_pretrained(tmp_path)
    assert checked(tmp_path, torch.float32).reason == (
        "one table has the inputs of all layers, and cannot be cut to those of a few"
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "phi"])
def test_frequencies_in_bfloat16_are_found(tmp_path: Path, family: str) -> None:
    """The attention of these models is flat, and their output hardly changes: their queries do."""
    folder = saved(tmp_path, family, initializer_range=0.02)
    with pytest.raises(UserError, match=r"layer 0 queries differ by .* of their size") as error:
        checked(folder, torch.bfloat16, "frequencies")
    assert "--target" in str(error.value) and "Nothing was generated" in str(error.value)


def rules_changed(**changed: float | None) -> Callable[..., AttentionRules]:
    return lambda *rules: AttentionRules(*rules)._replace(**changed)


def masked(*, window: Callable[[int | None], int | None], is_causal: bool = True) -> Callable[..., Tensor]:
    """Masks with another window than was asked for, or with nothing hidden."""

    def bias(*args: Any, **kwargs: Any) -> Tensor:
        found = causal_bias(*args, **{**kwargs, "window": window(kwargs["window"])})
        return found if is_causal else torch.zeros_like(found)

    return bias


# What is replaced in the attention of the run, and by what; the reference has none of it.
OFF_BY_ONE = ("batch.flat.causal_bias", masked(window=lambda window: window and window + 1))
FAULTS: dict[str, tuple[str, dict[str, Any], str, Any]] = {
    "causal mask dropped": (
        "llama", {}, "batch.flat.causal_bias", masked(window=lambda _: None, is_causal=False)
    ),
    "window dropped": ("mistral", {}, "batch.flat.causal_bias", masked(window=lambda _: None)),
    "window off by one": ("mistral", {}, *OFF_BY_ONE),
    "long window off by one": ("mistral", {"sliding_window": 1000}, *OFF_BY_ONE),
    "soft cap lost": ("gemma2", {}, "families.dry_run.AttentionRules", rules_changed(softcap=None)),
    "scale lost": (
        "gemma2", {"query_pre_attn_scalar": 100}, "families.dry_run.AttentionRules", rules_changed(scale=None)
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_run_s_own_attention_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A reference that runs the same attention has the same faults."""
    family, overrides, place, replacement = FAULTS[fault]
    folder = saved(tmp_path, family, **overrides)
    for dtype in (torch.float32, torch.bfloat16):
        assert checked(folder, dtype).is_checked
        with monkeypatch.context() as patch:
            patch.setattr(f"specdist.models.{place}", replacement)
            with pytest.raises(UserError, match="was not loaded as it is in its files"):
                checked(folder, dtype)


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_a_rope_s_border_is_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    with_border(family).save_pretrained(tmp_path)
    check = checked(tmp_path, torch.float32)
    assert check.is_checked and check.num_tokens == 2 * BORDER, "a row on each side"
    # Every row has the frequencies of its own; here each token has those of its position.
    monkeypatch.setattr(BranchPageTable, "are_long", lambda _, slots, positions, border: positions >= border)
    with pytest.raises(UserError, match="layer 0 queries differ by"):
        checked(tmp_path, torch.float32)


def test_a_window_that_no_row_goes_beyond_is_not_checked(tmp_path: Path) -> None:
    """GPT-Neo's masks are made with the model: the window cannot be shortened for the check."""
    check = checked(saved(tmp_path, "gpt_neo", window_size=600), torch.float32)
    assert not check.is_checked and check.reason == "a window of 600 tokens is too long for a check"


def test_a_reference_that_cannot_be_computed_is_reported_and_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a run may be right, but must not claim to be exact."""
    folder = saved(tmp_path)
    monkeypatch.setattr("specdist.models.start_check.reference.WeightNames", lambda _: 1 / 0)
    check = checked(folder, torch.float32)
    assert check.to_json() == {"is_checked": False, "reason": "ZeroDivisionError: division by zero"}


@pytest.mark.parametrize("runs_in_full", [False, True])
def test_a_model_that_does_not_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_in_full: bool
) -> None:
    """It was warned of, and generated with. A family of which only the few layers do not run may be right."""

    def fails(model: PreTrainedModel, sample: Sample, **how: Any) -> dict[str, Tensor]:
        if runs_in_full and len(sample.layers) == 4:
            return run_loaded(model, sample, **how)
        raise KeyError(2)

    folder = saved(tmp_path, num_hidden_layers=4)
    monkeypatch.setattr("specdist.models.start_check.loading_check.run_loaded", fails)
    if runs_in_full:
        assert checked(folder, torch.float32).reason == "KeyError: 2"
        return
    with pytest.raises(UserError, match=r"--target .* does not run \(KeyError: 2\)\. Nothing was generated"):
        checked(folder, torch.float32)


LIMITS = {"nemotron_h": {"time_step_min": 0.5}, "mamba2": {"time_step_limit": (0.2, 0.6)}}


@pytest.mark.parametrize("family", LIMITS)
def test_limits_of_time_steps_hold_for_every_token(tmp_path: Path, family: str) -> None:
    """transformers' single steps drop them: compared with those, a model that is right was refused."""
    build(family, **LIMITS[family]).save_pretrained(tmp_path)
    checkpoint = open_checkpoint("--target", str(tmp_path))
    model = load_whole(checkpoint, dtype=torch.float32, device=CPU)
    how = {"dtype": torch.float32, "device": CPU, "vocab_size": VOCAB_SIZE}
    assert check_loading(model, checkpoint, **how).is_checked
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, torch.inf)
    with pytest.raises(UserError, match="differ by") as error:
        check_loading(model, checkpoint, **how)
    assert "--tp_size" not in str(error.value), "it is 1"


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
    model = load_whole(checkpoint, dtype=torch.float32, device=CPU)
    sample = choose_sample(checkpoint, VOCAB_SIZE, model)
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
