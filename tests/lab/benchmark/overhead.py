"""What specdist adds to the models' work: single passes, heads and features after a draft step, and the
policies' own arithmetic.

What is compared is timed in turn, with both models in this process and without prompts.

- *Passes*: the flat forward over the paged cache beside transformers' own forward over a ``DynamicCache``.
- *Heads*: timed after a real draft step, where its weights are as cold and the device as busy as in a run.
  The time depends on the head's shape alone, so untrained heads of several depths are timed.
- *Policies, by parts*: the features are timed after a draft step too; a stopwatch surrounds every call of the
  policy in runs of the engine. So parts can be told apart from a round a thousand times as long.
- *Features, as a whole*, to see that the parts are complete: a policy that reads features but always drafts K
  tokens does the same passes on the same tokens as ``fixed``, and the two are run in pairs. Their difference
  includes the indexing between the parts, and on a GPU the host's waiting after every token, where ``fixed``
  waits once per round. It is a small difference of two large times, so its quartiles are given.

B rows, C context tokens, N new tokens per row, V vocabulary, H hidden size.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdist.data.stats.shard import NS_PER_S, Stats
from specdist.engine.times.timeline import timed
from specdist.lab.benchmark.methods import Row, Specdist, shortened
from specdist.lab.benchmark.pair import DraftOrder, PagedPair, fixed_length
from specdist.models.heads.head import NUM_FEATURES, TokenHead
from specdist.models.passes.hidden import with_head_logits
from specdist.policies import LengthPolicy
from specdist.policies.choice import PolicyChoice
from specdist.policies.costs import Curve
from specdist.policies.registry import uses_features
from specdist.sampling.branch_estimates import draft_distributions, draft_features
from specdist.sampling.distributions import SamplingSettings
from tests.lab.benchmark.passes import FlatPass, PlainPass, in_turn, random_rows

OVERHEAD_BATCH_SIZES = (1, 8)
HEAD_DEPTHS = (0, 1, 3)
# Draft steps are short, so each repeat takes several.
STEPS_PER_REPEAT = 10
NUM_CONTEXT_TOKENS = 16
MAX_NEW_TOKENS = 32
NUM_RUNS = 3
QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True, kw_only=True)
class PassOverhead:
    """Medians in seconds of one kind of pass; ``ratio`` is specdist's over transformers'."""

    batch_size: int
    num_new_tokens: int
    num_context_tokens: int
    specdist_s: float
    transformers_s: float
    ratio: float
    num_passes: int


@dataclass(frozen=True, kw_only=True)
class HeadOverhead:
    """Medians of a draft step of one token for each of ``batch_size`` rows without a head, and of what a head
    of ``depth`` residual layers adds. ``share`` is the head's time over the step's: median and quartiles."""

    depth: int
    batch_size: int
    num_passes: int
    step_s: float
    head_s: float
    share: float
    lower: float
    upper: float


@dataclass(frozen=True, kw_only=True)
class PolicyOverhead:
    """By parts. Seconds are means per round; ``share`` is that of features and policy in a round."""

    label: str
    batch_size: int
    num_rounds: int
    round_s: float
    features_s: float
    policy_s: float
    share: float


@dataclass(frozen=True, kw_only=True)
class FeatureOverhead:
    """As a whole: a round of ``num_draft_tokens`` tokens without features (median), and how much longer it is
    with them: median of the pairs and quartiles."""

    batch_size: int
    num_draft_tokens: int
    num_pairs: int
    round_s: float
    extra_s: float
    lower_s: float
    upper_s: float

    @property
    def share(self) -> float:
        """Of the features in a round."""
        return self.extra_s / self.round_s


@torch.inference_mode()
def measure_passes(
    paged: PagedPair, *, num_context_tokens: int, num_draft_tokens: int, num_passes: int, seed: int
) -> list[PassOverhead]:
    """The target's decoding step and its block of ``num_draft_tokens`` + 1 tokens, at each batch size."""
    results = []
    for batch_size in OVERHEAD_BATCH_SIZES:
        for num_new_tokens in (1, num_draft_tokens + 1):
            sizes = batch_size, num_context_tokens, num_new_tokens
            rows = random_rows(paged.pair.vocab_size, *sizes, seed=seed)
            passes = FlatPass(paged, paged.target, *rows), PlainPass(paged, *rows)
            times_s = in_turn([one.seconds for one in passes], num_passes)
            specdist_s, transformers_s = np.median(times_s, axis=1).tolist()
            results.append(
                PassOverhead(
                    batch_size=batch_size,
                    num_new_tokens=num_new_tokens,
                    num_context_tokens=num_context_tokens,
                    specdist_s=specdist_s,
                    transformers_s=transformers_s,
                    ratio=specdist_s / transformers_s,
                    num_passes=num_passes,
                )
            )
    return results


