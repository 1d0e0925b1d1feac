"""A kernel is used only if the probe found it right, and one of another library if it is faster, too; a log
line says why another is not used."""

import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdist.models.attention.attention import AttentionCall, AttentionKind, AttentionRules
from specdist.models.attention.kernel import PagedKernel
from specdist.models.attention.library_kernels import FlashAttention3Kernel, FlashInferKernel
from specdist.models.attention.probe import ProbePages, choose_kernel, plain_attention, probe_kernel
from specdist.models.batch.flat import PagedSegments
from tests.models.kernels import PlainKernel, WrongKernel
from tests.ranks import run_ranks

CPU = torch.device("cpu")
PAGES = ProbePages(16, torch.float32, CPU)
GLOBAL = AttentionKind(4, 2, 16, AttentionRules(None, None, None))
LOCAL = AttentionKind(4, 2, 16, AttentionRules(0.3, 16, None))
CAPPED = AttentionKind(4, 4, 16, AttentionRules(None, None, 2.0))
SINKS = AttentionKind(4, 2, 16, AttentionRules(None, 16, None, has_sinks=True))


@pytest.mark.parametrize(("dtype", "page_size"), [(torch.float32, 4), (torch.bfloat16, 16)])
def test_a_right_kernel_passes(dtype: torch.dtype, page_size: int) -> None:
    kinds = [GLOBAL, LOCAL, CAPPED, SINKS]
    assert probe_kernel(PlainKernel(), kinds, ProbePages(page_size, dtype, CPU)) is None


@pytest.mark.parametrize("fault", ["windowless", "another token's", "nan", "sinkless"])
def test_a_wrong_kernel_is_found_out(fault: str) -> None:
    reason = probe_kernel(WrongKernel(fault), [GLOBAL, LOCAL, SINKS], ProbePages(16, torch.bfloat16, CPU))
    assert reason is not None and "differs from plain attention" in reason


