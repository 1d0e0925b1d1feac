"""Tokens of layers with a state, and what one after the other makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdist.models.recurrent.mamba import Mamba2Tokens

# Of sums in another order, in units of the largest number.
TOLERANCE = 1e-5
NUM_SEQUENCES, HEADS, WIDTH, GROUPS, STATE = 3, 6, 5, 2, 7


def in_line(tokens_SL: Tensor) -> Tensor:
    """[T, ...]: each sequence's tokens, after a place that is of none."""
    return torch.nn.functional.pad(tokens_SL, (*2 * (tokens_SL.dim() - 2) * [0], 1, 0)).flatten(0, 1)


def runs_of(
    num_tokens: int, slots: Tensor, borders: Sequence[int], *, is_first: bool = False, begin: int = 0
) -> Tensor:
    """Of tokens in such a line, those from ``begin`` on, [5, S]; the states after ``borders`` of them."""
    firsts = torch.arange(len(slots)) * (num_tokens + 1) + 1 + begin
    is_first_S = torch.full_like(slots, is_first)
    return torch.stack((slots, is_first_S, firsts, firsts + num_tokens, firsts + torch.tensor(borders)))


class MambaTokens:
    """Of Mamba 1 or 2: some sequences with a state before them."""

    def __init__(
        self, version: int, num_tokens: int, sizes: tuple[int, ...] = (HEADS, WIDTH, GROUPS, STATE)
    ) -> None:
        """``sizes`` of Mamba 2: heads, their width, groups, and numbers of a state."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(NUM_SEQUENCES, *shape, generator=generator)

        num_heads, width, groups, state_size = sizes
        heads, width, groups = (num_heads, width, groups) if version == 2 else (1, num_heads, 1)
        steps = (2 * random(num_tokens, num_heads)).exp()
        of_states = (random(num_tokens, groups, state_size) for _ in range(2))
        self.tokens = Mamba2Tokens(random(num_tokens, heads, width), steps, *of_states)
        # Some remember all tokens, and some none.
        rates = -torch.logspace(-5, 1, num_heads * state_size if version == 1 else num_heads)
        self.rates = rates.view(num_heads, state_size) if version == 1 else rates
        self.state = random(heads, width, state_size)

    def one_by_one(self) -> tuple[Tensor, Tensor]:
        """In float64: outputs [S, L, H, P], and states after 0, 1, ... tokens [S, L + 1, H, P, N]."""
        x, steps, b, c = (part.double() for part in self.tokens)
        state = self.state.double()
        is_fine = self.rates.dim() == 2
        rates = self.rates.double() if is_fine else self.rates.double()[:, None, None]
        repeats = x.shape[2] // b.shape[2]
        outputs, states = [], [state]
        for token in range(x.shape[1]):
            step = steps[:, token, None, :, None] if is_fine else steps[:, token, :, None, None]
            b_SHN, c_SHN = (each[:, token].repeat_interleave(repeats, 1) for each in (b, c))
            state = state * (step * rates).exp() + step * x[:, token, ..., None] * b_SHN[:, :, None]
            outputs.append((state * c_SHN[:, :, None]).sum(-1))
            states.append(state)
        return torch.stack(outputs, 1), torch.stack(states, 1)


def difference(found: Tensor, wanted: Tensor) -> float:
    assert found.dtype == torch.float32 and found.shape == wanted.shape
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


class DeltaTokens:
    """Of the gated delta rule, [S, H, L, ...]: with a decay of each head or of each of its keys' numbers."""

    def __init__(self, num_tokens: int, num_decays: int, widths: tuple[int, int]) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(NUM_SEQUENCES, HEADS, *shape, generator=generator)

        key_width, value_width = widths
        self.queries, keys = random(num_tokens, key_width), random(num_tokens, key_width)
        self.keys = keys / keys.norm(dim=-1, keepdim=True)
        self.values = random(num_tokens, value_width)
        self.log_decays = -(2 * random(num_tokens, num_decays)).exp()
        self.rates = random(num_tokens, 1).sigmoid()
        self.state = random(key_width, value_width)

    def in_line(self) -> list[Tensor]:
        """As the kernel takes them."""
        parts = (self.queries, self.keys, self.values, self.log_decays)
        return [
            *(in_line(part.transpose(1, 2)) for part in parts),
            in_line(self.rates[..., 0].transpose(1, 2)),
        ]

    def one_by_one(self) -> tuple[Tensor, Tensor]:
        """In float64: outputs [S, H, L, V], and states after 0, 1, ... tokens [S, L + 1, H, K, V]."""
        parts = (self.queries, self.keys, self.values, self.log_decays, self.rates)
        state = self.state.double()
        outputs, states = [], [state]
        for query, key, value, log, rate in zip(*(part.double().unbind(2) for part in parts), strict=True):
            state = state * log.exp()[..., None]
            seen = (key[..., None] * state).sum(-2)
            state = state + key[..., None] * (rate * (value - seen))[..., None, :]
            outputs.append((query[..., None] * state).sum(-2))
            states.append(state)
        return torch.stack(outputs, 2), torch.stack(states, 1)
