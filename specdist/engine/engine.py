"""The engine: rounds of schedule → draft → verify → commit, until every request is finished.

Every round commits (accepted + 1) tokens per sequence. The round's first token is the *next token*: recovered
(sampled in the place of a rejected candidate) or bonus (sampled after a fully accepted block) of the round
before. A sequence without candidates is an ordinary sequence, so prefill, target-only and speculative rounds
are all the same round.

With ``trusts_draft`` (SPRINTER, lossy) only the last candidate of a block is verified: the approximate
verifier has passed the others, and they are committed as they are. The target still runs them, to fill its
cache.

R sequences that decode, C candidates of all of them, one after the other, W sequences whose next token is to
be sampled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from specdist.engine.device_clock import clock_of
from specdist.engine.faults import (
    DraftOutOfMemory,
    NonFiniteGuard,
    first_line,
    is_out_of_memory,
    not_finite,
    too_large,
)
from specdist.engine.proposals import DRAW, OpenedSequences, ProposalReply, ProposalRequest, Proposer
from specdist.engine.scheduler import RoundPlan, Scheduler
from specdist.engine.sequence import Completion, FinishReason, Sequence
from specdist.engine.stats_recorder import StatsRecorder
from specdist.engine.stopping import StopRules
from specdist.engine.target import Target
from specdist.engine.timeline import PhaseTime, Timeline
from specdist.engine.tracing import record_token_ahead
from specdist.engine.verify import Block, VerifiedBlock, Verifier, context_batch
from specdist.models.memory import peak_memory_bytes, release_memory
from specdist.sampling.distributions import NOT_FINITE
from specdist.sampling.rejection_sampler import known_next_tokens
from specdist.stats.shard import TargetTimes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """Running sequences, and free pages of the cache."""

    num_seqs: int = 0
    num_free_pages: int = 0


class Engine:
    """Turns requests into completions, in the order in which they finish."""

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
        on_lone_row: Callable[[tuple[int, int] | None], None] | None = None,
    ) -> None:
        """
        Args:
            trusts_draft: lossy: commit all candidates of a block but the last without verification.
            clock: time outside its phases counts as the host's.
            on_lone_row: called before every round with the row and sample that runs alone in the smallest
                batch, or None; lets a restart know which row a crash was about.
        """
        self._target = target
        self._verifier = Verifier(target, scheduler.settings.num_slots)
        self._proposer = proposer
        self.scheduler = scheduler
        self._stop_rules = stop_rules
        self._stats_recorder = stats_recorder
        self._trusts_draft = trusts_draft
        self._clock = clock or Timeline("host", clock=clock_of(target.device))
        self._nonfinite_guard = NonFiniteGuard()
        self._on_lone_row = on_lone_row
        # Slots of sequences that were preempted since the draft's last reply, and whether it has replied in
        # this round.
        self._suspended_slots: list[int] = []
        self._has_reply = False

    @property
    def load(self) -> EngineLoad:
        """Between rounds."""
        return EngineLoad(num_seqs=len(self.scheduler.running), num_free_pages=self.scheduler.num_free_pages)

    def run(self, should_stop: Callable[[], bool] | None = None) -> Iterator[Completion]:
        """Generate until every request is finished, or until the end of a round at which ``should_stop()``;
        unfinished sequences are then lost. Ends the loops of the other ranks on return."""
        self._clock.restart()
        is_end = False
        while not (is_end or (should_stop is not None and should_stop())):
            plan = self.scheduler.plan()
            is_end = plan.is_empty
            finished: list[Sequence] = []
            if not is_end:
                self._round_or_shrink(plan, finished)
            for sequence in self._nonfinite_guard.filter(finished, is_end=is_end):
                self._stats_recorder.record_completion(sequence)
                yield sequence.completion()
        self._proposer.close()
        self._target.close()

    def _round(self, plan: RoundPlan, finished: list[Sequence]) -> None:
        """Draft, verify and commit what the scheduler has planned."""
        self._stats_recorder.begin_round(plan)
        self._verifier.open(plan.opened)
        traffic = self._target.traffic

        request = self._draft_request(plan)
        with self._clock.phase("idle"):
            reply = self._proposer.propose(request, self._clock)
        self._has_reply, self._suspended_slots = True, []
        blocks = self._commit_next_tokens(plan, reply, finished)

        # Without tokens there is no pass: the page updates are those of sequences that have just ended.
        num_block_tokens = sum(block.num_candidates + 1 for block in blocks)
        num_pass_tokens = num_block_tokens + len(request.context)
        pass_time: PhaseTime | None = None
        if num_pass_tokens:
            with self._clock.mixed_phase(
                {"prefill": len(request.context), "verify": num_block_tokens}
            ) as pass_time:
                verified = self._verifier.verify(plan.page_updates, blocks, plan.chunks, request.context)
            for verified_block in verified:
                self._commit_candidates(verified_block, finished)

        self._stats_recorder.record_round(
            plan,
            target=TargetTimes(**self._clock.take()),
            reply=reply,
            num_pass_tokens=num_pass_tokens,
            pass_time=pass_time,
            target_traffic=self._target.traffic - traffic,
            target_peak_bytes=peak_memory_bytes(self._target.device),
        )

    def _draft_request(self, plan: RoundPlan) -> ProposalRequest:
        """How the last round ended, and how many candidates are wanted in this one."""
        next_token_ids_R = np.array(
            [
                DRAW if sequence.forced_next_token is None else sequence.forced_next_token
                for sequence in plan.decoding
            ],
            np.int64,
        )
        next_distributions = None
        undecided = [sequence for sequence in plan.decoding if sequence.forced_next_token is None]
        if undecided:
            next_distributions = self._verifier.next_distributions(undecided)
            known_ids = known_next_tokens(next_distributions)
            if known_ids is not None:
                next_token_ids_R[next_token_ids_R == DRAW] = known_ids.cpu().numpy()
                next_distributions = None
        return ProposalRequest(
            page_updates=plan.page_updates,
            slots_R=np.array([sequence.slot for sequence in plan.decoding], np.int64),
            num_accepted_R=np.array([sequence.num_accepted for sequence in plan.decoding], np.int64),
            next_token_ids_R=next_token_ids_R,
            draft_now_R=self._num_to_draft(plan),
            next_distributions_W=next_distributions,
            suspended_slots=np.array(self._suspended_slots + plan.suspended_slots, np.int64),
            opened=OpenedSequences.of(plan.opened),
            context=context_batch(plan.chunks),
        )

    def _num_to_draft(self, plan: RoundPlan) -> np.ndarray:
        """A draft that works ahead is not waited for: only a resumed sequence's candidates are drafted
        anew."""
        if not self.scheduler.settings.num_ahead_tokens:
            return np.array(plan.draft_limits, np.int64)
        return np.array([sequence.num_redraft for sequence in plan.decoding], np.int64)

    def _commit_next_tokens(
        self, plan: RoundPlan, reply: ProposalReply, finished: list[Sequence]
    ) -> list[Block]:
        """Append each sequence's next token; the sequences that it does not end have their candidates
        verified."""
        blocks = []
        for proposal in reply.proposals():
            sequence = plan.decoding[proposal.index]
            if proposal.next_token_id == NOT_FINITE:
                # Nothing was drafted after it.
                sequence.has_nonfinite_logits = True
                self._fail(sequence, not_finite(sequence), finished)
                continue
            self._nonfinite_guard.note_finite()
            if reply.traced is not None:
                record_token_ahead(sequence, reply.traced, proposal.index)
            reason = self._stop_rules.check(sequence, [proposal.next_token_id]).reason
            outcome, was_full = proposal.ahead, sequence.num_accepted == sequence.num_candidates
            missed = not outcome.is_hit and (outcome.num_tokens > 0 or not was_full)
            stats = self._stats_recorder.shard(sequence.request.shard)
            stats.observe_ahead(outcome, is_reached=was_full, is_miss=missed)
            num_drafted = len(proposal.candidate_ids)
            sequence.begin_block(proposal.next_token_id, num_drafted, missed=missed)
            block = Block(
                sequence=sequence,
                candidate_ids=proposal.candidate_ids,
                draft_probabilities_K=proposal.draft_probabilities_K,
                features_4K=proposal.features_4K,
                num_trusted=max(0, num_drafted - 1) if self._trusts_draft else 0,
            )
            if reason is None:
                blocks.append(block)
            else:
                block.trace(None, num_verified=0, num_accepted=0)
                sequence.drop_candidates(num_drafted)
                stats.num_draft_tokens += num_drafted
                self._finish(sequence, reason, finished)
        return blocks

    def _commit_candidates(self, verified: VerifiedBlock, finished: list[Sequence]) -> None:
        """Append the accepted candidates, as far as the completion goes."""
        block, sequence = verified.block, verified.block.sequence
        accepted_ids = block.candidate_ids[: verified.num_accepted]
        stop = self._stop_rules.check(sequence, accepted_ids)
        num_kept, num_drafted = stop.num_kept, block.num_candidates
        # Nothing after a stop counts as verified; without one, the first rejected candidate does.
        num_verified = min(num_kept + (stop.reason is None), num_drafted)
        block.trace(verified.acceptance_K, num_verified=num_verified, num_accepted=num_kept)
        sequence.end_block(accepted_ids[:num_kept], num_drafted)
        self._stats_recorder.shard(sequence.request.shard).observe_block(
            num_drafted=num_drafted, num_accepted=num_kept, num_trusted=min(block.num_trusted, num_kept)
        )
        if stop.reason is not None:
            self._finish(sequence, stop.reason, finished)

    def _fail(self, sequence: Sequence, error: str, finished: list[Sequence]) -> None:
        """End a sequence that cannot go on."""
        sequence.error = error
        self._finish(sequence, "error", finished)

    def _finish(self, sequence: Sequence, reason: FinishReason, finished: list[Sequence]) -> None:
        sequence.finish_reason = reason
        sequence.text = self._stop_rules.text(sequence.token_ids[sequence.num_prompt_tokens :])
        if sequence.slot >= 0:
            self.scheduler.finish(sequence)
        finished.append(sequence)

    def _round_or_shrink(self, plan: RoundPlan, finished: list[Sequence]) -> None:
        """A round, or where memory runs out, the preparation of a smaller one."""
        self._has_reply = False
        if self._on_lone_row is not None:
            self._on_lone_row(self.scheduler.lone_row)
        try:
            self._round(plan, finished)
            return
        except (RuntimeError, MemoryError) as error:
            # A rank that takes part in a collective pass cannot leave it alone.
            if not is_out_of_memory(error) or not (
                self._target.is_single_rank or isinstance(error, DraftOutOfMemory)
            ):
                raise
            message = first_line(error)
        # The error is gone by now, and with it the tensors of the round.
        release_memory(self._target.device)
        self._stats_recorder.record_out_of_memory(plan)
        running = self.scheduler.running
        if self._has_reply:
            self._suspended_slots = [sequence.slot for sequence in running]
        else:
            self._suspended_slots += plan.suspended_slots
            self._suspended_slots += [sequence.slot for sequence in running if sequence not in plan.opened]
        too_long = self.scheduler.shrink()
        if too_long is not None:
            self._fail(too_long, too_large(message), finished)
        settings = self.scheduler.settings
        logger.warning(
            "out of memory (%s)%s: from here on at most %d sequences and %d tokens at a time",
            message,
            ""
            if too_long is None
            else f"; row {too_long.request.row_id} does not fit alone; recorded as error",
            settings.num_slots,
            settings.max_num_batched_tokens,
        )
