"""A rank of a shared model that chooses its attention kernel and its products; run by test_probe.py."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from specdist.kernels import products as kernels
from specdist.models.attention.library_kernels import FlashAttention3Kernel
from specdist.models.attention.probe import choose_kernel
from specdist.models.passes import products
from tests import ranks
from tests.models.test_probe import LOCAL, PAGES, Work

# Where the project's kernel takes 2 seconds: the library's on both ranks, its faults, whether it is used.
CASES = (
    ((1.7, 1.9), ("", ""), False),
    ((1.7, 1.6), ("", ""), True),
    ((1.0, 1.0), ("windowless", ""), False),
)


def main() -> None:
    topology = ranks.join(tp_size=2)
    group = dist.new_group([0, 1], backend="gloo")
    for seconds, faults, is_used in CASES:
        work = Work()
        library = work.flash_attention_3(seconds[topology.rank], fault=faults[topology.rank])
        sys.modules["flash_attn_interface"] = library
        chosen = choose_kernel(
            [work.own(2.0), FlashAttention3Kernel()], [LOCAL], PAGES, timer=work.seconds_of, group=group
        )
        assert isinstance(chosen, FlashAttention3Kernel) == is_used, (topology.rank, seconds, faults)
    # Products of few tokens: the second rank finds the kernel slow for one, and wrong for another matrix.
    model = nn.ModuleList(nn.Linear(256, size, dtype=torch.bfloat16) for size in (100, 80))
    times = iter([1.2, 1.0, 1.2, 1.0, 1.2, 1.0 + 0.2 * topology.rank] * 2)
    own = kernels.few_tokens_product

    def wrong(x_TK: Tensor, numbers_NK: Tensor, *args: Any, **options: Any) -> Tensor:
        is_wrong = topology.rank == 1 and numbers_NK is model[1].weight
        return own(x_TK, numbers_NK, *args, **options) + is_wrong

    kernels.few_tokens_product, products.NUM_TOKENS, products.NUM_TURNS = wrong, (1, 2, 4), 1
    products.MIN_WEIGHTS = 1
    choice = products.choose_products(
        model, dtype=torch.bfloat16, device=torch.device("cpu"), group=group, measure=lambda _: next(times)
    )
    kernel, plain = [(2, products.KERNEL), (4, products.TORCH)], [(4, products.TORCH)]
    assert choice == {"100 × 256": kernel, "80 × 256": plain}, (topology.rank, choice)
    ranks.leave()


if __name__ == "__main__":
    main()
