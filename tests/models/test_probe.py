"""A kernel is used only if the probe found it right, and a log line says why another is not used."""

import logging

import pytest
import torch

from specdist.models.attention import AttentionKind, AttentionRules
from specdist.models.kernel import PagedKernel, VarlenKernel
from specdist.models.probe import choose_kernel, probe_kernel
from tests.models.kernels import NanKernel, PlainKernel, RaisingKernel, StaleKernel, WindowlessKernel

CPU = torch.device("cpu")
GLOBAL = AttentionKind(4, 2, 16, AttentionRules(None, None, None, {}))
LOCAL = AttentionKind(4, 2, 16, AttentionRules(0.3, 16, None, {}))
CAPPED = AttentionKind(4, 4, 16, AttentionRules(None, None, 2.0, {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_right_kernel_passes(dtype: torch.dtype, page_size: int) -> None:
    kinds = [GLOBAL, LOCAL, CAPPED]
    assert probe_kernel(PlainKernel(), kinds, page_size=page_size, dtype=dtype, device=CPU) is None


@pytest.mark.parametrize("kernel", [WindowlessKernel(), StaleKernel(), NanKernel()], ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_kernel_is_found_out(kernel: PagedKernel, dtype: torch.dtype) -> None:
    reason = probe_kernel(kernel, [GLOBAL, LOCAL], page_size=16, dtype=dtype, device=CPU)
    assert reason is not None and "differs from plain attention" in reason


def test_the_best_right_kernel_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    right = PlainKernel()
    with caplog.at_level(logging.INFO):
        chosen = choose_kernel(
            [RaisingKernel(), WindowlessKernel(), right, NanKernel()],
            [GLOBAL, LOCAL],
            page_size=16,
            dtype=torch.bfloat16,
            device=CPU,
        )
    assert chosen is right
    (message,) = caplog.messages
    assert "pages of 16 tokens in torch.bfloat16: plain; not used: raising: page size must be" in message
    assert "windowless: differs" in message and "trace" not in message and "nan" not in message


def test_without_a_right_kernel_none_is_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chosen = choose_kernel(
            [RaisingKernel(), NanKernel()], [GLOBAL], page_size=16, dtype=torch.float32, device=CPU
        )
    assert chosen is None
    (message,) = caplog.messages
    assert "SDPA on gathered pages; not used: raising" in message


def test_torchs_kernel_is_refused_where_it_cannot_run() -> None:
    """On a CPU it raises, whatever the dtype; a soft cap it would overlook."""
    common = {"page_size": 256, "dtype": torch.bfloat16, "device": CPU}
    assert probe_kernel(VarlenKernel(), [GLOBAL], **common) is not None
    reason = probe_kernel(VarlenKernel(), [CAPPED], **common)
    assert reason is not None and "soft cap" in reason
