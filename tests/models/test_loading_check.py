"""The loading check: what was loaded is the model in the files, or the job does not begin."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.attention.attention import AttentionRules
from specdist.models.batch.flat import causal_bias
from specdist.models.cache.key_value import BranchPageTable
from specdist.models.files.checkpoint import EXPERT_COUNTS, open_checkpoint
from specdist.models.loading.loading import load_whole
from specdist.models.sharding.experts import experts_of
from specdist.models.start_check.loading_check import (
    LoadingCheck,
    check_loading,
    relative_difference,
    run_loaded,
)
from specdist.models.start_check.reference import MOST_POSITIONS, Sample, choose_sample
from specdist.utils.errors import UserError
from tests.engine.test_rope_borders import model_of as with_border
from tests.models.all_families import build
from tests.models.families import VOCAB_SIZE, tiny_model

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


def checked(
    folder: Path, dtype: torch.dtype, spoil: Callable[[PreTrainedModel], object] = lambda _: None
) -> LoadingCheck:
    checkpoint = open_checkpoint("--target", str(folder))
    model: PreTrainedModel = load_whole(checkpoint, dtype=dtype, device=CPU)
    spoil(model)
    return check_loading(model, checkpoint, dtype=dtype, device=CPU, vocab_size=VOCAB_SIZE)


# One of each kind of attention and of positions.
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.bfloat16), ("gemma2", torch.float16), ("gpt_neox", torch.bfloat16),
        ("gpt2", torch.float32), ("granite_swa", torch.bfloat16), ("gpt_neo", torch.float16),
        ("youtu", torch.float32),
    ],
)  # fmt: skip
def test_families_can_be_checked(
    tmp_path: Path, family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """It says nothing of what it uses: the run says that."""
    caplog.set_level(logging.INFO)
    check = checked(saved(tmp_path, family), dtype)
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


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
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


def test_frequencies_in_bfloat16_are_found(tmp_path: Path) -> None:
    """The attention of this model is flat, and its output hardly changes: its queries do."""
    folder = saved(tmp_path, "gemma2", initializer_range=0.02)
    with pytest.raises(UserError, match=r"layer 0 queries differ by .* of their size") as error:
        # What DeepSpeed does to buffers.
        checked(folder, torch.bfloat16, lambda model: model.to(torch.bfloat16))
    assert "--target" in str(error.value) and "Nothing was generated" in str(error.value)


def without_window(*args: Any, **kwargs: Any) -> Tensor:
    return causal_bias(*args, **{**kwargs, "window": None})


def without_cap(*rules: Any) -> AttentionRules:
    return AttentionRules(*rules)._replace(softcap=None)


@pytest.mark.parametrize(
    ("place", "replacement"),
    [("batch.flat.causal_bias", without_window), ("families.dry_run.AttentionRules", without_cap)],
)
def test_faults_of_the_run_s_own_attention_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, replacement: Callable[..., Any]
) -> None:
    """A reference that runs the same attention has the same faults."""
    folder = saved(tmp_path, "gemma2")
    assert checked(folder, torch.bfloat16).is_checked
    monkeypatch.setattr(f"specdist.models.{place}", replacement)
    with pytest.raises(UserError, match="was not loaded as it is in its files"):
        checked(folder, torch.bfloat16)


def test_a_rope_s_border_is_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_border("phi3").save_pretrained(tmp_path)
    assert checked(tmp_path, torch.float32).is_checked
    # Every row has the frequencies of its own; here each token has those of its position.
    monkeypatch.setattr(BranchPageTable, "are_long", lambda _, slots, positions, border: positions >= border)
    with pytest.raises(UserError, match="layer 0 queries differ by"):
        checked(tmp_path, torch.float32)


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

    def fails(model: PreTrainedModel, sample: Sample, device: torch.device) -> dict[str, Tensor]:
        if runs_in_full and len(sample.layers) == 4:
            return run_loaded(model, sample, device)
        raise KeyError(2)

    folder = saved(tmp_path, num_hidden_layers=4)
    monkeypatch.setattr("specdist.models.start_check.loading_check.run_loaded", fails)
    if runs_in_full:
        assert checked(folder, torch.float32).reason == "KeyError: 2"
        return
    with pytest.raises(UserError, match=r"--target .* does not run \(KeyError: 2\)\. Nothing was generated"):
        checked(folder, torch.float32)


def test_limits_of_time_steps_hold_for_every_token(tmp_path: Path) -> None:
    """transformers' single steps drop them: the sample is run in one pass."""

    def without_limits(model: PreTrainedModel) -> None:
        for module in model.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = (0.0, torch.inf)

    build("nemotron_h", time_step_min=0.5).save_pretrained(tmp_path)
    assert checked(tmp_path, torch.float32).is_checked
    with pytest.raises(UserError, match="differ by") as error:
        checked(tmp_path, torch.float32, without_limits)
    assert "--tp_size" not in str(error.value), "it is 1"


def test_nan_counts_as_a_difference(tmp_path: Path) -> None:
    def spoil(model: PreTrainedModel) -> None:
        model.get_parameter("model.norm.weight").data[3] = torch.nan

    with pytest.raises(UserError, match="logits differ by nan"):
        checked(saved(tmp_path), torch.float32, spoil)


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
    positions = sample.positions
    assert positions[:3] == (0, 1, 2) and positions[-1] == MOST_POSITIONS - 1
    assert sample.vocab_ids == tuple(range(VOCAB_SIZE)) and len(set(sample.token_ids)) > 20
