"""A kernel is used only if the probe found it right; a log line says why another is not used."""

import logging

import pytest
import torch

from specdist.models.attention.attention import AttentionKind, AttentionRules
from specdist.models.attention.kernel import PagedKernel
from specdist.models.attention.probe import ProbePages, choose_kernel, probe_kernel
from tests.models.kernels import (
    NanKernel,
    PlainKernel,
    RaisingKernel,
    SinklessKernel,
    StaleKernel,
    WindowlessKernel,
)
from tests.ranks import run_ranks

CPU = torch.device("cpu")
PAGES = ProbePages(16, torch.float32, CPU)
GLOBAL = AttentionKind(4, 2, 16, AttentionRules(None, None, None))
LOCAL = AttentionKind(4, 2, 16, AttentionRules(0.3, 16, None))
CAPPED = AttentionKind(4, 4, 16, AttentionRules(None, None, 2.0))
SINKS = AttentionKind(4, 2, 16, AttentionRules(None, 16, None, has_sinks=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_right_kernel_passes(dtype: torch.dtype, page_size: int) -> None:
    kinds = [GLOBAL, LOCAL, CAPPED, SINKS]
    assert probe_kernel(PlainKernel(), kinds, ProbePages(page_size, dtype, CPU)) is None


@pytest.mark.parametrize(
    "kernel", [WindowlessKernel(), StaleKernel(), NanKernel(), SinklessKernel()], ids=lambda k: k.name
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_kernel_is_found_out(kernel: PagedKernel, dtype: torch.dtype) -> None:
    reason = probe_kernel(kernel, [GLOBAL, LOCAL, SINKS], ProbePages(16, dtype, CPU))
    assert reason is not None and "differs from plain attention" in reason


def test_the_best_right_kernel_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    right = PlainKernel()
    with caplog.at_level(logging.INFO):
        chosen = choose_kernel(
            [RaisingKernel(), WindowlessKernel(), right, NanKernel()],
            [GLOBAL, LOCAL],
            ProbePages(16, torch.bfloat16, CPU),
        )
    assert chosen is right
    (message,) = caplog.messages
    assert (
        "pages of 16 tokens in torch.bfloat16: plain; not used: raising: RuntimeError: page size must be"
        in message
    )
    assert "windowless: differs" in message and "trace" not in message and "nan" not in message


def test_without_a_right_kernel_none_is_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chosen = choose_kernel([RaisingKernel(), NanKernel()], [GLOBAL], PAGES)
    assert chosen is None
    (message,) = caplog.messages
    assert "SDPA on gathered pages; not used: raising" in message


def test_ranks_that_share_a_model_choose_the_same_kernel() -> None:
    """A kernel that is wrong on one of them is used by none."""
    run_ranks("tests.models.kernel_choice", 2)
