"""The engine: rounds of schedule → draft → verify → commit, until every request is finished.

Every round commits (accepted + 1) tokens per sequence. The round's first token is the *next token*: recovered
(sampled in the place of a rejected candidate) or bonus (sampled after a fully accepted block) of the round
before. A sequence without candidates is an ordinary sequence, so prefill, target-only and speculative rounds
are all the same round.

Work that can be done later waits for one of two stages of the next round: what the next pass needs is done
while the draft's reply is awaited, what nobody waits for while the target is at work.

With ``trusts_draft`` (SPRINTER, lossy) all candidates of a block but the last are committed without
verification. The target still runs them, to fill its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from specdist.data.stats.fields import TargetTimes
from specdist.engine.messages.interfaces import Proposer, Target
from specdist.engine.messages.opened import NOTHING_OPENED, OpenedSequences
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.request import Completion, FinishReason, Sequence
from specdist.engine.rounds.faults import NonFiniteGuard, mark_without_token
from specdist.engine.rounds.logprobs import LogprobBook
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.rounds.tracing import record_block
from specdist.engine.rounds.verify import Block, NewBlocks, Tails, Verified, Verifier, blocks_of, flat_context
from specdist.engine.schedule.plan import LastPass, RoundPlan
from specdist.engine.schedule.repeats import cut_loop
from specdist.engine.schedule.scheduler import NextRound, Scheduler
from specdist.engine.schedule.stopping import StopRules
from specdist.engine.times.timeline import Kind, PhaseTime, Timeline, clock_of
from specdist.models.loading.memory import peak_memory_bytes
from specdist.sampling.distributions import NOT_FINITE
from specdist.sampling.processing.processors import TokenMasker
from specdist.sampling.processing.row_table import Processing
from specdist.utils.garbage import frozen_garbage

NO_PASS = Verified(np.zeros(0, np.int64))


@dataclass
class Round:
    """A round while it goes on. No tensors: they are gone with a pass that fails.

    Attributes:
        last: how the pass before it ended; tails: where its sequences go on, once that is committed.
        near_ends: sequences that any next token may end.
        ended: sequences that it has ended, and that are still to be made known; blocks: of the others.
        following: the next round, where it is known during the pass.
        kept: blocks, each with the number of its candidates that are committed.
    """

    plan: RoundPlan
    last: LastPass
    opened: OpenedSequences = NOTHING_OPENED
    tails: Tails | None = None
    near_ends: list[int] = field(default_factory=list)
    reply: ProposalReply = field(init=False)
    ended: list[Sequence] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    num_pass_tokens: int = 0
    pass_time: PhaseTime | None = None
    verified: Verified = NO_PASS
    following: NextRound | None = None
    kept: list[tuple[Block, int]] = field(default_factory=list)
    times: Callable[[], dict[Kind, int]] = field(init=False)


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
        masker: TokenMasker | None = None,
        on_lone_row: Callable[[tuple[int, int] | None], None] | None = None,
    ) -> None:
        """
        Args:
            trusts_draft: lossy: commit all candidates of a block but the last without verification.
            clock: time outside its phases counts as the host's.
            processing: of logits, by target and draft, which are then told of rows what it needs.
            book: notes the log-probabilities of all tokens.
            masker: the target's, which can say why a row has no next token.
            on_lone_row: called before every round with the row and sample that runs alone in the smallest
                batch, or None; lets a restart know which row a lack of memory was about.
        """
        self._target, self._masker = target, masker
        self._verifier, self._book = Verifier(target, book), book
        self._proposer = proposer
        self.scheduler = scheduler
        self._stop_rules = stop_rules
        self._stats_recorder = stats_recorder
        self._trusts_draft = trusts_draft
        self._processing = processing
        self._clock = clock or Timeline("host", clock=clock_of(target.device))
        self._on_lone_row, self._nonfinite_guard = on_lone_row, NonFiniteGuard()
        self._before_pass: list[Callable[[], None]] = []
        self._during_pass: list[Callable[[], Completion | None]] = []
        # The next round, where it is known already.
        self._early: tuple[RoundPlan, LastPass] | None = None

    def run(self, should_stop: Callable[[], bool] | None = None) -> Generator[Completion]:
        """Generate until every request is finished, or until the end of a round at which ``should_stop()``;
        unfinished sequences are then lost. Ends the loops of the other ranks on return."""
        with frozen_garbage():
            self._clock.restart()
            is_over = False
            while not (is_over or (should_stop is not None and should_stop())):
                is_over = yield from self.step()
            self.commit()
            yield from self._make_known()
        self._proposer.close()
        self._target.close()

    def step(self) -> Generator[Completion, None, bool]:
        """One round. Returns whether there was nothing to do, since every request is finished."""
        if not (self.scheduler.running or self.scheduler.waiting):
            # A request may follow from what has ended.
            yield from self._make_known()
        this = self.round = self._schedule()
        if self._on_lone_row is not None:
            self._on_lone_row(self.scheduler.lone_row)
        try:
            if not this.plan.is_empty:
                self._draft(this)
                yield from self._verify(this)
                self._commit(this)
        except (RuntimeError, MemoryError):
            # No error of a round takes what had been finished before it.
            self.commit()
            yield from self._make_known()
            raise
        ended, this.ended = this.ended, []
        for sequence in self._nonfinite_guard.filter(ended, is_end=this.plan.is_empty):
            self._during_pass.append(partial(self._completed, sequence))
        return this.plan.is_empty

    def commit(self) -> None:
        """Append what the last pass has accepted, where that is still to be done."""
        waiting, self._before_pass = self._before_pass, []
        for work in waiting:
            work()

    def _make_known(self) -> Iterator[Completion]:
        """Count what is still to be counted, and yield the completions of what has ended."""
        waiting, self._during_pass = self._during_pass, []
        for work in waiting:
            if (completion := work()) is not None:
                yield completion

    def _schedule(self) -> Round:
        """The round that is known already, or the scheduler's plan."""
        early, self._early = self._early, None
        if early is None:
            plan = self.scheduler.plan()
            early = plan, LastPass.of(plan.decoding)
        return Round(*early)

    def _draft(self, this: Round) -> None:
        """Ask the draft for next tokens and candidates; the last round is committed meanwhile."""
        request = self._request(this)
        with self._clock.phase("idle"):
            this.reply = self._proposer.propose(request, self._clock)
        self._look(this)

    def _look(self, this: Round) -> None:
        """Commit the last round, and see where sequences go on; once."""
        if this.tails is None:
            with self._clock.phase("host"):
                self.commit()
                this.tails = Tails.of(this.plan.decoding)
                this.near_ends = self._stop_rules.near_ends(this.plan.decoding)

    def _request(self, this: Round) -> ProposalRequest:
        """How the last round ended, and how many candidates there may be in this one."""
        plan, last, settings = this.plan, this.last, self.scheduler.settings
        this.opened = OpenedSequences.of(plan.opened, self._processing)
        return ProposalRequest(
            page_updates=self.scheduler.updates_of_draft(plan.page_updates),
            slots_R=last.slots_R,
            num_accepted_R=last.num_accepted_R,
            next_token_ids_R=last.next_token_ids_R,
            draft_now_R=np.array(plan.draft_limits, np.int64),
            num_redraft_R=last.num_redraft_R,
            next_distributions_W=self._verifier.next_distributions(plan.decoding, last.next_token_ids_R),
            sequences=plan.decoding,
            meanwhile=partial(self._look, this),
            suspended_slots=np.array(plan.suspended_slots, np.int64),
            opened=this.opened,
            context=flat_context(plan.chunks, keeps_states=settings.draft_keeps_states),
            num_prefill_tokens=plan.num_prefill_tokens,
        )

    def _verify(self, this: Round) -> Iterator[Completion]:
        """One pass of the target, if there are tokens for it. While it runs, next tokens are committed, what
        ended before is made known, and the next round is planned."""
        plan, reply = this.plan, this.reply
        assert this.tails is not None
        next_ids = reply.next_token_ids_R.tolist()
        if self._book is not None:
            self._book.note_next_tokens(plan.decoding, next_ids)
        ends = self._stop_rules.ends(plan.decoding, next_ids, this.near_ends, not_finite=NOT_FINITE)
        blocks = NewBlocks.of(reply, plan.decoding, this.tails, ends, trusts_draft=self._trusts_draft)
        # Without tokens there is no pass: the page updates are those of sequences that have just ended.
        weights: dict[Kind, int] = {"prefill": plan.num_prefill_tokens, "verify": blocks.num_tokens}
        this.num_pass_tokens = sum(weights.values())
        if this.num_pass_tokens:
            with self._clock.mixed_phase(weights) as this.pass_time:
                verified = self._verifier.verify(plan.page_updates, blocks, plan.chunks, this.opened)
        self._commit_next_tokens(this, ends)
        if this.num_pass_tokens:
            yield from self._make_known()
            # For those that have ended with their next tokens, and one that may end with a candidate.
            self.scheduler.look_ahead(len(this.ended) + 1)
            if self._book is None and reply.features_3C is None:
                candidates = [(block.sequence, block.candidate_ids) for block in this.blocks]
                this.following = NextRound.foresee(self.scheduler, self._stop_rules, candidates, plan)
            this.verified = verified()

    def _commit(self, this: Round) -> None:
        """Append the accepted candidates: all of them, or where the next round is known, only those of the
        sequences that they end; the others follow before the next pass."""
        following, num_accepted_R = this.following, this.verified.num_accepted_R
        over = following.ended(num_accepted_R) if following is not None else []
        self._commit_candidates(this, over)
        self._before_pass.append(partial(self._commit_rest, this, over))
        self._during_pass.append(partial(self._count, this))
        if following is not None and len(over) < len(following.sequences):
            self._early = following.after(num_accepted_R, over)
        else:
            self.commit()

    def _commit_rest(self, this: Round, over: list[int]) -> None:
        """All blocks but these; the round's times end with them."""
        self._commit_candidates(this, [index for index in range(len(this.blocks)) if index not in over])
        this.times = self._clock.cut()

    def _count(self, this: Round) -> None:
        """Once the round is committed."""
        assert not this.ended, "a sequence has ended that was to run in the next round"
        self._stats_recorder.record_blocks(this.kept)
        self._stats_recorder.record_round(
            this.plan,
            target=TargetTimes(**this.times()),
            reply=this.reply,
            num_pass_tokens=this.num_pass_tokens,
            pass_time=this.pass_time,
            target_peak_bytes=peak_memory_bytes(self._target.device),
        )

    def _completed(self, sequence: Sequence) -> Completion:
        """The completion of a sequence that has ended, once its last round is counted."""
        self._stats_recorder.record_completion(sequence)
        cut_loop(sequence, self._stop_rules.repeats_of(sequence))
        sequence.text = self._stop_rules.text(sequence)
        return sequence.completion() if self._book is None else self._book.completed(sequence)

    def _commit_next_tokens(self, this: Round, ends: list[FinishReason | None]) -> None:
        """Append each sequence's next token; the blocks of those that it does not end go on."""
        reply, count = this.reply, self._stats_recorder
        blocks = blocks_of(reply, this.plan.decoding, trusts_draft=self._trusts_draft)
        for block, reason in zip(blocks, ends, strict=True):
            sequence, ahead = block.sequence, block.ahead
            if block.next_token_id == NOT_FINITE:
                self._target.check()
                # Nothing was drafted after it.
                mark_without_token(sequence, self._masker)
                self._finish(this, sequence, "error")
                continue
            self._nonfinite_guard.note_finite()
            was_full = sequence.num_accepted == sequence.num_candidates
            missed = not ahead.is_hit and (ahead.num_tokens > 0 or not was_full)
            count.record_next_token(block, is_reached=was_full, is_miss=missed)
            sequence.begin_block(block.next_token_id, block.num_candidates, missed=missed)
            if reason is None:
                this.blocks.append(block)
            else:
                record_block(block, None, num_verified=0, num_accepted=0)
                sequence.drop_candidates(block.num_candidates)
                count.record_dropped(block)
                self._finish(this, sequence, reason)

    def _commit_candidates(self, this: Round, indices: list[int]) -> None:
        """Append the accepted candidates of these blocks, as far as the completions go."""
        num_accepted, acceptances = this.verified.num_accepted_R.tolist(), this.verified.acceptances
        for index in indices:
            block = this.blocks[index]
            sequence, num_drafted = block.sequence, block.num_candidates
            accepted_ids = block.candidate_ids[: num_accepted[index]]
            num_kept, reason = self._stop_rules.check(sequence, accepted_ids)
            if block.features_3K is not None:
                # Nothing after a stop counts as verified; without one, the first rejected candidate does.
                num_verified = min(num_kept + (reason is None), num_drafted)
                acceptance_K = None if acceptances is None else acceptances[index]
                record_block(block, acceptance_K, num_verified=num_verified, num_accepted=num_kept)
            sequence.end_block(accepted_ids[:num_kept], num_drafted)
            if reason is not None:
                self._finish(this, sequence, reason)
            this.kept.append((block, num_kept))

    def _finish(self, this: Round, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        if sequence.slot >= 0:
            self.scheduler.finish(sequence)
        this.ended.append(sequence)
