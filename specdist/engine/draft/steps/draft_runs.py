"""The draft loop of a device: the host gives it a *run* of steps, and waits once for what they have drawn.

Whether a sequence goes on after a token follows from the token's features, or from a trained head's estimate
of it. The policy is asked after the run, for one step after the other, as if each had just been taken. What a
run has drawn beyond the end of a sequence's block is dropped unseen: no decision depends on it, so the block
is the one that :class:`DraftLoop` drafts. Sequences that have stopped are left out of the next run.

The steps of a run are replayed as one, where :mod:`specdist.models.passes.static_runs` has recorded runs of
their number or of parts of it; else they are given to the device one by one.

Next tokens that are drawn by chance stay on the device, too, until the first run is over. A sequence that
ends with its next token has taken part in that run for nothing.

R draft slots to draft for, A of them that a step draws for, W next tokens, D steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.engine.draft.steps.draft_features import UNKNOWN, Places
from specdist.engine.draft.steps.draft_loop import DraftLoop
from specdist.engine.draft.steps.draft_steps import (
    DraftBatch,
    DrawnTokens,
    GivenSteps,
    Step,
    Told,
    indices_of,
    joined,
    taking_part,
)
from specdist.engine.draft.steps.run_lengths import RunLengths
from specdist.models.passes.flat import FlatBatch
from specdist.models.passes.runner import ModelRunner
from specdist.models.passes.static_runs import LONGEST_RUN, RECORDED_LENGTHS
from specdist.policies import BatchPolicy, DraftFeatures, HeadPolicy, LengthPolicy, RunPolicy
from specdist.policies.lengths.counted import FixedLength
from specdist.sampling.uploads import upload


class _NextTokens(NamedTuple):
    """Next tokens that the host does not know yet, and where they belong."""

    token_ids_W: Tensor
    places_W: Places


@dataclass
class _Drafting:
    """A batch that is being drafted.

    Attributes:
        asks: whether the policy has a say; ``looks``: and its answers depend on what has been drawn.
        active_A, newest: whom the device has drawn for in its last step, and what.
        num_steps, num_needed: steps that have been run, and those that a loop would have taken that waits
            after each.
        goes_on_R: those that need the next step, as far as is known on the host.
        seen: the tokens that are kept, by step; ``told``: what is known of those of the last one.
    """

    batch: DraftBatch
    asks: bool
    looks: bool
    num_wanted_R: np.ndarray
    num_computed_R: np.ndarray
    num_drafted_R: np.ndarray
    goes_on_R: np.ndarray
    active_A: np.ndarray
    newest: Step | None = None
    num_steps: int = 0
    num_needed: int = 0
    seen: list[DrawnTokens] = field(default_factory=list)
    told: Told | None = None


class DraftRuns(DraftLoop):
    """Extends sequences like a :class:`DraftLoop`, by the same tokens."""

    _unknown: _NextTokens | None = None

    def __init__(self, runner: ModelRunner, policy: LengthPolicy, *states: Any, **settings: Any) -> None:
        """As a :class:`DraftLoop`."""
        super().__init__(runner, policy, *states, **settings)
        # Asked once: these checks go through all methods of a protocol.
        self._looks = policy.uses_features or isinstance(policy, HeadPolicy)
        self._decides_for_all = isinstance(policy, BatchPolicy)
        self._run_policy = policy if isinstance(policy, RunPolicy) else None
        # Its answer is known; that of a class derived from it is not.
        self._is_constant = type(policy) is FixedLength
        self._lengths = RunLengths(policy.max_draft_tokens + 1)
        # By number of steps: the longest run of at most so many that is recorded.
        lengths = {1, *RECORDED_LENGTHS, policy.max_draft_tokens}
        self._recorded_lengths = [
            max((length for length in lengths if length <= number), default=1)
            for number in range(LONGEST_RUN + 1)
        ]

    def next_tokens(self, token_ids_W: Tensor, places_W: Places, *, must_be_known: bool) -> np.ndarray:
        if must_be_known:
            return super().next_tokens(token_ids_W, places_W, must_be_known=True)
        self._unknown = _NextTokens(token_ids_W, places_W)
        # In their places, an id after which tokens are drafted.
        return np.full(len(token_ids_W), self.is_stop_V.argmin())

    def extend(self, draft_batch: DraftBatch) -> np.ndarray:
        try:
            drafting = self._begin(draft_batch)
            self._extend(drafting)
            if self._unknown is not None:
                self._receive(drafting, [])
        finally:
            self._unknown = None
        if drafting.seen:
            draft_slots_R, ends_R = draft_batch.draft_slots_R, draft_batch.tails_R + drafting.num_drafted_R
            self._write(draft_slots_R, draft_batch.tails_R, drafting.num_drafted_R, drafting.seen)
            self._draft_state.num_computed[draft_slots_R] = np.minimum(drafting.num_computed_R, ends_R)
        self.pass_counts.count_drafted(drafting.num_drafted_R)
        return drafting.num_drafted_R

    def _begin(self, draft_batch: DraftBatch) -> _Drafting:
        draft_slots_R, num_wanted_R = draft_batch.draft_slots_R, self.num_wanted(draft_batch)
        asks = draft_batch.uses_policy
        if asks and self._is_constant:
            num_wanted_R, asks = np.minimum(num_wanted_R, self._policy.max_draft_tokens), False
        return _Drafting(
            batch=draft_batch,
            asks=asks,
            looks=asks and self._looks,
            num_wanted_R=num_wanted_R,
            num_computed_R=self._draft_state.num_computed[draft_slots_R],
            num_drafted_R=np.zeros_like(num_wanted_R),
            goes_on_R=num_wanted_R > 0,
            active_A=np.arange(len(draft_slots_R)),
        )

    def _extend(self, drafting: _Drafting) -> None:
        """Run after run; where nothing is asked in between, in one."""
        lengths = self._lengths
        is_asked = self._unknown is None or not self._decides_for_all
        if not is_asked and not lengths.expects_any:
            self._receive(drafting, [])
            is_asked = True
        if is_asked:
            self._ask(drafting, 0)
        while drafting.goes_on_R.any():
            num_steps = int(drafting.num_wanted_R[drafting.goes_on_R].max()) - drafting.num_steps
            if drafting.looks:
                num_steps = min(num_steps, lengths.next(drafting.num_steps))
            given = self._give(drafting, num_steps)
            drafting.batch.meanwhile()
            arrived = self._receive(drafting, given)
            if not is_asked:
                # A policy that decides for the whole batch had to know which sequences have ended.
                self._ask(drafting, 0)
                is_asked = True
            if self._head is not None:
                for each, numbers in zip(given, arrived, strict=True):
                    for depth, step in enumerate(each.steps(numbers), each.first_depth):
                        self._take(drafting, depth, step)
            elif given:
                tokens = joined([each.tokens(numbers) for each, numbers in zip(given, arrived, strict=True)])
                if drafting.looks:
                    self._take_run(drafting, given, tokens)
                else:
                    self._take_all(drafting, tokens)
            drafting.goes_on_R &= drafting.looks
        if drafting.looks and drafting.num_wanted_R.any():
            lengths.observe(drafting.num_needed)

    def _give(self, drafting: _Drafting, num_steps: int) -> list[GivenSteps]:
        """Give the device so many steps, but for those in which all sequences have stopped."""
        batch, first, active_A = drafting.batch, drafting.num_steps, drafting.active_A
        drafting.num_steps += num_steps
        actives: list[np.ndarray] = []
        # Of those that go on, the others want none: in most rounds all want the same number of steps.
        num_wanted_A = (drafting.num_wanted_R * drafting.goes_on_R)[active_A]
        least = int(num_wanted_A.min(initial=first + num_steps))
        for depth in range(first, first + num_steps):
            if depth >= least:
                active_A = active_A[(drafting.goes_on_R & (drafting.num_wanted_R > depth))[active_A]]
            if drafting.asks and not drafting.looks and depth and len(active_A):
                active_A = active_A[self._answer(batch, active_A, depth, None)]
            if not len(active_A):
                break
            actives.append(active_A)
        given: list[GivenSteps] = []
        while actives:
            if len(actives[0]) < len(drafting.active_A):
                self._narrow(drafting, np.isin(drafting.active_A, actives[0], assume_unique=True))
            length = 1 if self._runner.runs is None else self._recorded_length(len(actives))
            run = self._run(drafting, first, actives[:length]) if length > 1 else None
            if run is None:
                run = GivenSteps.of(self._step(drafting, first, actives[0]), first)
            given.append(run)
            first += len(run.actives)
            del actives[: len(run.actives)]
        return given

    def _recorded_length(self, num_steps: int) -> int:
        """The longest run of at most so many steps that is recorded, or 1."""
        return self._recorded_lengths[min(num_steps, LONGEST_RUN)]

    def _run(self, drafting: _Drafting, depth: int, actives: list[np.ndarray]) -> GivenSteps | None:
        """Replay steps, whose sequences are among those of the first; None if they cannot be recorded."""
        state, batch, active_A = self._draft_state, drafting.batch, actives[0]
        slots_A, positions_A = batch.draft_slots_R[active_A], batch.tails_R[active_A] + depth
        last, places = drafting.newest, (slots_A, positions_A - 1)
        first = self._catch_up(slots_A, positions_A)[0] if last is None else FlatBatch(last.drawn_A, *places)
        features_3A = last and last.features_3A
        if self._head is not None:
            features_3A = self._head.inputs(places, features_3A, is_first=last is None)
        takes_part_DA = taking_part(actives)
        keys = state.random_keys(slots_A, positions_A)
        assert self._runner.runs is not None
        run = self._runner.runs.run(first, takes_part_DA.sum(axis=0), keys, self._draws, features_3A)
        if run is None:
            return None
        has_features, has_estimates = self._draws.keeps_features, self._head is not None
        given = GivenSteps(run.columns_DCA, depth, actives, has_features, has_estimates)
        for step, each_A in enumerate(actives):
            self.pass_counts.count(len(each_A) if step else len(first), len(each_A))
            each = batch.draft_slots_R[each_A], batch.tails_R[each_A] + depth + step
            drafting.num_computed_R[each_A] = each[1]
            if self._draws.keeps_scores:
                scores_AV = run.scores[step]
                if len(each_A) < len(active_A):
                    scores_AV = scores_AV[indices_of(takes_part_DA[step], scores_AV.device)]
                state.scores.keep(*each, scores_AV)
            if self._draws.keeps_features:
                state.features.keep_estimates(each, UNKNOWN)
        drafting.newest = given.last
        return given

    def _step(self, drafting: _Drafting, depth: int, active_A: np.ndarray) -> Step:
        """Give the device a step."""
        batch = drafting.batch
        places = batch.draft_slots_R[active_A], batch.tails_R[active_A] + depth
        logits_AV, estimates_A = self._forward(*places, drafting.newest)
        drafting.num_computed_R[active_A] = places[1]
        uniforms_1A = self._uniforms(*places, 1)
        step = self._draw(logits_AV, active_A, places, None if uniforms_1A is None else uniforms_1A[0])
        drafting.newest = step = self._head.with_estimates(step, estimates_A) if self._head else step
        return step

    @staticmethod
    def _narrow(drafting: _Drafting, keep_A: np.ndarray) -> None:
        drafting.active_A = drafting.active_A[keep_A]
        drafting.newest = drafting.newest and drafting.newest.select(keep_A)

    @staticmethod
    def _take_all(drafting: _Drafting, tokens: DrawnTokens) -> None:
        """The only run of a drafting in which nothing is asked after a step; what follows a stop token is cut
        off later."""
        if not drafting.goes_on_R.all():
            tokens = tokens.select(drafting.goes_on_R[tokens.index_T])
        drafting.seen.append(tokens)
        # Depths ascend, so the last write is the largest.
        drafting.num_drafted_R[tokens.index_T] = tokens.depths_T + 1

    def _take_run(self, drafting: _Drafting, given: list[GivenSteps], tokens: DrawnTokens) -> None:
        """Decide after each step, as a loop that waits for each does, where there is no head.
        ``tokens``: of all steps."""
        sizes = [len(active_A) for each in given for active_A in each.actives]
        step = begin = 0
        decides_at_once = self._run_policy is not None
        while step < len(sizes):
            depth, size = given[0].first_depth + step, sizes[step]
            num_alike, found = sizes[step:].count(size), 0
            if decides_at_once:
                alike = tokens.select(slice(begin, begin + num_alike * size))
                found = self._take_unanimous(drafting, depth, alike, num_alike)
                decides_at_once = found > 0
            begin += found * size
            if found < num_alike:
                self._take_without_head(drafting, depth + found, tokens.select(slice(begin, begin + size)))
                begin, found = begin + size, found + 1
            step += found

    def _take_unanimous(self, drafting: _Drafting, depth: int, tokens: DrawnTokens, num_steps: int) -> int:
        """Take the first of these steps, in which the same sequences take part, as long as all of those that
        go on do so after them, too. Returns how many steps that are."""
        policy, index_A = self._run_policy, tokens.index_T[: len(tokens.index_T) // num_steps]
        goes_on_A = drafting.goes_on_R[index_A]
        if not goes_on_A.all():
            tokens, index_A = tokens.select(np.tile(goes_on_A, num_steps)), index_A[goes_on_A]
        if not len(index_A):
            return 0
        most = int(drafting.num_wanted_R[index_A].min()) - depth - 1
        is_stop_DA = self.is_stop_V[tokens.token_ids_T].reshape(num_steps, -1)
        if is_stop_DA.any():
            most = min(most, int(is_stop_DA.any(axis=1).argmax()))
        num_steps = min(num_steps, most)
        features_3T = tokens.select(slice(num_steps * len(index_A))).features_3T
        if num_steps < 2 or policy is None or features_3T is None:
            return 0
        rows = self._rows(drafting.batch, index_A, depth + 1, None)
        found = policy.num_unanimous(rows, DraftFeatures(*features_3T))
        if found:
            drafting.seen.append(tokens.select(slice(found * len(index_A))))
            drafting.num_drafted_R[index_A] = depth + found
            drafting.num_needed += found
        return found

    def _take_without_head(self, drafting: _Drafting, depth: int, tokens: DrawnTokens) -> None:
        """As :meth:`_take`, where there is no head."""
        goes_on_A = drafting.goes_on_R[tokens.index_T]
        if not goes_on_A.all():
            tokens = tokens.select(goes_on_A)
        drafting.num_needed += len(tokens.index_T) > 0
        features_3A = tokens.features_3T if self._policy.uses_features else None
        drafting.told = Told(tokens.index_T, None if features_3A is None else DraftFeatures(*features_3A))
        self._keep(drafting, depth, tokens)

    def _take(self, drafting: _Drafting, depth: int, step: Step) -> None:
        """Do what a loop does that waits after each step. ``step``: on the host; it may have drawn tokens of
        sequences that had stopped before."""
        batch = drafting.batch
        step = step.select(drafting.goes_on_R[step.active_A])
        drafting.num_needed += len(step.active_A) > 0
        if self._head is not None and step.earlier_estimates_A is not None:
            slots_A, positions_A = batch.draft_slots_R[step.active_A], batch.tails_R[step.active_A] + depth
            earlier = slots_A, positions_A - 1
            known_A = self._head.known(step.earlier_estimates_A, earlier, is_first=depth == 0)
            if depth and self._decides_after_pass:
                self._ask(drafting, depth, known_A)
                step, known_A = step.select(drafting.goes_on_R[step.active_A]), None
            step = step._replace(earlier_estimates_A=known_A)
            if known_A is not None:
                step = self._head.told(step, (slots_A, positions_A), is_first=depth == 0)
        drafting.told = self._told(step)
        self._keep(drafting, depth, step.tokens(depth))

    def _keep(self, drafting: _Drafting, depth: int, tokens: DrawnTokens) -> None:
        """These tokens of a step are kept."""
        drafting.seen.append(tokens)
        drafting.num_drafted_R[tokens.index_T] = depth + 1
        drafting.goes_on_R &= drafting.num_wanted_R > depth + 1
        drafting.goes_on_R[tokens.index_T[self.is_stop_V[tokens.token_ids_T]]] = False
        if drafting.looks and not self._decides_after_pass:
            self._ask(drafting, depth + 1)

    def _ask(self, drafting: _Drafting, depth: int, estimates_A: Tensor | None = None) -> None:
        """Ask the policy which of those that go on do so; ``estimates``: of the last tokens of these."""
        index_A, told = np.flatnonzero(drafting.goes_on_R), drafting.told
        if drafting.asks and len(index_A):
            told = told and told.select(drafting.goes_on_R[told.index_A])
            if told is not None and estimates_A is not None:
                told = told.with_estimates(estimates_A.numpy())
            drafting.goes_on_R[index_A] = self._answer(drafting.batch, index_A, depth, told)

    def _catch_up(self, draft_slots_A: np.ndarray, positions_A: np.ndarray) -> tuple[FlatBatch, np.ndarray]:
        batch, index_A = super()._catch_up(draft_slots_A, positions_A)
        if self._unknown is None:
            return batch, index_A
        token_ids_W, (slots_W, _) = self._unknown
        line_of_slot = np.full(len(self._draft_state.num_committed), -1)
        line_of_slot[slots_W] = np.arange(len(slots_W))
        lines_A = line_of_slot[draft_slots_A]
        is_unknown_A = lines_A >= 0
        token_ids_T, index, lines = upload(
            self._runner.device, batch.token_ids_T, index_A[is_unknown_A], lines_A[is_unknown_A]
        )
        # Where a next token is none, since the logits were not finite, any will do: nothing is kept.
        token_ids_T[index] = token_ids_W[lines].clamp(min=0)
        return FlatBatch(token_ids_T, batch.slots_T, batch.positions_T), index_A

    def _receive(self, drafting: _Drafting, given: list[GivenSteps]) -> list[Tensor]:
        """Wait for the steps' numbers, and for the next tokens: some sequences have ended."""
        unknown, self._unknown = self._unknown, None
        if unknown is None and len(given) <= 1:
            return [each.numbers_DCA.cpu() for each in given]
        numbers = [each.numbers_DCA.flatten() for each in given]
        numbers += [] if unknown is None else [unknown.token_ids_W.double()]
        on_host = (torch.cat(numbers) if len(numbers) > 1 else numbers[0]).cpu()
        parts = on_host.split([len(each) for each in numbers])
        if unknown is not None:
            ids_W = parts[-1].long().numpy()
            self._draft_state.token_ids[unknown.places_W] = ids_W
            is_over_R = np.isin(drafting.batch.draft_slots_R, unknown.places_W[0][self._is_last(ids_W)])
            drafting.goes_on_R &= ~is_over_R
        return list(parts[: len(given)])
