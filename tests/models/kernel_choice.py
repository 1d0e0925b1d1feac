"""A rank of a shared model that chooses its attention kernel; run by test_probe.py."""

from __future__ import annotations

import torch.distributed as dist

from specdist.models.attention.probe import choose_kernel
from tests import ranks
from tests.models.kernels import PlainKernel, WindowlessKernel
from tests.models.test_probe import LOCAL, PAGES


def main() -> None:
    topology = ranks.join(tp_size=2)
    group = dist.new_group([0, 1], backend="gloo")
    for faulty_rank in (0, 1, None):
        first = WindowlessKernel() if topology.rank == faulty_rank else PlainKernel()
        first.name, second = "first", PlainKernel()
        chosen = choose_kernel([first, second], [LOCAL], PAGES, group=group)
        assert chosen is (first if faulty_rank is None else second), (topology.rank, faulty_rank)
    ranks.leave()


if __name__ == "__main__":
    main()
