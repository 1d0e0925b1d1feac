"""What a dry run finds out: every layer's rule, and what is refused by name before weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, masking_utils

from specdist.models.attention.attention import ATTENTION_NAME, AttentionRules
from specdist.models.families.adapters import use_paged_attention
from specdist.models.families.dry_run import check_attention, window_of
from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading.places import check_weights
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.runner import ModelRunner
from specdist.utils.errors import UserError
from tests.models.all_families import WINDOW, build, tiny_config
from tests.models.families import tiny_model

CPU = torch.device("cpu")
REFUSED = {
    "doge": "a mask of its own",
    "diffllama": "two attentions in a layer",
    "moshi": f"a window of {WINDOW} tokens that the cache alone has",
}
# The mask alone says these windows; the layers' arguments do not.
WINDOWS = {"phimoe": {WINDOW}, "qwen2_moe": {None, WINDOW}, "gemma2": {None, WINDOW}, "stablelm": {None}}


def meta_model(family: str) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family))


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_not_implemented_is_refused_by_name_without_weights(family: str) -> None:
    with pytest.raises(UserError, match=REFUSED[family]) as error:
        check_attention(meta_model(family), "--target x")
    assert f"--target x is of the family {family}" in str(error.value)


@pytest.mark.parametrize("family", WINDOWS)
def test_windows_are_those_of_the_masks(family: str) -> None:
    check_attention(meta_model(family), "--target x")
    model = build(family)
    use_paged_attention(model)
    runner = ModelRunner(model, CPU, Acceleration(), model_impl="transformers")
    assert {rules.window for rules in runner._shapes.rules.values()} == WINDOWS[family]


def test_rules_are_read_off_transformers_own_functions() -> None:
    assert window_of(masking_utils.causal_mask_function, 100) is None
    assert window_of(masking_utils.sliding_window_causal_mask_function(7), 100) == 7
    assert window_of(masking_utils.sliding_window_causal_mask_function(100), 100) is None
    for function in (
        masking_utils.bidirectional_mask_function,
        masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)),
        masking_utils.sliding_window_bidirectional_mask_function(5),
    ):
        with pytest.raises(ValueError, match="neither causal nor a sliding window"):
            window_of(function, 100)


def test_sinks_are_a_rule_of_their_layer() -> None:
    """Kernels are then tried with them; a rank that has not those of its heads is not run."""
    model = tiny_model("granite_swa")
    use_paged_attention(model)
    runner = ModelRunner(model, CPU, Acceleration())
    assert {kind.rules for kind in runner._shapes.kinds} == {
        AttentionRules(0.3, window, None, has_sinks=True) for window in (None, 16)
    }
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(8))
    with pytest.raises(ValueError, match="8 attention sinks for 4 heads"):
        ModelRunner(model, CPU, Acceleration())


def test_an_argument_that_is_not_known_is_refused() -> None:
    """Whatever a later version of transformers hands over."""
    model = tiny_model("llama")
    use_paged_attention(model)

    def biased(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, object]) -> object:
        return args, {**kwargs, "position_bias": torch.zeros(1)}

    model.model.layers[1].self_attn.register_forward_pre_hook(biased, with_kwargs=True)
    with pytest.raises(UserError, match=r"llama, whose attention .* \(position_bias\)"):
        ModelRunner(model, CPU, Acceleration())


def test_the_checkpoint_s_own_configuration_stays_as_it_is(tmp_path: Path) -> None:
    """Models that are built from it for training run as transformers does."""
    tiny_model("llama").save_pretrained(tmp_path)
    checkpoint = open_checkpoint("--target", str(tmp_path))
    check_weights(checkpoint, 1)
    assert checkpoint.config._attn_implementation != ATTENTION_NAME