def measure_heads(
    paged: PagedPair, batch_size: int, num_repeats: int, seed: int, *, uses_features: bool
) -> list[HeadOverhead]:
    """One result per depth."""
    runner = paged.draft
    hidden_size = runner.model.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(seed)
    hidden_BH = torch.randn(batch_size, hidden_size, generator=generator).to(runner.device, runner.dtype)
    features_3B = torch.rand(NUM_FEATURES, batch_size, generator=generator).to(runner.device)

    def after_step(head: TokenHead, logits_BV: Tensor) -> Callable[[], Tensor]:
        return partial(with_head_logits, logits_BV, head, hidden_BH, features_3B)

    heads = [
        TokenHead(hidden_size, depth, uses_features=uses_features).to(runner.device, runner.dtype)
        for depth in HEAD_DEPTHS
    ]
    num_passes = num_repeats * STEPS_PER_REPEAT
    found = _after_steps(paged, batch_size, [partial(after_step, head) for head in heads], num_passes, seed)
    results = []
    for depth, (steps_s, heads_s) in zip(HEAD_DEPTHS, found, strict=True):
        lower, median, upper = np.quantile(heads_s / steps_s, QUARTILES).tolist()
        results.append(
            HeadOverhead(
                depth=depth,
                batch_size=batch_size,
                num_passes=num_passes,
                step_s=float(np.median(steps_s)),
                head_s=float(np.median(heads_s)),
                share=median,
                lower=lower,
                upper=upper,
            )
        )
    return results


def measure_policies(
    paged: PagedPair, orders: Sequence[DraftOrder], rows: Sequence[Row], num_passes: int
) -> list[PolicyOverhead]:
    """One result per draft, on as many rows as its batch has."""
    features = {size: _features_curve(paged, size, num_passes) for size in {o.num_slots for o in orders}}
    return [_policy_overhead(paged, order, rows, features[order.num_slots]) for order in orders]


def measure_features(
    paged: PagedPair, batch_size: int, rows: Sequence[Row], num_draft_tokens: int, num_pairs: int
) -> FeatureOverhead:
    """Runs with and without features, in turn."""

    def round_s(choice: PolicyChoice) -> float:
        stats = _run(paged, DraftOrder(num_slots=batch_size, choice=choice), rows)
        return _decoding_s(stats) / stats.num_rounds

    choices = fixed_length(num_draft_tokens), fixed_length_told(num_draft_tokens)
    plain_s, told_s = in_turn([partial(round_s, choice) for choice in choices], num_pairs)
    lower, median, upper = np.quantile(told_s - plain_s, QUARTILES).tolist()
    return FeatureOverhead(
        batch_size=batch_size,
        num_draft_tokens=num_draft_tokens,
        num_pairs=num_pairs,
        round_s=float(np.median(plain_s)),
        extra_s=median,
        lower_s=lower,
        upper_s=upper,
    )


def fixed_length_told(num_draft_tokens: int) -> PolicyChoice:
    """Always this many draft tokens, with features: no entropy reaches the threshold, which is not a value
    that a user could give."""
    return PolicyChoice("svip", {"stop_root_entropy": math.inf, "max_draft_tokens": num_draft_tokens})


