"""flash-linear-attention, mamba_ssm and causal-conv1d as far as they are asked here, by one token after the
other: names and arguments are those of fla-org/flash-linear-attention (fla/ops/gated_delta_rule/chunk.py and
fla/ops/kda/chunk.py), state-spaces/mamba (mamba_ssm/ops/triton/ssd_combined.py) and Dao-AILab/causal-conv1d
(causal_conv1d/causal_conv1d_interface.py)."""

from __future__ import annotations

import sys
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specdist.models.recurrent.kernels import one_by_one_delta_rule, one_by_one_mamba

ASKED: Counter[str] = Counter()


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    ASKED["chunk_gated_delta_rule"] += 1
    assert g.shape == v.shape[:3]
    return _delta_rule(q, k, v, g[..., None], beta, scale, initial_state, output_final_state)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    ASKED["chunk_kda"] += 1
    assert g.shape == (*v.shape[:3], k.shape[3])
    return _delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state)


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None, state: Tensor | None,
    has_final: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    assert q.dtype == k.dtype == v.dtype and beta.shape == v.shape[:3] and v.shape[2] % q.shape[2] == 0
    state = torch.zeros(len(q), v.shape[2], k.shape[3], v.shape[3]) if state is None else state
    scale = k.shape[3] ** -0.5 if scale is None else scale
    outputs, states = one_by_one_delta_rule(state, scale * q.float(), k.float(), v.float(), g, beta)
    return outputs.to(v.dtype), states[-1].float() if has_final else None


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    ASKED["mamba_chunk_scan_combined"] += 1
    assert x.dtype == B.dtype == C.dtype and state_dtype == torch.float32 and initial_states is not None
    outputs, states = one_by_one_mamba(initial_states, x.float(), dt, B.float(), C.float(), A)
    return (outputs.to(x.dtype), states[-1]) if return_final_states else outputs.to(x.dtype)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    ASKED["causal_conv1d_fn"] += 1
    assert activation in (None, "silu", "swish") and x.dtype == weight.dtype and weight.shape[1] in (2, 3, 4)
    before = F.pad(x.float(), (weight.shape[1] - 1, 0))
    found = F.conv1d(
        before, weight[:, None].float(), None if bias is None else bias.float(), groups=x.shape[1]
    )
    return (found if activation is None else F.silu(found)).to(x.dtype)


MODULES = {
    "fla.ops.gated_delta_rule": chunk_gated_delta_rule,
    "fla.ops.kda": chunk_kda,
    "mamba_ssm.ops.triton.ssd_combined": mamba_chunk_scan_combined,
    "causal_conv1d": causal_conv1d_fn,
}


def install(monkeypatch: pytest.MonkeyPatch, **others: Any) -> None:
    """``others``: in the place of functions."""
    for path, function in MODULES.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if end == len(parts) or name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        name = function.__name__
        setattr(sys.modules[path], name, others.get(name, function))
