"""The engine on the fake device against the engine on a CPU, in one process and in float32.

There the CPU's run is the one of every other test: ragged passes and SDPA. Two devices differ by rounding
only, which changes no token here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from specdist.engine.request import Completion
from specdist.policies import FixedLength, Goodput, LengthPolicy
from specdist.policies.costs import CostModel, Curve
from specdist.policies.lengths.counted import GammaTunePlus
from specdist.policies.lengths.thresholds import ConfidenceThreshold, SpecDecPlusPlus, Sprinter
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness, requests_for
from tests.gpu.device import DEVICE
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
COSTS = CostModel(Curve([1, 401], [2000, 2400]), Curve([1, 101], [20, 60]))
# Prompts that share a pass, one that is cut into chunks, and a row that waits until another has finished.
PROMPT_LENGTHS = (20, 9, 40, 14)
SIZES: dict[str, int] = {
    "max_new_tokens": 8,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 32,
    "max_seq_len": 96,
    "num_pages": 96,
}


def policies(cap: int) -> dict[str, Callable[[], LengthPolicy]]:
    """A policy of every kind, with thresholds at which blocks of the tiny models have several lengths."""
    most = {"max_draft_tokens": cap}
    return {
        "fixed": lambda: FixedLength(cap),
        "confidence": lambda: ConfidenceThreshold(stop_probability=0.4, **most),
        "gammatune_plus": lambda: GammaTunePlus(
            num_draft_tokens=3, length_rate=0.5, stop_probability=0.4, **most
        ),
        "goodput": lambda: Goodput(costs=COSTS, is_coupled=False, **most),
        "specdecpp": lambda: SpecDecPlusPlus(stop_threshold=0.7, **most),
        "sprinter": lambda: Sprinter(verifier_threshold=0.5, **most),
    }  # fmt: skip


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
        self.on_cpu = Harness(self.target, self.draft, **options)

    def check(self, rule: str | SamplingSettings, policy: str, rows: list[list[int]] | None = None) -> None:
        """Both give the same rows; the device replayed graphs and gave none of them up."""
        with _disable_current_modes():
            expected = generate(self.on_cpu, rule, policy, rows)
        DEVICE.reset()
        messages: list[str] = []
        with warnings_into(messages):
            found = generate(self.on_gpu, rule, policy, rows)
        assert not messages
        assert outcomes(found) == outcomes(expected), f"{rule} {policy}"
        assert DEVICE.counts().num_replays > 0


def generate(
    replica: Harness, rule: str | SamplingSettings, policy: str, rows: list[list[int]] | None = None
) -> list[Completion]:
    """With a new policy: some learn during a run."""
    replica.settings = RULES[rule] if isinstance(rule, str) else rule
    replica.policy = policies(MAX_DRAFT_TOKENS)[policy]()
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
