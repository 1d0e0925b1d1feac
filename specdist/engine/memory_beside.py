"""Candidates from memory beside a draft model: per sequence and round, the source that promises more.

It lives where the draft is, and works on the tokens that the draft keeps of every sequence. A draft that
takes turns with the target asks it first: where memory promises more than the model, the block is memory's,
and the model draws nothing there. A draft that works ahead has drawn its tokens before; memory may then only
go on after them, where it proposes the same ones: no drawn token is ever dropped for what memory says.

A candidate from memory was not drawn. Its distribution Q has all mass on it, and the draft keeps it as such
(:meth:`DraftState.put_certain`), so that the acceptance, the recovered token and a sequence's branches follow
from the same code as for tokens of the model, whichever of the two a token is from.

A resumed sequence repeats its block from the source that it had.

Before the reply there is what it depends on: the new tokens, and what to propose after them. What the last
blocks have shown is learned from later, where nothing is drafted before the reply.

R sequences that decode, C candidates of several sequences, one after the other, T tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from specdist.cache.draft_window import WindowPageTable
from specdist.drafters.ngram_index import NgramIndex, Proposals
from specdist.drafters.source_choice import (
    NUM_BLOCK_NUMBERS,
    MemorySettings,
    ModelBlocks,
    SourceChoice,
    match_classes,
    noted_block,
    repeated_blocks,
)
from specdist.engine.allowed_tokens import AllowedTokens
from specdist.engine.draft_state import DraftState
from specdist.engine.histories import Histories
from specdist.engine.opened import OpenedSequences
from specdist.engine.pipeline import LogitsPipeline
from specdist.engine.proposals import ProposalRequest
from specdist.models.runner import ModelRunner
from specdist.sampling.distributions import NOT_FINITE
from specdist.theory.rounds import RoundShape
from specdist.utils.ranges import places_from

# Tokens of a sequence that the draft's cache may lack: so many are run at once, while the target is at work.
MOST_LACKING = 64
# Most candidates to draft [R], and whether the policy has a say; in one or several goes.
Wanted = list[tuple[np.ndarray, bool]]


class _Verified(NamedTuple):
    """Of the last blocks: candidates of the model, then of memory, and how many were accepted; whether the
    whole block was the model's, and the match that there was."""

    slots_R: np.ndarray
    num_model_R: np.ndarray
    num_memory_R: np.ndarray
    num_accepted_R: np.ndarray
    is_model_R: np.ndarray
    classes_R: np.ndarray


class NoMemory:
    """Beside a draft model: nothing."""

    is_on = False
    is_worth_asking = False

    def keep(self, request: ProposalRequest) -> None: ...

    def learn(self) -> None: ...

    def choose(self, request: ProposalRequest, wanted_now: Wanted) -> Wanted:
        return wanted_now

    def extend(self, request: ProposalRequest, shape: RoundShape) -> None: ...

    def open(self, request: ProposalRequest) -> None: ...

    def read_prompts(self, request: ProposalRequest) -> None: ...

    def begin_group(self, group: int) -> None: ...

    def recover(self, *, has_replied: bool) -> None: ...


