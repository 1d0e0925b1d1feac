"""Small arrays of the host on their way to a device: one copy for all, without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(device: torch.device, *numbers: np.ndarray | Tensor) -> tuple[Tensor, ...]:
    """The same numbers, all of eight bytes, on the device; on a host without a copy.

    A copy from pageable memory waits until the device has done all that it was given before. Torch gives
    pinned memory away again only when the copy from it is complete.
    """
    on_host = [torch.from_numpy(array) if isinstance(array, np.ndarray) else array for array in numbers]
    if device.type == "cpu":
        return tuple(on_host)
    packed = torch.cat([tensor.reshape(-1).view(torch.int64) for tensor in on_host]).pin_memory()
    parts = packed.to(device, non_blocking=True).split([tensor.numel() for tensor in on_host])
    return tuple(
        part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, on_host, strict=True)
    )
