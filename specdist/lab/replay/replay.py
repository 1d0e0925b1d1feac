"""A run of the engine without models: synchronous rounds, whose outcomes are read from a trace.

The scheduler, the histories and the policy are the engine's own, and are called in its order: resolve the
last round, draft after every sequence's next token, commit, admit. The models' outputs come from the trace.
So a replay has the counts of a live run with ``--overlap synchronous`` and the same batches; drafting ahead
is not replayed, nor that a draft in the target's process is skipped in some rounds where ``goodput`` drafts
nothing. As on a CPU, drafting ends after a stop token; on a GPU, which does not check this between steps,
some blocks are drafted further and these tokens are dropped.

R sequences that decode, A of them that are still drafting, C tokens of several sequences, T places and D
depths of the trace.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from specdist.data.stats.shard import NS_PER_S, Stats
from specdist.engine.draft.steps.policy_state import PolicyState
from specdist.engine.request import Request, Sequence
from specdist.engine.schedule.plan import RoundPlan, SchedulerSettings
from specdist.engine.schedule.scheduler import Scheduler
from specdist.lab.replay.trace import ExhaustiveTrace
from specdist.models.cache.pages import PageTable
from specdist.policies import (
    BatchPolicy,
    DraftFeatures,
    DraftSequences,
    FixedLength,
    LengthPolicy,
    RoundContext,
    VerifiedTokens,
    needs_last_estimate,
    reads_head,
)
from specdist.policies.costs import CostModel


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Limits of the batch, as in :class:`specdist.engine.schedule.scheduler.SchedulerSettings`; there are
    always enough pages.

    ``page_size`` decides which prefixes of prompts are shared, and so how many tokens a sequence adds to the
    pass in which it is admitted.
    """

    max_num_seqs: int = 1
    max_num_batched_tokens: int = 2048
    page_size: int = 16