class MemoryBeside(NoMemory):
    """Beside a draft model."""

    is_on = True

    def __init__(
        self,
        settings: MemorySettings,
        runner: ModelRunner,
        draft_state: DraftState,
        num_groups: int,
        max_seq_len: int,
        stop_token_ids: Collection[int],
        pipeline: LogitsPipeline | None,
    ) -> None:
        """``runner``, ``pipeline``: the draft model's."""
        num_slots = len(draft_state.num_committed)
        self._settings = settings
        self._runner = runner
        self._state = draft_state
        self._index = NgramIndex(
            num_slots=num_slots,
            max_length=max_seq_len + 1,
            learns_together=settings.learns_together,
            texts=settings.texts,
        )
        self._choice = SourceChoice(settings)
        self._histories = Histories(ModelBlocks(settings.max_tokens), num_slots, num_groups)
        self._allowed = AllowedTokens(pipeline, stop_token_ids)
        self._num_prompt_tokens = np.zeros(num_slots, np.int64)
        # By slot: whether its index is still to begin, and that of a sequence that goes on; whether the last
        # block was for the model to draft, and the match that there was then.
        # A window has room for no more than a round leaves.
        self._most_lacking = 0 if isinstance(runner.pages, WindowPageTable) else MOST_LACKING
        self._is_new, self._is_resumed = np.ones(num_slots, bool), np.zeros(num_slots, bool)
        self._was_asked = np.zeros(num_slots, bool)
        self._classes = np.zeros(num_slots, np.int64)
        # More than one where target groups have had their replies one after the other.
        self._verified: list[_Verified] = []
        self._before = self._histories.snapshot()

    def keep(self, request: ProposalRequest) -> None:
        """What the last round's blocks have shown, before they are forgotten."""
        state, slots_R = self._state, request.slots_R
        num_memory_R = state.num_from_memory[slots_R]
        num_model_R = state.num_candidates[slots_R] - num_memory_R
        is_model_R, classes_R = self._was_asked[slots_R], self._classes[slots_R]
        self._verified.append(
            _Verified(slots_R, num_model_R, num_memory_R, request.num_accepted_R, is_model_R, classes_R)
        )
        self._was_asked[slots_R] = False

    def learn(self) -> None:
        """Once, of all that was kept."""
        verified, self._verified = self._verified, []
        for blocks in verified:
            self._learn(blocks)

    def _learn(self, verified: _Verified) -> None:
        slots_R, num_model_R, num_memory_R, num_accepted_R, is_model_R, classes_R = verified
        own_R = np.minimum(num_accepted_R, num_model_R)
        asked = np.flatnonzero(is_model_R)
        self._choice.observe_blocks(classes_R[asked], num_model_R[asked], own_R[asked])
        self._histories.observe(slots_R[asked], np.ones_like(asked), own_R[asked])
        self._choice.observe_round(
            len(slots_R) + int(num_accepted_R.sum()),
            num_pass_tokens=len(slots_R) + int(num_model_R.sum() + num_memory_R.sum()),
            num_rows=len(slots_R),
            num_steps=int(num_model_R.max(initial=0)),
            num_context=self._num_context(slots_R),
        )
        self._choice.observe_memory(int((num_accepted_R - own_R).sum()), len(slots_R))
        self._index.learn(slots_R)

    @property
    def is_worth_asking(self) -> bool:  # type: ignore[override]
        return self._choice.is_worth_asking

    def choose(self, request: ProposalRequest, wanted_now: Wanted) -> Wanted:
        """Put memory's blocks in their places, and return what is left for the model to draft before the
        reply."""
        self._remember(request.slots_R)
        return [
            self._choose(request, wanted_R) if uses_policy else (self._redraft(request, wanted_R), False)
            for wanted_R, uses_policy in wanted_now
        ]

    def extend(self, request: ProposalRequest, shape: RoundShape) -> None:
        """After tokens that were drafted ahead, all of which are candidates now, memory goes on where it
        proposes them too; where none are ready, it begins. A block of the model that may follow has no worth
        where it drafts nothing in this round; and where memory adds nothing either, the target may go on
        alone."""
        is_resumed_R = request.num_redraft_R > 0
        if shape.num_rounds_alone and not (self.is_worth_asking or is_resumed_R.any()):
            return
        state, slots_R = self._state, request.slots_R
        num_ready_R = state.num_candidates[slots_R]
        is_free_R = (state.num_ahead[slots_R] == 0) & (state.num_from_memory[slots_R] == 0)
        is_free_R &= ~self._was_asked[slots_R]
        room_R = np.where(is_free_R, np.maximum(request.draft_now_R - num_ready_R, 0), 0)
        if is_resumed_R.any():
            self._put(slots_R, self._again(request, is_resumed_R & is_free_R).first(room_R))
            room_R[is_resumed_R] = 0
        has_room = np.flatnonzero(room_R > 0)
        if len(has_room):
            self._extend(request, slots_R[has_room], room_R[has_room], shape)
        self._was_asked[slots_R] |= (num_ready_R > 0) & (state.num_from_memory[slots_R] == 0)

    def _extend(
        self, request: ProposalRequest, slots_R: np.ndarray, room_R: np.ndarray, shape: RoundShape
    ) -> None:
        """These sequences' blocks, by so many tokens at most."""
        state = self._state
        num_ready_R = state.num_candidates[slots_R]
        found = self._propose(slots_R, room_R + num_ready_R)
        if not (len(found.token_ids_C) or self._allowed.has_masks):
            return
        found = found.after(num_ready_R, self._candidates(slots_R, num_ready_R))
        begins_R = state.num_committed[slots_R] + num_ready_R
        found = self._allowed.of(found, slots_R, begins_R, room_R)
        if not len(found.token_ids_C):
            return
        bases_R = np.ones(len(slots_R)) if found.bases_R is None else found.bases_R
        worth_R = np.zeros(len(slots_R))
        if shape.num_ahead or shape.drafts_now:
            classes_R = match_classes(found.match_lengths_R)
            worth_R = self._choice.worth_of_model(classes_R, self._histories.of(slots_R))
        ahead_R = self._choice.lengths_ahead(found.chances_C, found.lengths_R, bases_R, worth_R)
        found = found.first(ahead_R)
        self._put(slots_R, found.first(self._lengths_that_pay(request, found)[0]))

    def open(self, request: ProposalRequest) -> None:
        """After the reply: note the blocks, put the preempted sequences' histories aside, and begin the new
        sequences."""
        state, opened = self._state, request.opened
        self._note(request.slots_R)
        suspended = request.suspended_slots
        self._histories.suspend(suspended, state.stream_keys[suspended])
        if len(opened.slots):
            self._open(opened)
        # The next request may fail.
        self._before = self._histories.snapshot()
        self._catch_up(request.slots_R)

    def _open(self, opened: OpenedSequences) -> None:
        state = self._state
        self._histories.open(opened.slots, opened.stream_keys)
        self._is_new[opened.slots] = True
        self._is_resumed[opened.slots] = opened.are_resumed
        self._was_asked[opened.slots] = False
        self._num_prompt_tokens[opened.slots] = opened.num_prompt_tokens
        state.num_from_memory[opened.slots] = 0
        shared = places_from(opened.slots, np.zeros_like(opened.slots), opened.prefix_lengths)
        state.put_undrafted(shared, opened.prefix_ids)

    def _note(self, slots_R: np.ndarray) -> None:
        """What is memory's of these sequences' blocks, and the match that there is."""
        state = self._state
        self._classes[slots_R] = match_classes(self._index.match_lengths(slots_R))
        lengths_R = state.num_from_memory[slots_R]
        begins_R = state.num_committed[slots_R] + state.num_candidates[slots_R] - lengths_R
        token_ids_C = state.token_ids[places_from(slots_R, begins_R, lengths_R)]
        block = Proposals(token_ids_C, np.ones(len(token_ids_C)), lengths_R, lengths_R)
        self._histories.note(slots_R, NUM_BLOCK_NUMBERS, noted_block(block, self._settings.max_tokens))

    def read_prompts(self, request: ProposalRequest) -> None:
        """While the target is at work on them: enter prompts into the index, each as a whole."""
        if not len(request.context):
            return
        slots = np.unique(request.context.slots_T)
        are_whole = self._state.num_committed[slots] == self._num_prompt_tokens[slots]
        self._remember(slots[are_whole & self._is_new[slots] & ~self._is_resumed[slots]])

    def _catch_up(self, slots_R: np.ndarray) -> None:
        """While the target is at work: run what the draft's cache lacks, where that is much; not of a draft
        that runs even prompts only when they are needed."""
        state = self._state
        if state.run_late_contexts is not None:
            return
        ends_R = state.num_committed[slots_R]
        lacking = ends_R - state.num_computed[slots_R] > self._most_lacking
        if lacking.any():
            slots, ends = slots_R[lacking], ends_R[lacking]
            self._runner.forward(state.catch_up(slots, ends)[0], [])
            state.num_computed[slots] = ends

    def begin_group(self, group: int) -> None:
        """None of a target group's sequences has been seen before."""
        slots = self._state.slots_of(group)
        self._histories.begin_group(group)
        self._is_new[slots], self._was_asked[slots] = True, False
        self._before = self._histories.snapshot()

    def recover(self, *, has_replied: bool) -> None:
        """The last request failed for lack of memory: every sequence will be opened again."""
        self._verified = []
        if not has_replied:
            self._histories.restore(self._before)
        self._before = self._histories.snapshot()
        self._is_new[:], self._was_asked[:] = True, False

    def _choose(self, request: ProposalRequest, wanted_R: np.ndarray) -> tuple[np.ndarray, bool]:
        """Of a draft that takes turns: the more promising source of each sequence that has nothing ready."""
        state, slots_R = self._state, request.slots_R
        is_open_R = (wanted_R > 0) & (state.num_candidates[slots_R] == 0)
        is_resumed_R = is_open_R & (request.num_redraft_R > 0)
        limits_R = np.where(is_open_R & ~is_resumed_R, wanted_R, 0)
        found = self._propose(slots_R, limits_R)
        if len(found.token_ids_C) or self._allowed.has_masks:
            room_R = self._capped(slots_R, limits_R)
            found = self._allowed.of(found, slots_R, state.num_committed[slots_R], room_R)
        if len(found.token_ids_C):
            found = found.first(self._lengths_that_promise_more(request, found))
        if is_resumed_R.any():
            found = found.instead(is_resumed_R, self._again(request, is_resumed_R).first(wanted_R))
        self._put(slots_R, found)
        has_block_R = found.lengths_R > 0
        self._was_asked[slots_R] = is_open_R & ~has_block_R
        return np.where(has_block_R, 0, np.minimum(wanted_R, self._settings.max_model_tokens)), True

    def _lengths_that_promise_more(self, request: ProposalRequest, found: Proposals) -> np.ndarray:
        """[R]: the lengths that pay, of blocks that promise more than the model's would."""
        kept_R, token_cost = self._lengths_that_pay(request, found)
        num_rows = len(kept_R)
        lines_C = np.arange(num_rows).repeat(kept_R)
        worth_R = np.bincount(lines_C, found.first(kept_R).chances_C - token_cost, minlength=num_rows)
        model_R = self._choice.worth_of_model(
            match_classes(found.match_lengths_R), self._histories.of(request.slots_R), token_cost
        )
        return np.where(worth_R > model_R, kept_R, 0)

    def _redraft(self, request: ProposalRequest, wanted_R: np.ndarray) -> np.ndarray:
        """[R]: of blocks that are repeated, what the model drafts; memory goes on in :meth:`extend`."""
        return np.maximum(wanted_R - self._again(request, request.num_redraft_R > 0).lengths_R, 0)

    def _again(self, request: ProposalRequest, is_resumed_R: np.ndarray) -> Proposals:
        return repeated_blocks(self._histories.of(request.slots_R), is_resumed_R)

    def _propose(self, slots_R: np.ndarray, limits_R: np.ndarray) -> Proposals:
        return self._index.propose(
            slots_R, self._capped(slots_R, limits_R), least_chance=self._settings.least_chance
        )

    def _capped(self, slots_R: np.ndarray, limits_R: np.ndarray) -> np.ndarray:
        """[R]: at most a block of memory, and nothing after a stop token."""
        state = self._state
        last_ids_R = state.token_ids[slots_R, state.num_committed[slots_R] - 1]
        is_end_R = self._allowed.is_stop(last_ids_R) | (last_ids_R == NOT_FINITE)
        return np.where(is_end_R, 0, np.minimum(limits_R, self._settings.max_tokens))

    def _lengths_that_pay(self, request: ProposalRequest, found: Proposals) -> tuple[np.ndarray, float]:
        """See :meth:`SourceChoice.lengths`."""
        slots_R = request.slots_R
        num_ready = int(self._state.num_candidates[slots_R].sum())
        return self._choice.lengths(
            found.chances_C,
            found.lengths_R,
            num_pass_tokens=len(slots_R) + len(request.context) + num_ready,
            num_rows=len(slots_R),
            num_context=self._num_context(slots_R),
        )

    def _candidates(self, slots_R: np.ndarray, lengths_R: np.ndarray) -> np.ndarray:
        state = self._state
        return state.token_ids[places_from(slots_R, state.num_committed[slots_R], lengths_R)]

    def _put(self, slots_R: np.ndarray, found: Proposals) -> None:
        """Make the proposed tokens their sequences' last candidates."""
        if not len(found.token_ids_C):
            return
        state, lengths_R = self._state, found.lengths_R
        tails_R = state.num_committed[slots_R] + state.num_candidates[slots_R]
        state.put_certain(places_from(slots_R, tails_R, lengths_R), found.token_ids_C)
        state.num_candidates[slots_R] += lengths_R
        state.num_from_memory[slots_R] += lengths_R

    def _remember(self, slots_R: np.ndarray) -> None:
        """All tokens that were committed since the last request, and the next ones."""
        state = self._state
        new = slots_R[self._is_new[slots_R]]
        if len(new):
            self._index.begin(new, self._num_prompt_tokens[new], self._is_resumed[new])
            self._is_new[new] = False
        known_R = self._index.num_tokens(slots_R)
        # A sequence whose logits are not finite has come to its end.
        last_ids_R = state.token_ids[slots_R, state.num_committed[slots_R] - 1]
        counts_R = state.num_committed[slots_R] - known_R - (last_ids_R == NOT_FINITE)
        self._index.append(slots_R, counts_R, state.token_ids[places_from(slots_R, known_R, counts_R)])

    def _num_context(self, slots_R: np.ndarray) -> float:
        return float(self._state.num_committed[slots_R].mean()) if len(slots_R) else 0.0


def beside(
    settings: MemorySettings | None,
    runner: ModelRunner,
    draft_state: DraftState,
    num_groups: int,
    max_seq_len: int,
    stop_token_ids: Collection[int],
    pipeline: LogitsPipeline | None,
) -> NoMemory:
    """Memory with these settings, if there is to be any."""
    if settings is None:
        return NoMemory()
    return MemoryBeside(settings, runner, draft_state, num_groups, max_seq_len, stop_token_ids, pipeline)
