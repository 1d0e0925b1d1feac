"""The main job on ranks with a fake GPU each: ``main`` replaces that of the job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from specdist.cli import generate
from tests.forked import World, started_world
from tests.gpu import process_groups
from tests.gpu.device import CudaTensor, install, prepare
from tests.gpu.referee import Referee, refereed
from tests.job.launching import TIMEOUT_S, Ended, job_arguments
from tests.job.ranks import free_port

# Seed and offset of a CUDA generator.
NUM_RANDOM_STATE_BYTES = 16
_load = PreTrainedModel.from_pretrained.__func__

Main = Callable[[Sequence[str]], int]


def main(given: Sequence[str]) -> int:
    """One rank of the job; its exit code."""
    use_fake_device()
    return generate(given)


def use_fake_device() -> None:
    """From here on this process has a GPU, and so have the other ranks."""
    prepare()
    process_groups.install()
    install()
    torch.cuda.get_rng_state = random_state
    torch.cuda.set_rng_state = set_random_state
    # What DeepSpeed finds where torch sees a GPU.
    os.environ["DS_ACCELERATOR"] = "cuda"
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    set_accelerator(CUDA_Accelerator())
    PreTrainedModel.from_pretrained = classmethod(_from_pretrained)
    torch.nn.Parameter.data = property(torch.Tensor.data.__get__, assign_data)


def assign_data(parameter: Any, value: torch.Tensor) -> None:
    """DeepSpeed moves a slice to the device by assigning to a parameter's ``data``: it changes kind."""
    torch.Tensor.data.__set__(parameter, value)  # type: ignore[attr-defined]
    if isinstance(value, CudaTensor):
        parameter.__class__ = CudaTensor
        parameter.host, parameter.memory = value.host, value.memory


def random_state(device: Any = None) -> torch.Tensor:
    return torch.zeros(NUM_RANDOM_STATE_BYTES, dtype=torch.uint8)


def set_random_state(state: torch.Tensor, device: Any = None) -> None:
    if state.is_cuda or state.numel() != NUM_RANDOM_STATE_BYTES:
        raise RuntimeError("RNG state must be a torch.ByteTensor of the size of a CUDA generator's")


def _from_pretrained(model_class: Any, *args: Any, device_map: Any = None, **options: Any) -> Any:
    """transformers reads weights straight onto a device, in threads that know of none: they are read first,
    then moved."""
    device = (device_map or {}).get("")
    if device is None or device.type != "cuda":
        return _load(model_class, *args, device_map=device_map, **options)
    with _disable_current_modes():
        loaded = _load(model_class, *args, device_map={"": torch.device("cpu")}, **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.to(device)
    return loaded


@dataclass(frozen=True)
class Refereed(Ended):
    """How the ranks ended, and what their referee saw."""

    referee: Referee


@contextlib.contextmanager
def started_gpu_ranks(
    num_ranks: int, rank: Main = main, environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator[tuple[World, Referee]]:
    """The job as so many ranks with a GPU each; ranks still alive at the end of the block are killed."""
    with refereed() as referee:
        found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        found |= referee.environment | dict(environment or {})
        given = job_arguments(rank, options | {"device": "cuda"})
        with started_world(num_ranks, rank, given, environment=found) as world:
            yield world, referee


def fork_gpu_ranks(
    num_ranks: int, rank: Main = main, environment: Mapping[str, str] | None = None, **options: Any
) -> Refereed:
    """The job as so many ranks with a GPU each, to its end."""
    with started_gpu_ranks(num_ranks, rank, environment, **options) as (world, referee):
        code = world.end(TIMEOUT_S)
        return Refereed(code, "".join(world.words("stdout")), "".join(world.words("stderr")), referee)
