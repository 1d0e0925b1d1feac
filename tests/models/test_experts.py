"""Experts that are cut over ranks give together what whole ones give, in every layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from specdist.models.loading.experts import cut_experts, cut_of

HIDDEN, WIDTH, NUM_EXPERTS, NUM_CHOSEN, NUM_TOKENS = 32, 24, 4, 2, 7
SIZES = {
    "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "intermediate_size": WIDTH,
    "num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS, "n_routed_experts": NUM_EXPERTS,
    "moe_num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN, "moe_topk": NUM_CHOSEN,
}  # fmt: skip
LAYOUTS: dict[str, tuple[type[nn.Module], str]] = {
    "halves after each other": (Qwen3MoeExperts, "qwen3_moe"),
    "turned": (AriaExperts, "aria_text"),
    "turned, halves in turns, with biases": (GptOssExperts, "gpt_oss"),
    "without a gate": (NemotronHExperts, "nemotron_h"),
}


def experts_of(layout: str) -> Any:
    module_class, family = LAYOUTS[layout]
    config = CONFIG_MAPPING[family](**{
        name: value for name, value in SIZES.items() if hasattr(CONFIG_MAPPING[family](), name)
    })  # fmt: skip
    config._experts_implementation = "eager"
    module = module_class(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module.requires_grad_(False)


def cut_for(whole: nn.Module, rank: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dist, "get_rank", lambda _: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda _: num_ranks)
    module: Any = copy.deepcopy(whole)
    assert cut_experts(module, None) == 1  # type: ignore[arg-type]
    for name, weight in whole.named_parameters():
        cut = cut_of(module, name)
        assert cut is not None
        places = [place for own in cut.ranges for place in own]
        part = weight.index_select(cut.dim, torch.tensor(places, dtype=torch.int64))
        parameter = module.get_parameter(name)
        parameter.data.zero_()
        if places:
            parameter.data.copy_(part)
    return module


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_parts_of_experts_make_whole_ones(
    monkeypatch: pytest.MonkeyPatch, layout: str, num_ranks: int
) -> None:
    whole = experts_of(layout)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    scores, chosen = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(NUM_CHOSEN)
    expected = whole(hidden, chosen, scores)
    parts = [cut_for(whole, rank, num_ranks, monkeypatch) for rank in range(num_ranks)]
    num_numbers = [sum(weight.numel() for weight in part.parameters()) for part in parts]
    biases = sum(weight.numel() for name, weight in whole.named_parameters() if name == "down_proj_bias")
    assert (
        num_numbers
        == [(sum(w.numel() for w in whole.parameters()) - biases) // num_ranks + biases] * num_ranks
    )
    found = torch.stack([part(hidden, chosen, scores) for part in parts])
    torch.testing.assert_close(found.sum(0), expected, atol=1e-4, rtol=1e-4)


def test_what_experts_give_is_summed_over_the_ranks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = cut_for(experts_of("turned"), 0, 2, monkeypatch)
    arguments = (torch.ones(3, HIDDEN), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    own = module(*arguments)
    summed: list[Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda output, group: summed.append(output.clone()))
    module.mp_group = "group"
    module(*arguments)
    assert len(summed) == 1 and torch.equal(summed[0], own)
    module.sum_over_ranks = lambda output: 2 * output
    assert torch.equal(module(*arguments), 2 * own) and len(summed) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda module: module.register_parameter("scale", nn.Parameter(torch.ones(1))), "has .*scale"),
        (lambda module: setattr(module, "has_post_expert_norm", True), "and not"),
        (lambda _: None, "5 ranks do not divide the 24"),
    ],
)
def test_experts_that_are_not_known_are_not_cut(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], words: str
) -> None:
    module = experts_of("turned")
    change(module)
    with pytest.raises(ValueError, match=words):
        cut_for(module, 0, 5, monkeypatch)
