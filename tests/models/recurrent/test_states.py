"""Modules of recurrent layers in ragged passes with rollbacks, against transformers' own forward of each text
as a whole; states after thousands of rollbacks against those of a run without any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import KimiLinearConfig, Lfm2Config, OlmoHybridConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.pages import PageUpdates
from specdist.models.cache.prefix_states import Rollback
from specdist.models.recurrent.kinds import mixer_of
from specdist.models.recurrent.states import RecurrentStates, StatePass

CPU = torch.device("cpu")
WIDTH, NUM_SLOTS, BLOCK = 24, 3, 9
NO_ATTENTION = SimpleNamespace(attend=None)
LINEAR: dict[str, Any] = {
    "hidden_size": WIDTH, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6,
    "linear_value_head_dim": 8, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MODULES: dict[str, Callable[[], nn.Module]] = {
    "qwen3_next": lambda: Qwen3NextGatedDeltaNet(Qwen3NextConfig(**LINEAR), 0),
    "qwen3_5": lambda: Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**LINEAR), 0),
    "olmo_hybrid": lambda: OlmoHybridGatedDeltaNet(OlmoHybridConfig(**LINEAR), 0),
    "kimi_linear": lambda: KimiLinearDeltaAttention(
        KimiLinearConfig(**LINEAR, linear_num_heads=3, linear_head_dim=6), 0
    ),
    "lfm2": lambda: Lfm2ShortConv(
        Lfm2Config(hidden_size=WIDTH, num_hidden_layers=2, layer_types=["conv", "full_attention"]), 0
    ),
}


def module_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    module = MODULES[family]().float().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape))
    return module


class Slots:
    """A module's states, and what each slot has run and kept."""

    def __init__(self, module: nn.Module, rollback: Rollback) -> None:
        mixer = mixer_of(module)
        assert mixer is not None
        self.mixer, self.num_rollback = mixer, rollback.num_tokens
        self.states = RecurrentStates(
            {0: mixer.shape},
            num_slots=NUM_SLOTS,
            rollback=rollback,
            dtype=torch.float32,
            device=CPU,
            num_kept=2,
        )
        for held in (self.states.rings(0), *self.states.states.values()):
            held.fill_(torch.nan)  # of a sequence that was there before

    @torch.inference_mode()
    def run(self, parts: list[tuple[int, int, Tensor]]) -> Iterator[Tensor]:
        """(slot, first position, hidden states) of every segment of a pass, to its outputs."""
        slots_T = np.concatenate([np.full(len(hidden), slot) for slot, _, hidden in parts])
        positions_T = np.concatenate([begin + np.arange(len(hidden)) for _, begin, hidden in parts])
        batch = FlatBatch(np.zeros(len(slots_T), np.int64), slots_T, positions_T)
        rows_TR, rest = self.mixer.project(torch.cat([hidden for _, _, hidden in parts]))
        mixed_TO = StatePass(NO_ATTENTION, self.states, self.states.places(batch)).mix(self.mixer, rows_TR)
        yield from self.mixer.output(mixed_TO, rest).split([len(hidden) for _, _, hidden in parts])

    def state_of(self, slot: int, num_tokens: int) -> Tensor:
        """After so many tokens: one more pass leaves it after them."""
        list(self.run([(slot, num_tokens, torch.zeros(self.num_rollback, WIDTH))]))
        [held] = self.states.states.values()
        return held[slot].clone()


@torch.inference_mode()
@pytest.mark.parametrize("follows_committed", [True, False])
@pytest.mark.parametrize("family", MODULES)
def test_blocks_chunks_and_rollbacks_give_transformers_outputs(family: str, follows_committed: bool) -> None:
    module, generator = module_of(family), np.random.default_rng(3)
    hidden_STE = torch.randn(NUM_SLOTS, 150, WIDTH)
    expected_STE = module(hidden_STE)
    slots = Slots(module, Rollback(BLOCK, follows_committed))
    ends, num_passes, num_dropped = np.zeros(NUM_SLOTS, int), 0, 0
    while (ends < 150).any():
        parts, kept = [], []
        for slot in generator.permutation(NUM_SLOTS).tolist():
            length = min(150 - int(ends[slot]), int(generator.choice([1, 2, 5, BLOCK, BLOCK, 40, 90])))
            if not length:
                continue
            # Of a block the first token stays; of chunks of prompts all do.
            own = int(generator.integers(1, length + 1)) if length <= BLOCK else length
            hidden = hidden_STE[slot, ends[slot] : ends[slot] + length].clone()
            hidden[own:] = 5 * torch.randn(length - own, WIDTH)
            parts.append((slot, int(ends[slot]), hidden))
            kept.append(own)
        for (slot, begin, hidden), own, outputs in zip(parts, kept, slots.run(parts), strict=True):
            difference = (outputs[:own] - expected_STE[slot, begin : begin + own]).abs().max()
            assert difference < 2e-5 * expected_STE.abs().max(), (slot, begin, own)
            ends[slot] += own
            num_dropped += len(hidden) - own
        num_passes += 1
    assert num_passes > 5 and num_dropped > 10