def make_scheduler(trace: ExhaustiveTrace, settings: ReplaySettings, max_draft_tokens: int) -> Scheduler:
    """A scheduler with all of the trace's prompts waiting, in order; ``row_id`` numbers them.

    As in the engine, fewer sequences run if ``max_num_batched_tokens`` does not hold a block of
    each.
    """
    requests = [
        Request(
            row_id=row,
            sample_index=0,
            prompt_ids=prompt.prompt_ids.tolist(),
            max_new_tokens=prompt.max_new_tokens,
        )
        for row, prompt in enumerate(trace.prompts)
    ]
    longest = max(len(prompt.prompt_ids) + prompt.max_new_tokens for prompt in trace.prompts)
    scheduling = SchedulerSettings(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_draft_tokens=max_draft_tokens,
        max_new_tokens=longest,
        max_seq_len=longest,
        seed=0,
    )
    # Each sequence's greatest length, its reserved block, and partly used pages at either end.
    pages_per_sequence = (
        sum(-(-length // settings.page_size) + 1 for length in (longest, max_draft_tokens + 1)) + 1
    )
    pages = PageTable(
        num_pages=scheduling.num_slots * pages_per_sequence,
        page_size=settings.page_size,
        num_slots=scheduling.num_slots,
    )
    return Scheduler(scheduling, pages, iter(requests))


@dataclass(frozen=True)
class Oracle:
    """The greedy oracle, a bound of every length policy (SpecDec++, Huang et al. 2024, Theorem 4.1).

    It drafts exactly as far as the target will accept, and :func:`replay` looks this up in the trace. With S
    the set of positions at which the draft's likeliest token differs from the target's, N_discarded = 0 and
    N_target = |S| + 1. Here S leaves out a completion's first token, which comes from the pass over the
    prompt, and its last one, after which nothing is verified.
    """

    @staticmethod
    def max_draft_tokens(trace: ExhaustiveTrace) -> int:
        """No cap except the length of a completion."""
        return max(prompt.max_new_tokens for prompt in trace.prompts)


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """The counts of a run, and its predicted time.

    Attributes:
        stats: ``num_row_steps``, ``num_draft_tokens``, ``num_accepted_tokens``, passes and histograms, as the
            engine counts them.
        draft_ns, target_ns: of all passes, by the measured curves; without prompts and the host's work.
    """

    stats: Stats
    draft_ns: float
    target_ns: float

    @property
    def verification_rate(self) -> float:
        """N_target / N (SpecDec++, section 5.1)."""
        return self.stats.num_row_steps / self.stats.num_completion_tokens

    @property
    def discard_rate(self) -> float:
        """N_discarded / N (SpecDec++, section 5.1), with the passes that drafted no token."""
        return self.stats.num_discarded / self.stats.num_completion_tokens

    @property
    def tokens_per_round(self) -> float:
        """Completion tokens per sequence and target pass."""
        return self.stats.num_completion_tokens / max(1, self.stats.num_row_steps)

    @property
    def tokens_per_s(self) -> float:
        """Predicted, for the whole batch."""
        return self.stats.num_completion_tokens * NS_PER_S / max(1.0, self.draft_ns + self.target_ns)


def replay(
    policy: LengthPolicy | Oracle,
    trace: ExhaustiveTrace,
    costs: CostModel,
    settings: ReplaySettings,
    head: int = 0,
    *,
    reads_drawing_state: bool = False,
) -> ReplayResult:
    """Run all prompts of the trace, in order. A ``policy`` that learns must be a new object.

    Args:
        head: index of the trace's head whose estimates a policy with a head gets.
        reads_drawing_state: this head does.

    Raises ValueError for a policy that may draft more than the trace has, or reads a head that it lacks.
    """
    if not isinstance(policy, Oracle) and policy.max_draft_tokens > trace.max_draft_tokens:
        raise ValueError(
            f"the policy drafts up to {policy.max_draft_tokens} tokens, and the trace has "
            f"{trace.max_draft_tokens}: collect a longer one, or lower the policy's cap"
        )
    if not isinstance(policy, Oracle) and reads_head(policy) and head >= trace.num_heads:
        raise ValueError(
            f"the policy reads head {head}, and the trace has {trace.num_heads}: collect it with heads"
        )
    return _Run(policy, trace, costs, settings, head, reads_drawing_state).run()


class _Run:
    def __init__(
        self,
        policy: LengthPolicy | Oracle,
        trace: ExhaustiveTrace,
        costs: CostModel,
        settings: ReplaySettings,
        head: int,
        reads_drawing_state: bool,
    ) -> None:
        self._trace = trace
        self._head = head
        self._costs = costs
        self._oracle = isinstance(policy, Oracle)
        self._policy: LengthPolicy = FixedLength(0) if isinstance(policy, Oracle) else policy
        self._batch_policy = self._policy if isinstance(self._policy, BatchPolicy) else None
        self._needs_last_estimate = needs_last_estimate(self._policy)
        self._decides_after_pass = self._needs_last_estimate and not reads_drawing_state
        self._reads_head = reads_head(self._policy)
        cap = policy.max_draft_tokens(trace) if isinstance(policy, Oracle) else policy.max_draft_tokens
        self._scheduler = make_scheduler(trace, settings, cap)
        self._policy_state = PolicyState(self._policy, self._scheduler.settings.num_slots)
        self._stats = Stats(num_completions=len(trace.prompts), num_completion_tokens=trace.num_tokens)
        self._draft_ns = 0.0
        self._target_ns = 0.0

    def run(self) -> ReplayResult:
        while not (plan := self._scheduler.plan()).is_empty:
            assert not plan.suspended_slots, "there are pages for all sequences"
            self._resolve(plan)
            num_drafted_R = self._draft(plan)
            self._policy_state.open(
                np.array([sequence.slot for sequence in plan.opened], np.int64),
                np.array([sequence.stream_key for sequence in plan.opened], np.int64),
            )
            self._verify(plan, num_drafted_R)
            self._stats.num_rounds += 1
        return ReplayResult(stats=self._stats, draft_ns=self._draft_ns, target_ns=self._target_ns)

    def _resolve(self, plan: RoundPlan) -> None:
        """Observe the last round, as :class:`specdist.engine.draft.draft_worker.DraftWorker` does."""
        slots_R = np.array([sequence.slot for sequence in plan.decoding], np.int64)
        num_candidates_R = np.array([sequence.num_candidates for sequence in plan.decoding], np.int64)
        num_accepted_R = np.array([sequence.num_accepted for sequence in plan.decoding], np.int64)
        self._policy_state.observe(slots_R, num_candidates_R, num_accepted_R)
        if self._batch_policy is None:
            return
        places_R = self._places(plan) - num_accepted_R - 1
        num_verified_R = num_accepted_R + (num_accepted_R < num_candidates_R)
        depths_C = np.arange(num_verified_R.sum()) - np.repeat(
            np.cumsum(num_verified_R) - num_verified_R, num_verified_R
        )
        places_C = np.repeat(places_R, num_verified_R)
        estimates_C = None
        if self._reads_head:
            # No pass was run over the last token of a block.
            is_read_C = depths_C + 1 < np.repeat(num_candidates_R, num_verified_R)
            found_C = self._trace.estimates_ETD[self._head, places_C, depths_C]
            estimates_C = np.where(is_read_C, found_C, np.nan)
        self._batch_policy.observe_tokens(
            VerifiedTokens(
                features=self._features_at(places_C, depths_C, estimates_C),
                depths_C=depths_C,
                is_accepted_C=depths_C < np.repeat(num_accepted_R, num_verified_R),
            )
        )

    def _places(self, plan: RoundPlan) -> np.ndarray:
        """[R]: the trace's place of each sequence's first candidate in this round, after its next token."""
        rows_R = np.array([sequence.request.row_id for sequence in plan.decoding], np.int64)
        lengths_R = np.array([sequence.num_completion_tokens for sequence in plan.decoding], np.int64)
        return self._trace.first_place_P[rows_R] + lengths_R + 1

    def _draft(self, plan: RoundPlan) -> np.ndarray:
        """[R]: candidates of each sequence, as :class:`specdist.engine.draft.steps.draft_loop.DraftLoop`
        drafts them."""
        limits_R = np.array(
            [0 if self._is_last(sequence) else limit
             for sequence, limit in zip(plan.decoding, plan.draft_limits, strict=True)], np.int64
        )  # fmt: skip
        # A sequence that ends with its next token has no place after it, and drafts nothing.
        places_R = np.where(limits_R > 0, self._places(plan), 0)
        if self._oracle:
            num_drafted_R = np.minimum(limits_R, self._trace.run_lengths_T[places_R])
            for depth in range(int(num_drafted_R.max(initial=0))):
                self._count_step(int((num_drafted_R > depth).sum()))
            return num_drafted_R
        slots_R = np.array([sequence.slot for sequence in plan.decoding], np.int64)
        num_context = sum(chunk.end - chunk.begin for chunk in plan.chunks)
        round = RoundContext(
            num_rows=len(slots_R), num_pass_tokens=len(slots_R) + num_context, is_asynchronous=False
        )
        num_drafted_R = np.zeros(len(slots_R), np.int64)
        active_A = np.arange(len(slots_R))
        for depth in itertools.count():
            keep_A = limits_R[active_A] > depth
            if depth:
                keep_A &= ~self._trace.is_stop_TD[places_R[active_A], depth - 1]
            active_A = active_A[keep_A]
            if self._decides_after_pass and depth and len(active_A):
                # The estimate of a token takes the pass over it, whether or not another token is drawn then.
                self._count_step(len(active_A))
            if len(active_A):
                wants_A = self._policy.wants_more(
                    DraftSequences(
                        slots_R=slots_R[active_A],
                        draft_slots_R=slots_R[active_A],
                        histories_RH=self._policy_state.of(slots_R[active_A]),
                        num_drafted=depth,
                        features=self._features(places_R[active_A], depth),
                        earlier_estimates_R=self._earlier_estimates(places_R[active_A], depth),
                        reach_R=np.ones(len(active_A)),
                        round=round,
                    )
                )
                if self._decides_after_pass and depth:
                    self._stats.num_empty_draft_steps += int((~wants_A).sum())
                active_A = active_A[wants_A]
            if not len(active_A):
                return num_drafted_R
            if not (self._decides_after_pass and depth):
                self._count_step(len(active_A))
            num_drafted_R[active_A] = depth + 1
        raise AssertionError("a block has an end")

    def _features(self, places_A: np.ndarray, depth: int) -> DraftFeatures | None:
        if depth and self._needs_last_estimate:
            return DraftFeatures.of_head(self._trace.estimates_ETD[self._head, places_A, depth - 1])
        if depth == 0 or not self._policy.uses_features:
            return None
        return self._features_at(places_A, depth - 1)

    def _features_at(
        self, places_C: np.ndarray, depths_C: np.ndarray | int, estimates_C: np.ndarray | None = None
    ) -> DraftFeatures:
        entropies_C, probabilities_C, top_C = self._trace.features_3TD[:, places_C, depths_C]
        return DraftFeatures(entropies_C, probabilities_C, top_C, estimates_C)

    def _earlier_estimates(self, places_A: np.ndarray, depth: int) -> np.ndarray | None:
        if depth < 2 or not self._reads_head or self._needs_last_estimate:
            return None
        found_A: np.ndarray = self._trace.estimates_ETD[self._head, places_A, depth - 2]
        return found_A

    def _count_step(self, num_rows: int) -> None:
        self._stats.num_draft_passes += 1
        self._stats.num_draft_row_steps += num_rows
        self._draft_ns += float(self._costs.draft(num_rows))

    def _verify(self, plan: RoundPlan, num_drafted_R: np.ndarray) -> None:
        """Commit the next tokens, then the blocks of the sequences that go on."""
        blocks: list[tuple[Sequence, int]] = []
        for sequence, num_drafted in zip(plan.decoding, num_drafted_R.tolist(), strict=True):
            is_last = self._is_last(sequence)
            sequence.begin_block(self._next_ids(sequence, 1)[0], num_drafted, missed=False)
            if is_last:
                self._scheduler.finish(sequence)
            else:
                blocks.append((sequence, num_drafted))
        self._stats.num_target_passes += bool(blocks or plan.chunks)
        self._target_ns += float(self._costs.target(sum(num_drafted + 1 for _, num_drafted in blocks)))
        for sequence, num_drafted in blocks:
            row, position = sequence.request.row_id, sequence.num_completion_tokens
            place = self._trace.first_place_P[row] + position
            num_accepted = min(num_drafted, int(self._num_accepted_T[place]))
            sequence.end_block(self._next_ids(sequence, num_accepted), num_drafted)
            self._stats.observe_block(num_drafted=num_drafted, num_accepted=num_accepted)
            if sequence.num_completion_tokens == self._trace.prompts[row].num_tokens:
                self._scheduler.finish(sequence)

    @property
    def _num_accepted_T(self) -> np.ndarray:
        return self._trace.run_lengths_T if self._oracle else self._trace.num_accepted_T

    def _is_last(self, sequence: Sequence) -> bool:
        """Whether the sequence ends with the next token of this round."""
        num_tokens = self._trace.prompts[sequence.request.row_id].num_tokens
        return sequence.num_completion_tokens + 1 == num_tokens

    def _next_ids(self, sequence: Sequence, count: int) -> list[int]:
        begin = sequence.num_completion_tokens
        ids: list[int] = (
            self._trace.prompts[sequence.request.row_id].completion_ids[begin : begin + count].tolist()
        )
        return ids
