"""The engine: rounds of schedule → draft → verify → commit, until every request is finished.

Every round commits (accepted + 1) tokens per sequence. The round's first token is the *next token*: recovered
(sampled in the place of a rejected candidate) or bonus (sampled after a fully accepted block) of the round
before. A sequence without candidates is an ordinary sequence, so prefill, target-only and speculative rounds
are all the same round.

With ``trusts_draft`` (SPRINTER, lossy) all candidates of a block but the last are committed without
verification. The target still runs them, to fill its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from specdist.data.stats.shard import TargetTimes
from specdist.engine.blocks import Block, NewBlocks, Tails, VerifiedBlock, VerifiedPass, blocks_of
from specdist.engine.faults import MemoryGuard, NonFiniteGuard, not_finite
from specdist.engine.interfaces import Proposer, Target
from specdist.engine.logprobs import LogprobBook
from specdist.engine.messages.proposals import ProposalReply
from specdist.engine.next_round import LastPass, NextRound, draft_request
from specdist.engine.request import Completion, FinishReason, Sequence
from specdist.engine.schedule.plan import RoundPlan, SchedulerSettings
from specdist.engine.schedule.scheduler import Scheduler
from specdist.engine.schedule.stopping import StopRules
from specdist.engine.times.reports import EngineLoad
from specdist.engine.times.stats_recorder import StatsRecorder
from specdist.engine.times.timeline import Kind, PhaseTime, Timeline, clock_of
from specdist.engine.times.tracing import record_block, record_token_ahead
from specdist.engine.verify import Verifier
from specdist.models.loading.memory import peak_memory_bytes
from specdist.sampling.distributions import NOT_FINITE
from specdist.sampling.processing.options import Processing
from specdist.utils.garbage import frozen_garbage


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
        processing: Processing | None = None,
        book: LogprobBook | None = None,
        tells_texts: bool = False,
        on_resize: Callable[[SchedulerSettings], None] | None = None,
        on_lone_row: Callable[[tuple[int, int] | None], None] | None = None,
    ) -> None:
        """
        Args:
            trusts_draft: lossy: commit all candidates of a block but the last without verification.
            clock: time outside its phases counts as the host's.
            processing: of logits, by target and draft, which are then told of rows what it needs.
            book: notes the log-probabilities of all tokens.
            tells_texts: the draft is told of all tokens of a sequence.
            on_resize: called with new limits of the batch, which later engines should start with.
            on_lone_row: called before every round with the row and sample that runs alone in the smallest
                batch, or None; lets a restart know which row a crash was about.
        """
        self._target = target
        self._verifier = Verifier(target, book)
        self._book = book
        self._proposer = proposer
        self.scheduler = scheduler
        self._stop_rules = stop_rules
        self._stats_recorder = stats_recorder
        self._trusts_draft = trusts_draft
        self._processing, self._tells_texts = processing, tells_texts
        self._clock = clock or Timeline("host", clock=clock_of(target.device))
        self._nonfinite_guard = NonFiniteGuard()
        # Ended, but not made known yet; and what is to be counted in this round's and the next one's pass.
        self._finished: list[Sequence] = []
        self._due: list[Callable[[], None]] = []
        self._later: list[Callable[[], None]] = []
        # The next round, where it is known already, and what is then still to be committed of the last one.
        self._next: tuple[RoundPlan, LastPass] | None = None
        self._uncommitted: Callable[[list[Callable[[], None]], list[Sequence]], None] | None = None
        self._memory_guard = MemoryGuard(
            scheduler, target, stats_recorder, on_resize=on_resize, on_lone_row=on_lone_row
        )

    @property
    def load(self) -> EngineLoad:
        """Between rounds."""
        return EngineLoad(num_seqs=len(self.scheduler.running), num_free_pages=self.scheduler.num_free_pages)

    def run(self, should_stop: Callable[[], bool] | None = None) -> Iterator[Completion]:
        """Generate until every request is finished, or until the end of a round at which ``should_stop()``;
        unfinished sequences are then lost. Ends the loops of the other ranks on return."""
        with frozen_garbage():
            yield from self._rounds(should_stop or (lambda: False))
        self._proposer.close()
        self._target.close()

    def _rounds(self, should_stop: Callable[[], bool]) -> Iterator[Completion]:
        """All of them. What one leaves to be counted and made known is, while the next one's pass runs."""
        self._clock.restart()
        is_end = False
        while not (is_end or should_stop()):
            if not (self.scheduler.running or self.scheduler.waiting):
                # A request may follow from what has ended.
                yield from self._completions()
            known, self._next = self._next, None
            plan, last = known or (self.scheduler.plan(), None)
            is_end = plan.is_empty
            finished: list[Sequence] = []
            out_of_memory: str | None = None
            try:
                if not is_end:
                    self._memory_guard.begin_round()
                    yield from self._round(plan, last, finished)
            except (RuntimeError, MemoryError) as error:
                # No error of a round takes what had been finished before it.
                self.commit()
                yield from self._completions()
                out_of_memory = self._memory_guard.reason(error)
            if out_of_memory is not None:
                too_long = self._memory_guard.make_smaller(plan, out_of_memory)
                if too_long is not None:
                    self._finish(too_long, "error", finished)
            self._finished += self._nonfinite_guard.filter(finished, is_end=is_end)
            self._due, self._later = self._due + self._later, []
        self.commit()
        yield from self._completions()

    def _completions(self) -> Iterator[Completion]:
        """Of the sequences that ended in the last round, once it is counted."""
        for count in self._due:
            count()
        finished, self._finished, self._due = self._finished, [], []
        for sequence in finished:
            self._stats_recorder.record_completion(sequence)
            sequence.text = self._stop_rules.text(sequence)
            yield sequence.completion() if self._book is None else self._book.completed(sequence)

    def commit(self) -> None:
        """Append and count what the last pass has accepted, where that is still to be done."""
        commit, self._uncommitted = self._uncommitted, None
        if commit is not None:
            ended: list[Sequence] = []
            commit(self._due, ended)
            assert not ended, "a sequence has ended that was to run in the next round"

    def _round(
        self, plan: RoundPlan, last: LastPass | None, finished: list[Sequence]
    ) -> Iterator[Completion]:
        """Draft, verify and commit what the scheduler has planned. What the last round has finished is made
        known while the target is at work; ``last``: what it has not committed yet."""
        count = self._stats_recorder
        self._later.append(partial(count.begin_round, plan))
        traffic = self._target.traffic
        known: list[tuple[Tails, list[int]]] = []

        def meanwhile() -> None:
            with self._clock.phase("host"):
                self.commit()
                known.append((Tails.of(plan.decoding), self._stop_rules.near_ends(plan.decoding)))

        request = draft_request(
            plan,
            last or LastPass.of(plan.decoding),
            self._verifier,
            window=self.scheduler.settings.draft_window,
            suspended_slots=self._memory_guard.suspended_slots,
            processing=self._processing,
            tells_texts=self._tells_texts,
            meanwhile=meanwhile,
        )
        with self._clock.phase("idle"):
            reply = self._proposer.propose(request, self._clock)
        if not known:
            meanwhile()
        tails, near_ends = known[0]
        self._memory_guard.note_reply()
        next_ids = reply.next_token_ids_R.tolist()
        self._verifier.note_next_tokens(plan.decoding, next_ids)
        ends = self._stop_rules.ends(plan.decoding, next_ids, near_ends, not_finite=NOT_FINITE)
        new_blocks = NewBlocks.of(reply, plan.decoding, tails, ends, trusts_draft=self._trusts_draft)

        # Without tokens there is no pass: the page updates are those of sequences that have just ended.
        weights: dict[Kind, int] = {"prefill": request.num_prefill_tokens, "verify": new_blocks.num_tokens}
        num_pass_tokens = sum(weights.values())
        pass_time: PhaseTime | None = None
        verified: VerifiedPass | None = None
        following: NextRound | None = None
        try:
            if num_pass_tokens:
                with self._clock.mixed_phase(weights) as pass_time:
                    verified_blocks = self._verifier.verify(
                        plan.page_updates, new_blocks, plan.chunks, request.opened
                    )
        finally:
            # The target is at work, or its pass has failed; the draft counts on the next tokens in any case.
            blocks = self._commit_next_tokens(plan, reply, ends, finished)
        if num_pass_tokens:
            yield from self._completions()
            # For those that have ended with their next tokens, and one that may end with a candidate.
            self.scheduler.look_ahead(len(finished) + 1)
            if self._book is None and reply.traced is None:
                following = NextRound.foresee(self.scheduler, self._stop_rules, blocks, plan)
            verified = verified_blocks(blocks)

        over = following.ended(verified.num_accepted_R) if following and verified else []
        if following is not None and len(over) == len(following.sequences):
            following, over = None, []
        ending, going_on = verified.parted(over) if verified else ((), ())
        kept = [self._commit_candidates(each, finished) for each in ending]

        def commit(counts: list[Callable[[], None]], ended: list[Sequence]) -> None:
            kept.extend([self._commit_candidates(each, ended) for each in going_on])
            counts.append(partial(count.record_blocks, kept))
            times, used = self._clock.cut(), self._target.traffic - traffic
            counts.append(
                lambda: count.record_round(
                    plan,
                    target=TargetTimes(**times()),
                    reply=reply,
                    num_pass_tokens=num_pass_tokens,
                    pass_time=pass_time,
                    target_traffic=used,
                    target_peak_bytes=peak_memory_bytes(self._target.device),
                )
            )

        if following is None or verified is None:
            commit(self._later, finished)
        else:
            self._next, self._uncommitted = following.after(verified.num_accepted_R, over), commit

    def _commit_next_tokens(
        self,
        plan: RoundPlan,
        reply: ProposalReply,
        ends: list[FinishReason | None],
        finished: list[Sequence],
    ) -> list[Block]:
        """Append each sequence's next token. Returns the blocks of the sequences that it does not end."""
        blocks = []
        for index, block in enumerate(blocks_of(reply, plan.decoding, trusts_draft=self._trusts_draft)):
            sequence, ahead = block.sequence, block.ahead
            if block.next_token_id == NOT_FINITE:
                # Nothing was drafted after it.
                sequence.has_nonfinite_logits = True
                sequence.error = not_finite(sequence)
                self._finish(sequence, "error", finished)
                continue
            self._nonfinite_guard.note_finite()
            record_token_ahead(block, reply, index)
            was_full = sequence.num_accepted == sequence.num_candidates
            missed = not ahead.is_hit and (ahead.num_tokens > 0 or not was_full)
            self._later.append(
                partial(self._stats_recorder.record_next_token, block, is_reached=was_full, is_miss=missed)
            )
            sequence.begin_block(block.next_token_id, block.num_candidates, missed=missed)
            if (reason := ends[index]) is None:
                blocks.append(block)
            else:
                record_block(block, None, num_verified=0, num_accepted=0)
                sequence.drop_candidates(block.num_candidates)
                self._later.append(partial(self._stats_recorder.record_dropped, block))
                self._finish(sequence, reason, finished)
        return blocks

    def _commit_candidates(self, verified: VerifiedBlock, finished: list[Sequence]) -> tuple[Block, int]:
        """Append the accepted candidates, as far as the completion goes. Returns the block, and how many."""
        block, num_accepted, acceptance_K = verified
        sequence, num_drafted = block.sequence, len(block.candidate_ids)
        accepted_ids = block.candidate_ids[:num_accepted]
        num_kept, reason = self._stop_rules.check(sequence, accepted_ids)
        if block.features_4K is not None:
            # Nothing after a stop counts as verified; without one, the first rejected candidate does.
            num_verified = min(num_kept + (reason is None), num_drafted)
            record_block(block, acceptance_K, num_verified=num_verified, num_accepted=num_kept)
        sequence.end_block(accepted_ids[:num_kept], num_drafted)
        if reason is not None:
            self._finish(sequence, reason, finished)
        return block, num_kept

    def _finish(self, sequence: Sequence, reason: FinishReason, finished: list[Sequence]) -> None:
        sequence.finish_reason = reason
        if sequence.slot >= 0:
            self.scheduler.finish(sequence)
        finished.append(sequence)