@torch.inference_mode()
def test_hundreds_of_rollbacks_leave_the_state_of_a_run_without_any() -> None:
    """Of a target's blocks, and of a draft's single tokens, most of which are taken back."""
    module, generator = module_of("qwen3_5"), np.random.default_rng(5)
    module.A_log.copy_(torch.linspace(-9.0, 0.0, len(module.A_log)))  # some remember all of it
    hidden_TE = torch.randn(400, WIDTH)
    plain, draft = Slots(module, Rollback(1)), Slots(module, Rollback(5))
    target = Slots(module, Rollback(4, follows_committed=True))
    list(plain.run([(1, 0, hidden_TE[:150]), (2, 0, hidden_TE)]))
    for begin in range(400):
        right = hidden_TE[begin : begin + 1]
        wrong = 3 * torch.randn(int(generator.integers(1, 4)), WIDTH)
        list(target.run([(0, begin, torch.cat((right, wrong)))]))
        for place, hidden in enumerate((right, *wrong[:, None]) if begin < 150 else ()):
            list(draft.run([(2, begin + place, hidden)]))
    for found, expected in (
        (draft.state_of(2, 150), plain.state_of(1, 150)),
        (target.state_of(0, 400), plain.state_of(2, 400)),
    ):
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_branch_has_the_state_of_its_sequence_and_gives_its_own_back() -> None:
    module = module_of("qwen3_5")
    hidden_TE, other_TE = torch.randn(12, WIDTH), torch.randn(3, WIDTH)
    slots = Slots(module, Rollback(8))
    list(slots.run([(0, 0, hidden_TE)]))
    # It branches off before position 9.
    slots.states.copy(np.array([0]), np.array([2]))
    of_branch, of_sequence = slots.run([(2, 9, other_TE), (0, 12, other_TE[:1])])
    with torch.inference_mode():
        assert (of_branch - module(torch.cat((hidden_TE[:9], other_TE))[None])[0, 9:]).abs().max() < 2e-5
        assert (of_sequence - module(torch.cat((hidden_TE, other_TE[:1]))[None])[0, 12:]).abs().max() < 2e-5
        slots.states.copy(np.array([2]), np.array([0]))
        [after] = slots.run([(0, 12, hidden_TE[:2])])
        whole = module(torch.cat((hidden_TE[:9], other_TE, hidden_TE[:2]))[None])[0, 12:]
        assert (after - whole).abs().max() < 2e-5


def copies(*entries: tuple[int, int, int]) -> PageUpdates:
    """A slot, and the number of its state, which is kept after so many tokens, or begun with."""
    return PageUpdates.from_entries([(-1 - slot, length, number) for slot, length, number in entries])


@torch.inference_mode()
def test_a_sequence_goes_on_from_the_kept_state_of_its_prefix() -> None:
    """Of two that are kept; their own sequences have gone on, and the places are used again."""
    module = module_of("qwen3_5")
    module.A_log.copy_(torch.linspace(-9.0, 0.0, len(module.A_log)))  # some remember all of it
    common_TE, others_TE, rest_TE = (torch.randn(length, WIDTH) for length in (20, 40, 15))
    shared, plain = (Slots(module, Rollback(4, follows_committed=True)) for _ in range(2))
    shared.states.update(copies((0, 20, 1), (1, 40, 0)))
    list(shared.run([(0, 0, common_TE), (1, 0, others_TE)]))
    shared.states.update(copies((2, 0, 1), (1, 43, 1)))
    list(shared.run([(0, 20, others_TE[:5]), (2, 20, rest_TE), (1, 40, others_TE[:3])]))
    list(plain.run([(0, 0, torch.cat((common_TE, rest_TE)))]))
    expected = plain.state_of(0, 35)
    assert (shared.state_of(2, 35) - expected).abs().max() < 1e-5 * expected.abs().max()
    shared.states.update(copies((0, 0, 1)))
    list(shared.run([(0, 43, rest_TE)]))
    list(plain.run([(0, 0, torch.cat((others_TE, others_TE[:3], rest_TE)))]))
    expected = plain.state_of(0, 58)
    assert (shared.state_of(0, 58) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_state_of_another_length_is_not_kept() -> None:
    slots = Slots(module_of("lfm2"), Rollback(4))
    slots.states.update(copies((0, 16, 0)))
    with pytest.raises(RuntimeError, match=r"end after \[17\] tokens, not after \[16\]"):
        list(slots.run([(0, 0, torch.randn(17, WIDTH))]))


def test_positions_that_a_state_does_not_lead_to_are_an_error() -> None:
    slots = Slots(module_of("lfm2"), Rollback(4))
    list(slots.run([(0, 0, torch.randn(20, WIDTH))]))
    for begin in (15, 21):
        with pytest.raises(RuntimeError, match=f"do not lead to a token at position {begin}"):
            list(slots.run([(0, begin, torch.randn(1, WIDTH))]))
    list(slots.run([(0, 16, torch.randn(1, WIDTH))]))