class Stopwatch(DraftOrder):
    """A draft whose policy's methods are timed, in ``ns``."""

    ns = 0

    def policy(self, settings: SamplingSettings) -> LengthPolicy:
        """With methods that are replaced in place, so that it keeps its class."""
        policy = super().policy(settings)
        for name in ("wants_more", "num_unanimous", "next_histories", "num_to_verify", "observe_tokens"):
            if hasattr(policy, name):
                # Into its dictionary: some policies are frozen dataclasses.
                vars(policy)[name] = partial(self._timed, getattr(policy, name))
        return policy

    def _timed(self, method: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter_ns()
        answer = method(*arguments)
        object.__setattr__(self, "ns", self.ns + time.perf_counter_ns() - begin)
        return answer


def _policy_overhead(
    paged: PagedPair, order: DraftOrder, rows: Sequence[Row], features: Curve
) -> PolicyOverhead:
    """The run of the median share."""
    results = []
    for _ in range(NUM_RUNS):
        stopwatch = Stopwatch(num_slots=order.num_slots, choice=order.choice, costs=order.costs)
        stats = _run(paged, stopwatch, rows)
        features_s = 0.0
        if uses_features(order.choice.policy) and stats.num_draft_passes:
            rows_per_step = stats.num_draft_tokens / stats.num_draft_passes
            features_s = stats.num_draft_passes * float(features(max(1.0, rows_per_step))) / NS_PER_S
        policy_s = stopwatch.ns / NS_PER_S
        results.append(
            PolicyOverhead(
                label=order.choice.label,
                batch_size=order.num_slots,
                num_rounds=stats.num_rounds,
                round_s=_decoding_s(stats) / stats.num_rounds,
                features_s=features_s / stats.num_rounds,
                policy_s=policy_s / stats.num_rounds,
                share=(policy_s + features_s) / _decoding_s(stats),
            )
        )
    return sorted(results, key=lambda result: result.share)[NUM_RUNS // 2]


def _run(paged: PagedPair, order: DraftOrder, rows: Sequence[Row]) -> Stats:
    """One row per slot, long enough to show the time of a round."""
    method = Specdist(paged, order)
    method.prepare()
    return method.generate(shortened(rows[: order.num_slots], MAX_NEW_TOKENS)).stats


def _decoding_s(stats: Stats) -> float:
    """Seconds of a run in one process, without the prompts' passes."""
    return (stats.target_ns.total - stats.target_ns.prefill - stats.draft_ns.prefill) / NS_PER_S


def _features_curve(paged: PagedPair, batch_size: int, num_passes: int) -> Curve:
    """Nanoseconds of the features of a draft step, by its number of rows."""
    settings, vocab_size = paged.settings, paged.assembly.vocab_size

    def after_step(logits_BV: Tensor) -> Callable[[], Tensor]:
        logits_BV = logits_BV[:, :vocab_size]
        zeros_B = torch.zeros(len(logits_BV), dtype=torch.int64)
        distributions, _, undecided = draft_distributions(logits_BV, settings, zeros_B, zeros_B)
        uniforms_B = zeros_B.double().to(distributions.device) if settings.is_random else None
        drawn_B = distributions.draw(uniforms_B)
        return lambda: draft_features(logits_BV, undecided, drawn_B, settings).cpu()

    sizes = sorted({1, batch_size})
    times_s = [_after_steps(paged, size, [after_step], num_passes, seed=0)[0, 1] for size in sizes]
    return Curve(sizes, [round(statistics.median(found_s) * NS_PER_S) for found_s in times_s])


@torch.inference_mode()
def _after_steps(
    paged: PagedPair,
    batch_size: int,
    extras: Sequence[Callable[[Tensor], Callable[[], Tensor]]],
    num_passes: int,
    seed: int,
) -> np.ndarray:
    """Seconds of draft steps of one token per row, and of extra work after them.

    Two runners, with and without a head, would differ by more than the head's time, because their tensors lie
    elsewhere in memory. So there is one, and the extra work is timed by itself, right after a step.

    Args:
        extras: each gets a step's logits and returns the action to time.

    Returns:
        float64 [extras, 2, passes]: the step, and the extra work after it.
    """
    rows = random_rows(paged.pair.vocab_size, batch_size, NUM_CONTEXT_TOKENS, 1, seed=seed)
    step, device = FlatPass(paged, paged.draft, *rows), paged.draft.device

    def step_and_extra(extra: Callable[[Tensor], Callable[[], Tensor]]) -> tuple[float, float]:
        step_s, logits_BV = _thread_timed(device, step.run)
        return step_s, _thread_timed(device, extra(logits_BV))[0]

    times_s = in_turn([partial(step_and_extra, extra) for extra in extras], num_passes)
    return times_s.transpose(0, 2, 1)


def _thread_timed(device: torch.device, action: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """On a CPU the seconds of this thread alone: on a shared machine the long step is interrupted more often
    than the short work after it, which would make the latter's share too small."""
    if device.type != "cpu":
        return timed(device, action)
    begin = time.thread_time()
    result = action()
    return time.thread_time() - begin, result
