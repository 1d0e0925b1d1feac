"""Memory that the ranks of a group read from one another, for sums over them.

M rows, W width of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from specdist.models.passes.fusing_trials import differences
from specdist.utils.trial import check_difference, tolerance_of

ONE_SHOT, MULTIMEM = "one-shot", "multimem"
TWO_SHOT, MULTIMEM_TWO_SHOT = "two-shot", "multimem two-shot"
# Programs of a kernel wait for those of other ranks: a device has more multiprocessors.
MAX_PROGRAMS = 64
# How often a kernel looks for its peers' signals: some minutes on a GPU (an estimate), and until it has been
# checked half a minute.
MOST_WAITS, CHECK_WAITS = 2**28, 2**26
# The norm by which the kernel is checked and measured.
NORM: dict[str, Any] = {"epsilon": 1e-5, "weight_offset": 0.0, "rounds_first": True}
# Sizes of the kernel's memory, see :mod:`specdist.kernels.peer_sums`.
GRAIN, SIGNAL_BYTES = 16, 8


def check_links(device: torch.device, group: dist.ProcessGroup) -> None:
    """Kernels that sum wait for signals by atomic operations in peers' memory, which only NVLink promises:
    over other links they may wait for ever. A collective of the group.

    Raises ValueError without NVLink to another GPU of every rank, and other errors where torch does not tell.
    """
    of_ranks: list[Any] = [device.index] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, device.index, group=group)
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

    num_links = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix[device.index]
    for rank, index in enumerate(of_ranks):
        if rank != dist.get_rank(group) and not num_links[index]:
            raise ValueError(f"no NVLink to the GPU of rank {rank}")


class SymmetricMemory:
    """Memory of a rank that its peers can read, on CUDA devices that can reach one another, as torch has it:
    one-shot sums. Every method may raise what torch raises."""

    def __init__(
        self, num_numbers: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self._rendezvous = symmetric_memory.rendezvous
        self._buffer_N = symmetric_memory.empty(num_numbers, dtype=dtype, device=device)
        self._group = group

    def connect(self) -> None:
        """A collective of the group."""
        self._rendezvous(self._buffer_N, self._group)

    def check(self) -> None:
        """Raises RuntimeError if a sum that has ended has waited for a rank in vain."""

    def sum(self, numbers_N: Tensor) -> Tensor:
        """[N]: over all ranks. A collective, and the same bits on each."""
        # The kernel copies the numbers into the buffer, and ends when all ranks have read it.
        found: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            self._buffer_N[: len(numbers_N)], numbers_N, "sum", self._group.group_name
        )
        return found


class SwitchMemory(SymmetricMemory):
    """The same, added by the switch of the links."""

    operator = "multimem_one_shot_all_reduce"

    def sum(self, numbers_N: Tensor) -> Tensor:
        own_N = self._buffer_N[: len(numbers_N)]
        own_N.copy_(numbers_N)  # the sum before ended when all ranks had read it
        found: Tensor = getattr(torch.ops.symm_mem, self.operator)(own_N, "sum", self._group.group_name)
        # One that is made in the memory is written over by the next.
        return numbers_N.copy_(found) if self.operator.endswith("_") else found


class TwoShotMemory(SwitchMemory):
    """Each rank sums a part, and writes it into the memory of all."""

    operator = "two_shot_all_reduce_"


class SwitchTwoShotMemory(SwitchMemory):
    """The same by the switch of the links, which adds the parts and sends them to all."""

    operator = "multimem_all_reduce_"


NewPeerMemory = Callable[[int, torch.dtype, torch.device, dist.ProcessGroup], SymmetricMemory]
WAYS: Mapping[str, NewPeerMemory] = {
    ONE_SHOT: SymmetricMemory,
    MULTIMEM: SwitchMemory,
    TWO_SHOT: TwoShotMemory,
    MULTIMEM_TWO_SHOT: SwitchTwoShotMemory,
}


class JoinedMemory(SymmetricMemory):
    """The memory of a kernel that sums rows of ``width`` numbers, adds a residual, and norms them."""

    max_rows, shares_rows = MAX_PROGRAMS, False

    def __init__(
        self, width: int, num_numbers: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        self._width, self._half = width, -(-num_numbers // GRAIN) * GRAIN
        num_signals = MAX_PROGRAMS * dist.get_world_size(group)
        super().__init__(2 * self._half + num_signals * SIGNAL_BYTES // dtype.itemsize, dtype, device, group)
        self._turns = torch.zeros(MAX_PROGRAMS, dtype=torch.int64, device=device)
        # In memory of the host, so that looking there waits for nothing.
        self._missing = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")

    def connect(self) -> None:
        own_N = self._buffer_N.zero_()
        assert not own_N.any()  # waits for it: nobody signals before
        found = self._rendezvous(own_N, self._group)
        ranks = range(dist.get_world_size(self._group))
        # The other, of older versions of torch, does not know where in an allocation a tensor begins.
        memory_of = getattr(found, "get_remote_tensor", found.get_buffer)
        addresses = [memory_of(rank, own_N.shape, own_N.dtype).data_ptr() for rank in ranks]
        self._peers_N = torch.tensor([*addresses, self._missing.data_ptr()], device=own_N.device)

    def sum(self, numbers_N: Tensor) -> Tensor:
        """The sum, with a residual of zeros. Raises ValueError if the norms are not those of the sums."""
        from specdist.kernels.layers import rms_norm  # Triton is not everywhere

        rows_MW = F.pad(numbers_N, (0, -len(numbers_N) % self._width)).view(-1, self._width)
        weight_W = torch.linspace(0.5, 1.5, self._width).to(numbers_N)
        sums_MW, normed_MW = self.residual_norm(
            rows_MW, torch.zeros_like(rows_MW), None, weight_W, most_waits=CHECK_WAITS, **NORM
        )
        difference, _ = differences(normed_MW, rms_norm(sums_MW, weight_W, **NORM))
        self.check()
        check_difference("norms of joined sums differ", difference, tolerance_of("formula", numbers_N.dtype))
        return sums_MW.view(-1)[: len(numbers_N)]

    def residual_norm(self, inputs: Tensor, *others: Tensor | None, **form: Any) -> tuple[Tensor, Tensor]:
        """The result of :func:`specdist.kernels.layers.residual_norm` of the sum of the inputs over the
        ranks."""
        from specdist.kernels import layers, shared_rows

        kernel = shared_rows.shared_residual_norm if self.shares_rows else layers.residual_norm
        where = {"rank": dist.get_rank(self._group), "half": self._half, "most_waits": MOST_WAITS}
        found: tuple[Tensor, Tensor] = kernel(inputs, *others, self._peers_N, self._turns, **where | form)
        return found

    def check(self) -> None:
        if missing := int(self._missing):
            rank = dist.get_global_rank(self._group, missing - 1)
            raise RuntimeError(f"rank {rank} never signalled that it has come to a sum over the ranks")


class SharedRowsMemory(JoinedMemory):
    """The memory of the kernel in which each rank sums its own rows alone."""

    max_rows, shares_rows = 512, True


# In the order of the lengths that they are for.
JOINED, SHARED_ROWS = "joined with norms", "joined with norms, rows shared out"
JOINED_WAYS = {JOINED: JoinedMemory, SHARED_ROWS: SharedRowsMemory}
