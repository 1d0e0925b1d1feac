"""The fake CUDA device of this process: tests of the GPU code paths begin here."""

from __future__ import annotations

from typing import Any

import torch

from specdist.models.passes import graphs
from tests.gpu.books import Counts, project_line
from tests.gpu.guard import install_guard, why_not
from tests.gpu.runtime import install_runtime
from tests.gpu.streams import install_streams
from tests.gpu.tensor import DEVICE, CudaTensor

__all__ = ["DEVICE", "Counts", "CudaTensor", "install", "prepare", "project_line", "why_not"]


def prepare() -> None:
    """To be called first: one thread, no gradients, and ``torch.inference_mode`` is ``torch.no_grad``.

    The tensors here wrap others, and a wrapper cannot be an inference tensor. Functions that were decorated
    with ``torch.inference_mode()`` before this call are changed by it as well.
    """
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.autograd.grad_mode.inference_mode.__enter__ = _enter_no_grad  # type: ignore[method-assign]
    torch.autograd.grad_mode.inference_mode.__exit__ = _exit_no_grad  # type: ignore[method-assign]


def install(num_warmups: int = 1) -> None:
    """From here on there is a CUDA device, until the process ends. Threads that start later know it only
    through tensors that are handed to them. Before a pass is recorded it runs ``num_warmups`` times: here a
    second one takes time and shows nothing."""
    install_guard()
    install_runtime()
    install_streams()
    graphs.NUM_WARMUPS = num_warmups
    # Module.to() replaces parameters: it cannot change what kind of tensor one is.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    # torch.tensor(numbers, device="cuda") is made on the host, and copied.
    torch._C._set_only_lift_cpu_tensors(True)
    DEVICE.__enter__()


def _enter_no_grad(self: Any) -> None:
    self._grad_was_enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(False)


def _exit_no_grad(self: Any, *error: Any) -> None:
    torch.set_grad_enabled(self._grad_was_enabled)
