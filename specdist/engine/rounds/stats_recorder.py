"""Counts every round's work for the shards whose sequences took part in it.

Sequences of two shards may share a pass: none waits for another, not even at the end of a shard. Times are
split in proportion to the numbers of sequences; a pass is counted once, for the shard of its oldest sequence.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass

from specdist.data.stats.fields import PeakMemory, TargetTimes, add_to
from specdist.data.stats.shard import Stats, split_proportionally
from specdist.engine.messages.proposals import ProposalReply
from specdist.engine.request import Sequence
from specdist.engine.rounds.verify import Block
from specdist.engine.schedule.plan import RoundPlan
from specdist.engine.times.timeline import PhaseTime
from specdist.policies.pass_ratios import PassRatios


@dataclass(frozen=True)
class _Progress:
    """Totals of the run, kept for every sequence from when it was admitted."""

    decoding_ns: int
    num_draft_passes: int
    num_target_passes: int


@dataclass(frozen=True)
class _UntimedPass:
    """A target pass whose end the device had not reached when its round was recorded."""

    num_tokens: int
    time: PhaseTime


class StatsRecorder:
    """Statistics per shard."""

    def __init__(self, began_ns: int | None = None, ratios: PassRatios | None = None) -> None:
        """``began_ns``: when this replica's process began, in Unix time, a start that is counted with the
        first token; None counts no start. ``ratios`` compares all passes with what they are expected to
        take."""
        self._began_ns, self._ratios = began_ns, ratios
        self._shards: defaultdict[int, Stats] = defaultdict(Stats)
        self._now = _Progress(0, 0, 0)
        self._admitted: dict[int, _Progress] = {}
        self._untimed: deque[_UntimedPass] = deque()

    def shard(self, shard: int) -> Stats:
        """The shard's statistics so far."""
        return self._shards[shard]

    def close_shard(self, shard: int) -> Stats:
        """The finished shard's statistics, which are forgotten here."""
        return self._shards.pop(shard, Stats())

    def _note_opened(self, plan: RoundPlan) -> None:
        """The totals at which sequences are admitted, before the round is counted."""
        for sequence in plan.opened:
            self._admitted.setdefault(sequence.order, self._now)
            self._shards[sequence.request.shard].num_shared_prompt_tokens += sequence.num_shared

    def record_next_token(self, block: Block, *, is_reached: bool, is_miss: bool) -> None:
        """See :meth:`specdist.data.stats.shard.Stats.observe_ahead`."""
        stats = self._shards[block.sequence.request.shard]
        if self._began_ns is not None:
            stats.num_starts += 1
            stats.first_token_ns += time.time_ns() - self._began_ns
            self._began_ns = None
        stats.observe_ahead(block.ahead, is_reached=is_reached, is_miss=is_miss)

    def record_dropped(self, block: Block) -> None:
        """The next token has ended the sequence: its candidates count as drafted."""
        stats = self._shards[block.sequence.request.shard]
        stats.num_draft_tokens += block.num_candidates

    def record_blocks(self, blocks: list[tuple[Block, int]]) -> None:
        """Count verified blocks, each with the number of its accepted candidates."""
        for block, num_accepted in blocks:
            self._shards[block.sequence.request.shard].observe_block(
                num_drafted=block.num_candidates,
                num_accepted=num_accepted,
                num_trusted=min(block.num_trusted, num_accepted),
            )

    def record_round(
        self,
        plan: RoundPlan,
        *,
        target: TargetTimes,
        reply: ProposalReply,
        num_pass_tokens: int,
        pass_time: PhaseTime | None,
        target_peak_bytes: int,
    ) -> None:
        """Split a finished round among the shards of its sequences.

        Args:
            target: the target's times that have become known since the last round was recorded.
            pass_time: of the round's target pass, if there was one; compared as soon as it is known.
        """
        self._note_opened(plan)
        sequences = plan.decoding + [chunk.sequence for chunk in plan.chunks]
        seqs_per_shard = Counter(sequence.request.shard for sequence in sequences)
        first = self._shards[sequences[0].request.shard]
        if pass_time is not None:
            first.num_target_passes += 1
            self._untimed.append(_UntimedPass(num_pass_tokens, pass_time))
        while self._untimed and self._untimed[0].time.is_known:
            timed = self._untimed.popleft()
            if self._ratios is not None:
                self._ratios.observe_target(timed.num_tokens, timed.time.ns)
        sizes, is_asynchronous = reply.draft_pass_sizes_P.tolist(), bool(reply.ahead.num_tokens_R.any())
        first.num_draft_passes += len(sizes)
        if self._ratios is not None:
            self._ratios.observe_draft(sizes, reply.times.draft, is_asynchronous=is_asynchronous)
        first.add(reply.draft_steps)
        first.num_rounds += 1
        first.num_preemptions += len(plan.suspended_slots)
        self._now = _Progress(
            self._now.decoding_ns + target.verify + reply.times.draft,
            self._now.num_draft_passes + len(reply.draft_pass_sizes_P),
            self._now.num_target_passes + (pass_time is not None),
        )
        for shard, part in split_proportionally(target.total, seqs_per_shard).items():
            self._shards[shard].wall_ns += part
        for name, times in (("target_ns", target), ("draft_ns", reply.times)):
            for item in dataclasses.fields(getattr(first, name)):
                parts = split_proportionally(getattr(times, item.name), seqs_per_shard)
                for shard, part in parts.items():
                    spent = getattr(self._shards[shard], name)
                    setattr(spent, item.name, getattr(spent, item.name) + part)
        peak = PeakMemory(target_peak_bytes, reply.times.peak_memory_bytes)
        for shard in seqs_per_shard:
            add_to(self._shards[shard].peak_memory_bytes, peak)

    def record_completion(self, sequence: Sequence) -> None:
        """Count a finished sequence, unless it ended with an error."""
        stats = self._shards[sequence.request.shard]
        mark = self._admitted.pop(sequence.order)
        if sequence.error is not None:
            return
        stats.num_completions += 1
        stats.num_prompt_tokens += sequence.num_prompt_tokens
        stats.num_completion_tokens += sequence.num_completion_tokens
        stats.cost_sums.observe(
            time_ns=self._now.decoding_ns - mark.decoding_ns,
            num_draft_passes=self._now.num_draft_passes - mark.num_draft_passes,
            num_target_passes=self._now.num_target_passes - mark.num_target_passes,
        )