def test_the_best_right_kernel_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    right = PlainKernel()
    with caplog.at_level(logging.INFO):
        chosen = choose_kernel(
            [WrongKernel("raising"), WrongKernel("windowless"), right, WrongKernel("nan")],
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
        chosen = choose_kernel([WrongKernel("raising"), WrongKernel("nan")], [GLOBAL], PAGES)
    assert chosen is None
    (message,) = caplog.messages
    assert "SDPA on gathered pages; not used: raising" in message


class Work:
    """Stand-ins for kernels, whose calls take times of their own; ``spent`` is the clock."""

    def __init__(self) -> None:
        self.spent = 0.0

    def seconds_of(self, function: Callable[[], object]) -> float:
        before = self.spent
        function()
        return self.spent - before

    def own(self, seconds: float) -> PagedKernel:
        kernel = PlainKernel()
        attend = kernel.attend

        def timed(*args: Any) -> Tensor:
            self.spent += seconds
            return attend(*args)

        kernel.attend = timed  # type: ignore[method-assign]
        return kernel

    def flash_attention_3(self, seconds: float, *, fault: str = "", alone: float = 0.0) -> types.ModuleType:
        """As its interface is documented: the causal mask ends with the last key. ``alone``: seconds more of
        long sequences that are alone, in one split."""

        def flash_attn_with_kvcache(
            q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor,
            cu_seqlens_q: Tensor, max_seqlen_q: int, softmax_scale: float | None, causal: bool,
            window_size: tuple[int, int], softcap: float, num_splits: int, return_softmax_lse: bool,
        ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
            assert causal and num_splits >= 1 and max_seqlen_q >= int(cu_seqlens_q.diff().max())
            self.spent += seconds + alone * (len(page_table) == num_splits == 1)
            window = None if window_size[0] < 0 or fault == "windowless" else window_size[0] + 1
            output = attention(
                (q, k_cache, v_cache), page_table, cache_seqlens, cu_seqlens_q, softmax_scale, window, softcap
            )
            if fault == "neighbours":
                output = output + 1e-3 * len(page_table)
            if return_softmax_lse:
                # Of a value of ones the output with a sink of 0 is s / (s + 1), s being the weights' sum.
                with_sink = attention(
                    (q, k_cache, torch.ones_like(v_cache)), page_table, cache_seqlens, cu_seqlens_q,
                    softmax_scale, window, softcap, torch.zeros(q.shape[1]),
                )  # fmt: skip
                return output.to(q.dtype), torch.logit(with_sink[..., 0]).T
            return output.to(q.dtype)

        return module("flash_attn_interface", flash_attn_with_kvcache)

    def flash_infer(self, seconds: float) -> types.ModuleType:
        def trtllm_batch_context_with_kv_cache(
            query: Tensor, kv_cache: tuple[Tensor, Tensor], workspace_buffer: Tensor, block_tables: Tensor,
            seq_lens: Tensor, max_q_len: int, max_kv_len: int, bmm1_scale: float, bmm2_scale: float,
            batch_size: int, cum_seq_lens_q: Tensor, cum_seq_lens_kv: Tensor, window_left: int = -1,
            *, kv_layout: str, sinks: Tensor | None = None,
        ) -> Tensor:  # fmt: skip
            assert kv_layout == "HND" and bmm2_scale == 1 and batch_size == len(seq_lens)
            assert cum_seq_lens_kv.tolist() == [0, *seq_lens.cumsum(0).tolist()]
            assert max_q_len >= int(cum_seq_lens_q.diff().max()) and max_kv_len >= int(seq_lens.max())
            assert workspace_buffer.dtype == torch.uint8 and not workspace_buffer.any()
            self.spent += seconds
            keys, values = (pages.transpose(1, 2) for pages in kv_cache)
            window = None if window_left < 0 else window_left + 1
            tensors = query, keys, values
            return attention(
                tensors, block_tables, seq_lens, cum_seq_lens_q, bmm1_scale, window, 0.0, sinks
            ).to(query.dtype)

        return module("flashinfer.prefill", trtllm_batch_context_with_kv_cache)


def attention(
    tensors: tuple[Tensor, Tensor, Tensor], table: Tensor, used: Tensor, starts: Tensor,
    scale: float | None, window: int | None, softcap: float, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    segments = PagedSegments(table, used, starts, 0, 0)
    rules = AttentionRules(scale, window, softcap or None, sinks is not None)
    return plain_attention(AttentionCall(*tensors, rules, sinks), segments)


def module(name: str, function: Callable[..., Any]) -> types.ModuleType:
    made = types.ModuleType(name)
    setattr(made, function.__name__, function)
    return made


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (lambda work: None, "FlashAttention-3 on pages: import of flash_attn_interface"),
        (lambda work: work.flash_attention_3(1.0), ""),
        (
            lambda work: work.flash_attention_3(1.9),
            "FlashAttention-3 on pages: takes up to 0.95 times as long",
        ),
        (lambda work: work.flash_attention_3(1.0, fault="windowless"), "FlashAttention-3 on pages: differs"),
        (lambda work: work.flash_attention_3(1.0, fault="neighbours"), "numbers depend on the others"),
    ],
    ids=["absent", "faster", "hardly faster", "wrong", "depends on the batch"],
)
def test_a_kernel_of_a_library_is_used_if_it_is_right_and_faster(
    library: Callable[[Work], types.ModuleType | None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    work = Work()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", library(work))
    own, theirs = work.own(2.0), FlashAttention3Kernel()
    with caplog.at_level(logging.INFO):
        chosen = choose_kernel(
            [WrongKernel("raising"), own, theirs],
            [GLOBAL, LOCAL, CAPPED, SINKS],
            PAGES,
            timer=work.seconds_of,
        )
    (message,) = caplog.messages
    assert chosen is (own if said else theirs) and said in message
    assert said or "plain: takes up to 2.00 times as long" in message


def test_of_two_libraries_the_faster_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's kernel takes no soft cap: it is then not asked for a time. What is slow with a sequence
    alone is not used, however fast it is with others."""
    work = Work()
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", work.flash_infer(0.5))
    candidates = [work.own(2.0), FlashAttention3Kernel(), FlashInferKernel(), FlashAttention3Kernel(8)]
    for kinds, alone, place in (
        ([GLOBAL, LOCAL, SINKS], 0, 2), ([GLOBAL, CAPPED], 0, 1), ([GLOBAL, CAPPED], 1.5, 3),
    ):  # fmt: skip
        library = work.flash_attention_3(1.0, alone=alone)
        monkeypatch.setitem(sys.modules, "flash_attn_interface", library)
        chosen = choose_kernel(candidates, kinds, PAGES, timer=work.seconds_of)
        assert chosen is candidates[place]
        if alone:
            assert choose_kernel(candidates[:2], kinds, PAGES, timer=work.seconds_of) is candidates[0]


def test_ranks_that_share_a_model_choose_the_same_kernel() -> None:
    """Each has a clock of its own, and maybe a fault of its own."""
    run_ranks("tests.models.kernel_choice", 2)
