"""A rank of a shared model that chooses its attention kernel; run by test_probe.py."""

from __future__ import annotations

import sys

import torch.distributed as dist

from specdist.models.attention.library_kernels import FlashAttention3Kernel
from specdist.models.attention.probe import choose_kernel
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
    ranks.leave()


if __name__ == "__main__":
    main()
