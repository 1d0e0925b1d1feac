"""The kernels of recurrent layers on a CPU, by plain operations: each one operator, as a recording has it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdist.models.recurrent import gated_delta, states
from specdist.models.recurrent import mamba as mamba_modules
from specdist.models.recurrent.kernels import Kernels
from tests.kernels import plain


@torch.library.custom_op("specdist_tests::mamba", mutates_args=("output", "held"))
def mamba(
    output: Tensor, held: Tensor, runs: Tensor, x: Tensor, steps: Tensor, b: Tensor, c: Tensor, rates: Tensor
) -> None:
    plain.mamba(output, held, runs, x, steps, b, c, rates)


@torch.library.custom_op("specdist_tests::delta_rule", mutates_args=("output", "held"))
def delta_rule(
    output: Tensor,
    held: Tensor,
    runs: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decays: Tensor,
    rates: Tensor,
) -> None:
    plain.delta_rule(output, held, runs, queries, keys, values, log_decays, rates)


def use_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this device had the kernels."""
    for module in (gated_delta, mamba_modules, states):
        monkeypatch.setattr(module, "kernels_on", lambda device: Kernels(mamba, delta_rule))
