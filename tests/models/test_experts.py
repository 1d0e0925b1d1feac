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

from specdist.models.loading.packed_experts import EXPERTS_NAME
from specdist.models.recurrent.cuts import cut_of
from specdist.models.sharding.experts import _adds_up, cut_experts

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


def experts_of(layout: str, implementation: str = "eager") -> Any:
    module_class, family = LAYOUTS[layout]
    config = CONFIG_MAPPING[family](**{
        name: value for name, value in SIZES.items() if hasattr(CONFIG_MAPPING[family](), name)
    })  # fmt: skip
    config._experts_implementation = implementation
    module = module_class(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module.requires_grad_(False)


def cut_for(
    whole: nn.Module, rank: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch, **kwargs: bool
) -> Any:
    monkeypatch.setattr(dist, "get_rank", lambda _: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda _: num_ranks)
    module: Any = copy.deepcopy(whole)
    assert cut_experts(module, None, **kwargs) == 1  # type: ignore[arg-type]
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


@pytest.mark.parametrize("num_ranks", [2, 3])
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


@pytest.mark.parametrize(
    ("layout", "implementation"),
    [*zip(LAYOUTS, ("eager", "grouped_mm", EXPERTS_NAME, EXPERTS_NAME), strict=True)],
)
def test_ranks_of_whole_experts_give_together_what_all_give(
    monkeypatch: pytest.MonkeyPatch, layout: str, implementation: str
) -> None:
    """Three ranks do not divide four experts; four tokens and one, of which some ranks have no expert."""
    whole = experts_of(layout, implementation)
    parts = [cut_for(whole, rank, 3, monkeypatch, is_expert_parallel=True) for rank in range(3)]
    assert [len(part.down_proj) for part in parts] == [1, 1, 2]
    generator = torch.Generator().manual_seed(1)
    for num_tokens in (NUM_TOKENS, 1):
        hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
        scores, chosen = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(NUM_CHOSEN)
        given = [part(hidden, chosen, scores) for part in parts]
        for expected in (experts_of(layout)(hidden, chosen, scores), whole(hidden, chosen, scores)):
            torch.testing.assert_close(sum(given), expected, atol=1e-4, rtol=1e-4)
        # Of a token that has chosen none of a rank's experts it gives nothing at all.
        for part, own in zip(given, (range(1), range(1, 2), range(2, 4)), strict=True):
            is_own = torch.isin(chosen, torch.tensor([*own])).any(1)
            assert torch.equal(part.any(1), is_own)


def test_more_ranks_than_experts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="5 ranks are more than the 4 experts of "):
        cut_for(experts_of("turned"), 0, 5, monkeypatch, is_expert_parallel=True)


class Block(nn.Module):
    """Experts and a shared one; ``after``: what becomes of their sum."""

    def __init__(self, after: Callable[[Tensor, Tensor], Any], bias: bool = False) -> None:
        super().__init__()
        self.experts, self.after = experts_of("turned"), after
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.gate = nn.Linear(HIDDEN, NUM_EXPERTS)

    def forward(self, hidden: Tensor) -> Any:
        scores, chosen = self.gate(hidden[0]).softmax(-1).topk(NUM_CHOSEN)
        shared = self.gate(hidden)[..., :1].sigmoid() * self.down(self.up(hidden))
        return self.after((self.experts(hidden[0], chosen, scores)[None] + shared) / 2, hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_what_a_block_adds_up_is_summed_together(dtype: torch.dtype) -> None:
    numbers = torch.randn(5, 4, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    later = nn.Linear(HIDDEN, HIDDEN).to(dtype)

    def is_found(after: Callable[[Tensor, Tensor], Any], bias: bool = False) -> bool:
        block: Any = Block(after, bias).to(dtype)
        found = _adds_up(block, [block.experts, block.down], numbers)
        assert "forward" not in vars(block.experts) and "forward" not in vars(block.down), "put back"
        return found

    assert is_found(lambda output, _: output) and is_found(lambda output, _: 2.5 * output)
    assert not is_found(lambda output, _: nn.functional.rms_norm(output, (HIDDEN,)))
    assert not is_found(lambda output, _: 30 * (output / 30).tanh())
    assert not is_found(lambda output, hidden: output + 0.01 * hidden)
    assert not is_found(lambda output, _: later(output)), "its bias would be added by every rank"
    assert not is_found(lambda output, _: (output, None))
    assert not is_found(lambda output, _: output, bias=True)


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
