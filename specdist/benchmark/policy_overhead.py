"""What a length policy costs: its own arithmetic, and the features that the draft works out for it.

Measured in two ways, with both models in this process, where nothing hides behind the other side's work:

- *By parts.* A stopwatch stands around every call of the policy in a run of the engine. What the features of
  a draft step take is timed by itself, right behind real passes of the draft and with the device waited for,
  and counted for every step of that run. Parts can be told apart from a round a thousand times as long.
- *As a whole*, to see that nothing was forgotten. A policy that is told the features but always drafts K
  tokens does the same passes on the same tokens as ``fixed``, and the two are run in turn, in pairs. Their
  difference also holds the indexing between the parts, and on a GPU that the host must wait after every token
  where ``fixed`` waits once per round. It is the small difference of two large times, so its quartiles are
  given. A policy that always wants K tokens answers in no time, so beside the features nothing is in it.

Prompts are left out of all times.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from specdist.benchmark.drafts import DraftOrder, fixed_length
from specdist.benchmark.overhead import NUM_WARMUPS, FlatPass
from specdist.benchmark.paged import PagedPair
from specdist.benchmark.placements import SpecdistColocated
from specdist.benchmark.workload import Row
from specdist.costs import Curve
from specdist.engine.device_clock import timed
from specdist.policies import (
    BatchPolicy,
    DraftedRows,
    DraftFeatures,
    HeadPolicy,
    JudgedTokens,
    LengthPolicy,
    VerifiedBlocks,
)
from specdist.policy_options import PolicyChoice
from specdist.sampling.beliefs import draft_features, draft_laws
from specdist.sampling.distributions import Dense, SamplingSettings
from specdist.stats import NS_PER_S, Stats

MAX_NEW_TOKENS = 32
NUM_RUNS = 3
NUM_CONTEXT_TOKENS = 16

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class PolicyOverheadResult:
    """By parts. Seconds are means of a round; ``share`` is that of features and policy in it."""

    label: str
    batch_size: int
    num_rounds: int
    round_s: float
    features_s: float
    policy_s: float
    share: float


@dataclass(frozen=True, kw_only=True)
class FeaturesResult:
    """As a whole: what a round of ``num_draft_tokens`` tokens takes without features (median), and how much
    longer it is with them: median of the pairs and its quartiles."""

    batch_size: int
    num_draft_tokens: int
    num_pairs: int
    round_s: float
    extra_s: float
    lower_s: float
    upper_s: float

    @property
    def share(self) -> float:
        return self.extra_s / self.round_s


class TimedPolicy:
    """Another policy, and in ``ns`` the time that its answers have taken."""

    def __init__(self, policy: LengthPolicy) -> None:
        self._policy = policy
        self.ns = 0
        self.max_draft_tokens = policy.max_draft_tokens
        self.uses_features = policy.uses_features
        self.initial_history = policy.initial_history

    def wants_more(self, rows: DraftedRows) -> np.ndarray:
        return self._timed(lambda: self._policy.wants_more(rows))

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        return self._timed(lambda: self._policy.next_histories(blocks))

    def _timed(self, action: Callable[[], Answer]) -> Answer:
        begin = perf_counter_ns()
        answer = action()
        self.ns += perf_counter_ns() - begin
        return answer


class TimedBatchPolicy(TimedPolicy):
    """The same for one that looks at the whole batch."""

    def __init__(self, policy: BatchPolicy) -> None:
        super().__init__(policy)
        self._batch_policy = policy
        self.reads_head = policy.reads_head

    def num_to_verify(
        self, features: DraftFeatures, lengths_R: np.ndarray, num_other_tokens: int
    ) -> np.ndarray:
        return self._timed(lambda: self._batch_policy.num_to_verify(features, lengths_R, num_other_tokens))

    def observe_tokens(self, tokens: JudgedTokens) -> None:
        self._timed(lambda: self._batch_policy.observe_tokens(tokens))


class TimedHeadPolicy(TimedPolicy):
    """The same for one that reads a head."""

    def __init__(self, policy: HeadPolicy) -> None:
        super().__init__(policy)
        self.head_kind = policy.head_kind


def watched(policy: LengthPolicy) -> TimedPolicy:
    """The policy with a clock, asked in the way in which it would be."""
    if isinstance(policy, HeadPolicy):
        return TimedHeadPolicy(policy)
    return TimedBatchPolicy(policy) if isinstance(policy, BatchPolicy) else TimedPolicy(policy)


def measure_parts(
    paged: PagedPair, methods: Sequence[SpecdistColocated], rows: Sequence[Row], num_passes: int
) -> list[PolicyOverheadResult]:
    """Of every method that has a draft, on as many rows as its batch has."""
    features = {size: _features_curve(paged, size, num_passes) for size in {m.batch_size for m in methods}}
    return [_parts(paged, method, _short(rows, method), features[method.batch_size]) for method in methods]


def measure_whole(
    paged: PagedPair, batch_size: int, rows: Sequence[Row], num_draft_tokens: int, num_pairs: int
) -> FeaturesResult:
    """Runs with and without features, in turn, each first every other time."""
    pair = [
        SpecdistColocated(paged, DraftOrder(num_slots=batch_size, choice=choice))
        for choice in (fixed_length(num_draft_tokens), fixed_length_told(num_draft_tokens))
    ]
    some_rows = _short(rows, pair[0])
    rounds_s: list[list[float]] = [[], []]
    for number in range(NUM_WARMUPS + num_pairs):
        for index in (0, 1) if number % 2 else (1, 0):
            stats = _run(pair[index], some_rows)
            rounds_s[index].append(_decoding_s(stats) / stats.num_rounds)
    plain, told = (found[NUM_WARMUPS:] for found in rounds_s)
    extra = sorted(longer - shorter for shorter, longer in zip(plain, told, strict=True))
    lower, median, upper = np.quantile(extra, (0.25, 0.5, 0.75)).tolist()
    return FeaturesResult(
        batch_size=batch_size,
        num_draft_tokens=num_draft_tokens,
        num_pairs=num_pairs,
        round_s=statistics.median(plain),
        extra_s=median,
        lower_s=lower,
        upper_s=upper,
    )


def fixed_length_told(num_draft_tokens: int) -> PolicyChoice:
    """Always so many draft tokens, with features: no entropy reaches this threshold, which is no option."""
    return PolicyChoice("svip", {"stop_root_entropy": math.inf, "max_draft_tokens": num_draft_tokens})


def _parts(
    paged: PagedPair, method: SpecdistColocated, rows: Sequence[Row], features: Curve
) -> PolicyOverheadResult:
    runs = []
    for _ in range(NUM_RUNS):
        policy = paged.terms.policy(method.order)
        timed_policy = watched(policy)
        stats = _run(method, rows, timed_policy)
        features_ns = 0.0
        if policy.uses_features and stats.num_draft_passes:
            rows_per_step = stats.num_draft_tokens / stats.num_draft_passes
            features_ns = stats.num_draft_passes * float(features(max(1.0, rows_per_step)))
        runs.append((timed_policy.ns / NS_PER_S, features_ns / NS_PER_S, stats))
    share = [(policy_s + features_s) / _decoding_s(stats) for policy_s, features_s, stats in runs]
    policy_s, features_s, stats = runs[share.index(statistics.median(share))]
    return PolicyOverheadResult(
        label=method.order.choice.label,
        batch_size=method.batch_size,
        num_rounds=stats.num_rounds,
        round_s=_decoding_s(stats) / stats.num_rounds,
        features_s=features_s / stats.num_rounds,
        policy_s=policy_s / stats.num_rounds,
        share=statistics.median(share),
    )


def _run(method: SpecdistColocated, rows: Sequence[Row], policy: LengthPolicy | None = None) -> Stats:
    method.prepare()
    stats = method.generate(rows, policy).stats
    assert stats is not None
    return stats


def _short(rows: Sequence[Row], method: SpecdistColocated) -> list[Row]:
    """One row per slot, to a length that shows what a round takes."""
    return [
        dataclasses.replace(row, max_new_tokens=min(row.max_new_tokens, MAX_NEW_TOKENS))
        for row in rows[: method.batch_size]
    ]


def _decoding_s(stats: Stats) -> float:
    """Of a run in one process: all but the prompts' passes."""
    return (stats.target_ns.total - stats.target_ns.prefill - stats.draft_ns.prefill) / NS_PER_S


