"""The round: resolve and draft, verify, commit; over and over, until every request is finished.

Every round commits (accepted + 1) tokens per row. A row without candidates is an ordinary row, so prompt,
target-only and speculative rounds are the same round.

With ``trusts_draft`` (SPRINTER, lossy) only the last candidate of a block is verified: drafting went on after
the others, since the verifier did not doubt them, and they are committed as they are. The pass runs them
nevertheless, for what the target remembers of them. The distribution after an accepted last one gives the
bonus token, as in every round.

R rows that decode, C candidates of all rows one after the other, T flat tokens, N tokens whose successor is
asked for, W places whose next token is drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from specdist.engine.blocks import Block, VerifyResult, block_batch, context_batch, verify
from specdist.engine.device_clock import clock_of
from specdist.engine.faults import (
    DraftOutOfMemory,
    NonFiniteGuard,
    first_line,
    is_out_of_memory,
    not_finite,
    too_large,
)
from specdist.engine.proposals import DRAW, NO_CONTEXT, OpenedRows, ProposalReply, ProposalRequest, Proposer
from specdist.engine.scheduler import RoundPlan, Scheduler
from specdist.engine.sequence import Completion, FinishReason, Sequence
from specdist.engine.stats_recorder import StatsRecorder
from specdist.engine.stopping import StopRules
from specdist.engine.targets import Target
from specdist.engine.timeline import Timeline
from specdist.engine.tracing import note_next_token
from specdist.engine.verify import VerifyInput
from specdist.models.flat import FlatBatch, arange_segments
from specdist.models.memory import peak_memory_bytes, release_memory
from specdist.sampling.distributions import NOT_FINITE, Distributions, OneHot
from specdist.stats.shard import TargetTimes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """How full it is: rows that run, and pages of the cache that are free."""

    num_rows: int = 0
    num_free_pages: int = 0


def never() -> bool:
    """Nobody asks to stop."""
    return False


class Engine:
    """Turns requests into completions, in whatever order they finish."""

    def __init__(
        self,
        *,
        target: Target,
        proposer: Proposer,
        scheduler: Scheduler,
        stop_rules: StopRules,
        stats_recorder: StatsRecorder,
        trusts_draft: bool = False,
        clock: Timeline | None = None,
        on_alone: Callable[[tuple[int, int] | None], None] = lambda row: None,
    ) -> None:
        """
        Args:
            trusts_draft: lossy: commit all candidates but the last of a block without verifying them.
            on_alone: told before every round which row and sample has the smallest batch for itself, if one
                has.
            clock: what is in no phase is the host's work.
        """
        self._target = target
        self._proposer = proposer
        self._scheduler = scheduler
        self._stop_rules = stop_rules
        self._stats_recorder = stats_recorder
        self._trusts_draft = trusts_draft
        self._clock = clock or Timeline("host", clock=clock_of(target.device))
        self._stream_keys = np.zeros(scheduler.settings.num_slots, np.int64)
        # The target's distributions at the next-token position of the last pass, and each row's place in
        # them.
        self._next_distributions: Distributions | None = None
        self._next_index_of: dict[int, int] = {}
        # Slots that were taken from their rows in rounds of which the draft has not heard, and whether it has
        # heard of this one.
        self._suspended_slots: list[int] = []
        self._is_heard = False
        self._nonfinite_guard = NonFiniteGuard()
        self._on_alone = on_alone

    @property
    def load(self) -> EngineLoad:
        """Between rounds."""
        return EngineLoad(
            num_rows=len(self._scheduler.running), num_free_pages=self._scheduler.num_free_pages
        )

    def run(self, should_stop: Callable[[], bool] = never) -> Iterator[Completion]:
        """Generate until the scheduler has nothing left, or until a round's end at which ``should_stop``;
        rows that are not finished then are lost. Ends the other ranks' loops when it is done."""
        self._clock.restart()
        is_end = False
        while not (is_end or should_stop()):
            plan = self._scheduler.plan()
            is_end = plan.is_empty
            finished: list[Sequence] = []
            if not is_end:
                self._run_or_shrink(plan, finished)
            for sequence in self._nonfinite_guard.released(finished, is_end=is_end):
                self._stats_recorder.record_completion(sequence)
                yield sequence.completion()
        self._proposer.close()
        self._target.close()

    def _run_or_shrink(self, plan: RoundPlan, finished: list[Sequence]) -> None:
        """A round, or the preparation of a smaller one where memory does not suffice."""
        self._is_heard = False
        self._on_alone(self._scheduler.lone_row)
        try:
            self._round(plan, finished)
            return
        except (RuntimeError, MemoryError) as error:
            # Ranks that are in the middle of a pass together cannot leave it one by one.
            if not is_out_of_memory(error) or not (
                self._target.is_alone or isinstance(error, DraftOutOfMemory)
            ):
                raise
            complaint = first_line(error)
        # The error is gone by now, and with it the tensors of the round.
        release_memory(self._target.device)
        self._stats_recorder.record_out_of_memory(plan)
        running = self._scheduler.running
        if self._is_heard:
            self._suspended_slots = [sequence.slot for sequence in running]
        else:
            self._suspended_slots += plan.suspended_slots
            self._suspended_slots += [sequence.slot for sequence in running if sequence not in plan.opened]
        culprit = self._scheduler.shrink()
        if culprit is not None:
            self._fail(culprit, too_large(complaint), finished)
        settings = self._scheduler.settings
        logger.warning(
            "out of memory (%s)%s: from here on at most %d rows and %d tokens at a time",
            complaint,
            "" if culprit is None else f", with row {culprit.request.row_id} alone, which ends as an error",
            settings.num_slots,
            settings.max_num_batched_tokens,
        )

    def _round(self, plan: RoundPlan, finished: list[Sequence]) -> None:
        self._stats_recorder.begin_round(plan)
        for sequence in plan.opened:
            self._stream_keys[sequence.slot] = sequence.stream_key
        traffic = self._target.traffic

        request = self._request(plan)
        with self._clock.phase("idle"):
            reply = self._proposer.propose(request, self._clock)
        self._is_heard, self._suspended_slots = True, []
        blocks, draft_probabilities_C = self._commit_next_tokens(plan, reply, finished)
        # With nothing to run the page updates are not sent: they are of rows that have just ended.
        num_block_tokens = sum(len(block.candidate_ids) + 1 for block in blocks)
        num_pass_tokens = num_block_tokens + len(request.context)
        pass_time = None
        if num_pass_tokens:
            with self._clock.mixed_phase(
                {"prefill": len(request.context), "verify": num_block_tokens}
            ) as pass_time:
                judged = self._verify(plan, request.context, blocks, draft_probabilities_C)
            for block, count, acceptance_K in judged.per_block(blocks):
                self._commit_block(block, count, acceptance_K, finished)

        self._stats_recorder.record_round(
            plan,
            target=TargetTimes(**self._clock.take()),
            reply=reply,
            num_pass_tokens=num_pass_tokens,
            pass_time=pass_time,
            target_traffic=self._target.traffic - traffic,
            target_peak_bytes=peak_memory_bytes(self._target.device),
        )

    def _request(self, plan: RoundPlan) -> ProposalRequest:
        drawn = [sequence.order for sequence in plan.decoding if sequence.forced_next_token is None]
        next_token_ids_R = np.array(
            [
                DRAW if sequence.forced_next_token is None else sequence.forced_next_token
                for sequence in plan.decoding
            ],
            np.int64,
        )
        next_distributions = None
        if drawn:
            assert self._next_distributions is not None
            index = torch.tensor([self._next_index_of[order] for order in drawn])
            next_distributions = self._next_distributions.select(index.to(self._next_distributions.device))
            if isinstance(next_distributions, OneHot):
                next_token_ids_R[next_token_ids_R == DRAW] = next_distributions.token_ids_N.cpu().numpy()
                next_distributions = None
        return ProposalRequest(
            page_updates=plan.page_updates,
            slots_R=np.array([sequence.slot for sequence in plan.decoding], np.int64),
            num_accepted_R=np.array([sequence.num_accepted for sequence in plan.decoding], np.int64),
            next_token_ids_R=next_token_ids_R,
            draft_now_R=self._draft_now(plan),
            next_distributions_W=next_distributions,
            suspended_slots=np.array(self._suspended_slots + plan.suspended_slots, np.int64),
            opened=OpenedRows(
                slots=np.array([sequence.slot for sequence in plan.opened], np.int64),
                stream_keys=np.array([sequence.stream_key for sequence in plan.opened], np.int64),
                num_misses=np.array([sequence.counters.num_misses for sequence in plan.opened], np.int64),
                context_lengths=np.array(
                    [
                        NO_CONTEXT if sequence.is_resumed else sequence.context_length
                        for sequence in plan.opened
                    ],
                    np.int64,
                ),
                max_lengths=np.array([sequence.max_length for sequence in plan.opened], np.int64),
            ),
            context=context_batch(plan),
        )

    def _draft_now(self, plan: RoundPlan) -> np.ndarray:
        """A draft that works ahead is not waited for: a row without candidates goes without."""
        if not self._scheduler.settings.num_ahead_tokens:
            return np.array(plan.draft_limits, np.int64)
        return np.array([sequence.num_redraft for sequence in plan.decoding], np.int64)

    def _commit_next_tokens(
        self, plan: RoundPlan, reply: ProposalReply, finished: list[Sequence]
    ) -> tuple[list[Block], np.ndarray]:
        """Append each row's next token; rows that go on have their candidates verified."""
        blocks, kept_C = [], []
        bounds = np.cumsum(reply.num_drafted_R).tolist()
        candidate_ids = reply.candidate_ids_C.tolist()
        for row, (sequence, decision, num_drafted, outcome, end) in enumerate(
            zip(
                plan.decoding,
                reply.next_token_ids_R.tolist(),
                reply.num_drafted_R.tolist(),
                reply.ahead_outcomes(),
                bounds,
                strict=True,
            )
        ):
            if decision == NOT_FINITE:
                # Nothing was drafted after it.
                sequence.has_nonfinite_logits = True
                self._fail(sequence, not_finite(sequence), finished)
                continue
            self._nonfinite_guard.lift()
            features_4K = None
            if reply.traced is not None:
                note_next_token(sequence, reply.traced, row)
                features_4K = reply.traced.features_4C[:, end - num_drafted : end]
            _, reason = self._stop_rules.examine(sequence, [decision])
            was_full = sequence.num_accepted == sequence.num_candidates
            missed = not outcome.is_hit and (outcome.num_tokens > 0 or not was_full)
            self._stats_recorder.shard(sequence.request.shard).observe_ahead(
                outcome, is_reached=was_full, is_miss=missed
            )
            sequence.begin_block(decision, num_drafted, missed=missed)
            num_trusted = max(0, num_drafted - 1) if self._trusts_draft else 0
            block = Block(sequence, candidate_ids[end - num_drafted : end], features_4K, num_trusted)
            if reason is None:
                blocks.append(block)
            else:
                block.note(None, num_verified=0, num_accepted=0)
                sequence.drop_candidates(num_drafted)
                self._stats_recorder.shard(sequence.request.shard).num_draft_tokens += num_drafted
                self._finish(sequence, reason, finished)
            num_asked = num_drafted - block.num_unasked if reason is None else 0
            kept_C += [False] * (num_drafted - num_asked) + [True] * num_asked
        return blocks, reply.draft_probabilities_C[np.array(kept_C, bool)]

    def _verify(
        self,
        plan: RoundPlan,
        context: FlatBatch,
        blocks: list[Block],
        draft_probabilities_C: np.ndarray,
    ) -> VerifyResult:
        """One target pass over the blocks and the prompt chunks; what it says of their candidates."""
        lengths_R = np.array([len(block.candidate_ids) + 1 for block in blocks], np.int64)
        decoded = block_batch(blocks, lengths_R)
        batch = FlatBatch(
            np.concatenate([decoded.token_ids_T, context.token_ids_T]),
            np.concatenate([decoded.slots_T, context.slots_T]),
            np.concatenate([decoded.positions_T, context.positions_T]),
        )
        ready = [chunk for chunk in plan.chunks if chunk.completes_context]
        chunk_ends = len(decoded) + np.cumsum([chunk.end - chunk.begin for chunk in plan.chunks])
        is_ready = np.array([chunk.completes_context for chunk in plan.chunks], bool)
        # Every token of a block says what follows it, but for those before candidates that nobody asks
        # about; and so does the last one of a context.
        unasked_R = np.array([block.num_unasked for block in blocks], np.int64)
        asked_R = lengths_R - unasked_R
        first_R = np.cumsum(lengths_R) - asked_R
        asked_N = np.repeat(first_R, asked_R) + arange_segments(asked_R)
        index_N = np.r_[asked_N, chunk_ends[is_ready] - 1].astype(np.int64)
        starts_R = np.cumsum(asked_R) - asked_R
        verify_input = VerifyInput.about(
            batch,
            index_N=index_N,
            stream_keys_N=self._stream_keys[batch.slots_T[index_N]],
            # What an asked token is followed by verifies the candidate that stands right after it.
            target_logits_indices_C=np.repeat(starts_R, asked_R - 1) + arange_segments(asked_R - 1),
        )
        verify_output = self._target.forward(plan.page_updates, batch, verify_input)
        judged = verify(blocks, asked_R - 1, verify_input, verify_output, draft_probabilities_C)
        index_W = np.r_[
            starts_R + judged.num_accepted_R - unasked_R, len(asked_N) + np.arange(len(ready))
        ].astype(np.int64)
        self._next_distributions = verify_output.next_distributions(index_W) if len(index_W) else None
        order = [block.sequence.order for block in blocks] + [chunk.sequence.order for chunk in ready]
        self._next_index_of = {number: index for index, number in enumerate(order)}
        return judged

    def _commit_block(
        self, block: Block, count: int, acceptance_K: np.ndarray, finished: list[Sequence]
    ) -> None:
        sequence, accepted_ids = block.sequence, block.candidate_ids[:count]
        num_kept, reason = self._stop_rules.examine(sequence, accepted_ids)
        num_drafted = len(block.candidate_ids)
        # After a stop nothing counts as verified; else the first rejected candidate does.
        num_verified = min(num_kept + (reason is None), num_drafted)
        block.note(acceptance_K, num_verified=num_verified, num_accepted=num_kept)
        sequence.end_block(accepted_ids[:num_kept], num_drafted)
        self._stats_recorder.shard(sequence.request.shard).observe_block(
            num_drafted=num_drafted, num_accepted=num_kept, num_trusted=min(block.num_trusted, num_kept)
        )
        if reason is not None:
            self._finish(sequence, reason, finished)

    def _fail(self, sequence: Sequence, error: str, finished: list[Sequence]) -> None:
        """End a row that cannot go on."""
        sequence.error = error
        self._finish(sequence, "error", finished)

    def _finish(self, sequence: Sequence, reason: FinishReason, finished: list[Sequence]) -> None:
        sequence.finish_reason = reason
        sequence.text = self._stop_rules.text(sequence.token_ids[sequence.num_prompt_tokens :])
        if sequence.slot >= 0:
            self._scheduler.finish(sequence)
        finished.append(sequence)
