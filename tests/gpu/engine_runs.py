"""The engine on the fake device against the engine on a CPU, in one process.

In float32 the CPU's run is the one of every other test: ragged passes, SDPA. In bfloat16 two ways to sum give
other tokens, so there the CPU runs the device's kernels, in static passes, and answers to the last bit.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from specdist.engine.request import Completion
from specdist.models.attention.kernel import TritonKernel, VarlenKernel
from specdist.models.passes.acceleration import Acceleration
from specdist.policies import LengthPolicy
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness, requests_for
from tests.gpu import project_kernels
from tests.gpu.device import DEVICE
from tests.gpu.flash_attention import flash_attention
from tests.models.families import VOCAB_SIZE

GPU = torch.device("cuda", 0)
RULES = {
    "greedy": SamplingSettings(temperature=0.0),
    "rejection": SamplingSettings(temperature=0.7),
    "top_p": SamplingSettings(temperature=0.9, top_p=0.9),
    "top_k": SamplingSettings(temperature=0.9, top_k=20, top_p=0.95),
    "gumbel": SamplingSettings(temperature=0.7, is_coupled=True),
}
MAX_DRAFT_TOKENS = 4
MODES: dict[str, dict[str, int]] = {
    "synchronous": {},
    "asynchronous": {"num_ahead_tokens": MAX_DRAFT_TOKENS + 1},
    "branches": {"num_ahead_tokens": MAX_DRAFT_TOKENS + 1, "num_branches": 2},
}
# Prompts that share a pass, one that is cut into chunks, and a row that waits until another has finished.
PROMPT_LENGTHS = (20, 9, 40, 14)
SIZES: dict[str, int] = {
    "max_new_tokens": 8,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 32,
    "max_seq_len": 96,
    "num_pages": 96,
}
KERNELS = (VarlenKernel(), TritonKernel())


@dataclass
class Pair:
    """A target and a draft, on the fake device and on a CPU.

    ``options`` are those of :class:`tests.engine.harness.Harness`, the same on both.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = SIZES | self.options
        self.on_gpu = Harness(self.target, self.draft, device=GPU, **options)
        if self.target.dtype == torch.float32:
            self.on_cpu = Harness(self.target, self.draft, **options)
            return
        with host_kernels():
            self.on_cpu = Harness(
                self.target,
                self.draft,
                acceleration=Acceleration(is_static=True, kernels=KERNELS),
                **options,
            )
        for runner in self.on_cpu.runners:
            runner.torch_pass._linears = None

    def check(
        self,
        settings: SamplingSettings,
        new_policy: Callable[[], LengthPolicy],
        rows: list[list[int]] | None = None,
    ) -> None:
        """Both give the same rows; the device replayed graphs and gave none of them up."""
        expected = self.expected(settings, new_policy, rows)
        DEVICE.reset()
        messages: list[str] = []
        with warnings_into(messages):
            found = generate(self.on_gpu, settings, new_policy, rows)
        assert not messages
        assert outcomes(found) == outcomes(expected), f"{settings} {new_policy()}"
        assert DEVICE.counts().num_replays > 0

    def expected(
        self,
        settings: SamplingSettings,
        new_policy: Callable[[], LengthPolicy],
        rows: list[list[int]] | None = None,
    ) -> list[Completion]:
        """The rows that the CPU gives."""
        with host_kernels(), _disable_current_modes():
            return generate(self.on_cpu, settings, new_policy, rows)


def generate(
    replica: Harness,
    settings: SamplingSettings,
    new_policy: Callable[[], LengthPolicy],
    rows: list[list[int]] | None = None,
) -> list[Completion]:
    """With a new policy: some learn during a run."""
    replica.settings, replica.policy = settings, new_policy()
    return replica.generate(requests_for(prompts() if rows is None else rows))


def prompts(lengths: Iterable[int] = PROMPT_LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, VOCAB_SIZE, size=length).tolist() for length in lengths]


def outcomes(completions: list[Completion]) -> list[tuple[Any, ...]]:
    return [(c.token_ids, c.finish_reason, c.error) for c in completions]


@contextlib.contextmanager
def warnings_into(messages: list[str]) -> Iterator[None]:
    """Collects the project's warnings inside the block."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("specdist")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def host_kernels() -> Iterator[None]:
    """The attention kernels for tensors on the host, by the same arithmetic as on the fake device."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch("torch.nn.attention.varlen.varlen_attn", _host_varlen_attn))
        # Without Triton neither device has the project's kernel.
        if importlib.util.find_spec("triton"):
            name = "specdist.kernels.paged_attention.paged_attention"
            stack.enter_context(patch(name, project_kernels.paged_attention))
        yield


def _host_varlen_attn(*arguments: Any, **options: Any) -> Tensor:
    return flash_attention(*arguments, **options)[0]