@torch.inference_mode()
def _features_curve(paged: PagedPair, batch_size: int, num_passes: int) -> Curve:
    """What the features of a draft step take, over its rows."""
    sizes = sorted({1, batch_size})
    return Curve(sizes, [_features_ns(paged, size, num_passes) for size in sizes])


def _features_ns(paged: PagedPair, num_rows: int, num_passes: int) -> int:
    """Median, behind passes of the draft."""
    runner, terms = paged.draft, paged.terms
    generator = torch.Generator().manual_seed(0)
    context_BC, new_BN = (
        torch.randint(terms.vocab_size, (num_rows, length), generator=generator)
        for length in (NUM_CONTEXT_TOKENS, 1)
    )
    flat = FlatPass(paged, runner, context_BC, new_BN)
    zeros_N = torch.zeros(num_rows, dtype=torch.int64)
    times = []
    for _ in range(NUM_WARMUPS + num_passes):
        logits_NV = flat.run()[:, : terms.vocab_size]
        laws, _, undecided = draft_laws(logits_NV, terms.settings, zeros_N, zeros_N)
        drawn_N = laws.draw(zeros_N.double().to(laws.device) if terms.settings.is_random else None)

        times.append(
            timed(runner.device, partial(_host_features, logits_NV, undecided, drawn_N, terms.settings))[0]
        )
    return round(statistics.median(times[NUM_WARMUPS:]) * NS_PER_S)


def _host_features(
    logits_NV: Tensor, undecided: Dense | None, drawn_N: Tensor, settings: SamplingSettings
) -> Tensor:
    return draft_features(logits_NV, undecided, drawn_N, settings).cpu()
