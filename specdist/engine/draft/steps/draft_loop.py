"""The draft loop: give the draft's device steps, receive what they have drawn, and take what is kept of it.

On a host, and where logits are processed, a run is one step. A device would stand still while the host asks a
policy after each: it is given *runs* of steps, and the host waits once for what they have drawn. Whether a
sequence goes on after a token follows from the token's features, or from a trained head's estimate of it. The
policy is asked after the run, for one step after the other, as if each had just been taken. What a run has
drawn beyond the end of a sequence's block is dropped unseen: no decision depends on it, so the block is the
one that single steps draft. Sequences that have stopped are left out of the next run.

Most policies decide before a pass; one that needs a trained head's estimate of the last token, after it,
since the pass over a token gives it. What was drawn by that pass for a sequence that stops there is dropped
unseen, too; a fully accepted block needs that pass, any other has run it for nothing.

Of a block drafter all distributions of a block are known after one pass. A policy that can is then asked,
before the first draw, for the block's length, which so depends on no drawn token at all. Where logits are
processed by what was drawn, it is asked token by token, as of any draft.

A sequence is drafted in its slot. If the draft works ahead, *branches* of it are drafted in slots of their
own, numbered after those of the sequences; *draft slots* are both, and are treated alike here.

R draft slots to draft for, A of them that a step draws for, T tokens of several steps, D steps, W next
tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import numpy as np
from torch import Tensor

from specdist.engine.draft.steps.draft_features import Places
from specdist.engine.draft.steps.draft_runs import DraftRuns, NextTokens, RunLengths
from specdist.engine.draft.steps.draft_state import DraftState
from specdist.engine.draft.steps.draft_steps import DraftBatch, Drafting, DrawnTokens, GivenSteps, Told
from specdist.engine.draft.steps.forced_tokens import ForcedTokens
from specdist.engine.draft.steps.policy_state import PolicyState
from specdist.engine.messages.failures import DRAFT_NOT_FINITE
from specdist.engine.target.pipeline import LogitsPipeline
from specdist.models.passes.runner import ModelRunner
from specdist.policies import (
    BatchPolicy,
    BlockPolicy,
    DraftFeatures,
    HeadPolicy,
    LengthPolicy,
    RunPolicy,
    needs_last_estimate,
)
from specdist.policies.lengths.counted import FixedLength
from specdist.sampling.distributions import NOT_FINITE, SamplingSettings
from specdist.utils.ranges import arange_segments, places_from

logger = logging.getLogger(__name__)


def waits_after_each_step(runner: ModelRunner, pipeline: LogitsPipeline | None) -> bool:
    """On a device the policy is asked after several steps; on a host that would cost steps. Where logits are
    processed, the host knows each token before the next one."""
    return not runner.is_asynchronous or pipeline is not None


class DraftLoop:
    """Extends sequences and branches by tokens that the draft model draws, and by those that are forced."""

    def __init__(
        self,
        runner: ModelRunner,
        policy: LengthPolicy,
        draft_state: DraftState,
        policy_state: PolicyState,
        *,
        settings: SamplingSettings,
        vocab_size: int,
        stop_token_ids: Collection[int],
        keeps_scores: bool,
        is_traced: bool = False,
        pipeline: LogitsPipeline | None = None,
    ) -> None:
        self._policy, self._draft_state, self._policy_state = policy, draft_state, policy_state
        self.is_stop_V = np.zeros(vocab_size, bool)
        self.is_stop_V[[token_id for token_id in stop_token_ids if token_id < vocab_size]] = True
        self._runs = DraftRuns(
            runner, draft_state, pipeline,
            settings=settings, vocab_size=vocab_size, keeps_scores=keeps_scores,
            keeps_estimates=policy.uses_features or is_traced, max_draft_tokens=policy.max_draft_tokens,
        )  # fmt: skip
        self._head = self._runs.head
        self.pass_counts = self._runs.pass_counts
        # With a trained head forced tokens are run like others: their passes give its estimates.
        self.forced: ForcedTokens | None = None
        if pipeline is not None and pipeline.has_masks and self._head is None:
            self.forced = ForcedTokens(pipeline, draft_state, self.is_stop_V, self.pass_counts)
        self._waits = waits_after_each_step(runner, pipeline)
        self._lengths = RunLengths(policy.max_draft_tokens + 1)
        # Asked once: these checks go through all methods of a protocol.
        self._looks = self._waits or policy.uses_features or isinstance(policy, HeadPolicy)
        self._decides_for_all = isinstance(policy, BatchPolicy)
        self._run_policy = policy if isinstance(policy, RunPolicy) else None
        self._block_policy: BlockPolicy | None = None
        if runner.blocks is not None and pipeline is None and isinstance(policy, BlockPolicy):
            self._block_policy = policy
        reads_drawing_state = runner.head is not None and runner.head.reads_drawing_state
        self._decides_after_pass = needs_last_estimate(policy) and not reads_drawing_state
        # Its answer is known; that of a class derived from it is not.
        self._is_constant = type(policy) is FixedLength
        self._has_warned = False

    def next_tokens(self, token_ids_W: Tensor, places_W: Places, *, must_be_known: bool) -> np.ndarray:
        """Drawn next tokens, on the host; or what stands for them until :meth:`extend` has put them there."""
        if must_be_known or self._waits:
            return token_ids_W.cpu().numpy()
        self._runs.unknown = NextTokens(token_ids_W, places_W)
        # In their places, an id after which tokens are drafted.
        return np.full(len(token_ids_W), self.is_stop_V.argmin())

    def extend(self, draft_batch: DraftBatch) -> np.ndarray:
        """Draft from each ``tails`` position on, until there are ``num_wanted`` tokens or a stop token, or
        the policy stops. Returns the numbers [R] of tokens drafted."""
        drafting = self._begin(draft_batch)
        try:
            self._extend(drafting)
            if self._runs.unknown is not None:
                self._receive(drafting, [])
        finally:
            self._runs.unknown = None
        if drafting.num_steps:
            num_computed, slots_R = self._draft_state.num_computed, draft_batch.draft_slots_R
            num_computed[slots_R] = np.minimum(num_computed[slots_R], drafting.ends_R)
        num_drafted_R: np.ndarray = drafting.ends_R - draft_batch.tails_R
        if drafting.confidences_RB is not None:
            places = places_from(draft_batch.draft_slots_R, draft_batch.tails_R, num_drafted_R)
            lines, depths = (
                np.arange(len(num_drafted_R)).repeat(num_drafted_R),
                arange_segments(num_drafted_R),
            )
            self._draft_state.features.keep_estimates(places, drafting.confidences_RB[lines, depths])
        self.pass_counts.count_drafted(num_drafted_R)
        return num_drafted_R

    def num_wanted(self, draft_batch: DraftBatch) -> np.ndarray:
        """[R]: most tokens to draft; none after a stop token, or where the logits were not finite."""
        return np.where(self._are_over(draft_batch), 0, draft_batch.num_wanted_R)

    def _are_over(self, draft_batch: DraftBatch) -> np.ndarray:
        return self._is_last(self._draft_state.token_ids[draft_batch.draft_slots_R, draft_batch.tails_R - 1])

    def _is_last(self, token_ids_R: np.ndarray) -> np.ndarray:
        return self.is_stop_V[token_ids_R] | (token_ids_R == NOT_FINITE)

    def _begin(self, draft_batch: DraftBatch) -> Drafting:
        num_wanted_R, asks = self.num_wanted(draft_batch), draft_batch.uses_policy
        forced_too_R = num_wanted_R
        if draft_batch.most_R is not None:
            forced_too_R = np.where(self._are_over(draft_batch), 0, draft_batch.most_R)
        if asks and self._is_constant:
            num_wanted_R, asks = np.minimum(num_wanted_R, self._policy.max_draft_tokens), False
        most_R = num_wanted_R if self.forced is None else forced_too_R
        looks, limits_R = self._waits or (asks and self._looks), draft_batch.tails_R + most_R
        drafting = Drafting(draft_batch, asks, looks, num_wanted_R, limits_R)
        if self._waits:
            self._runs.uniforms_of_all(drafting)
        return drafting

    def _extend(self, drafting: Drafting) -> None:
        """Run after run; where nothing is asked in between, in one."""
        # A policy that decides for the whole batch has to know which sequences have ended.
        is_asked = self._runs.unknown is None or not self._decides_for_all
        if not is_asked and (self._block_policy is not None or not self._lengths.expects_any):
            self._receive(drafting, [])
            is_asked = True
        if is_asked:
            self._ask(drafting, 0)
        if self._block_policy is not None and drafting.asks:
            self._choose_lengths(drafting, self._block_policy)
        while drafting.goes_on_R.any():
            num_steps = int(drafting.num_wanted_R[drafting.goes_on_R].max()) - drafting.num_steps
            if self._waits:
                num_steps = 1
            elif drafting.looks:
                num_steps = min(num_steps, self._lengths.next(drafting.num_steps))
            given = self._give(drafting, num_steps)
            drafting.batch.meanwhile()
            tokens = DrawnTokens.joined(self._receive(drafting, given))
            if not is_asked:
                self._ask(drafting, 0)
                is_asked = True
            if drafting.looks or self._head is not None:
                self._take_run(drafting, given, tokens)
            else:
                self._put(drafting, drafting.still_going(tokens))
            drafting.goes_on_R &= drafting.looks
        if drafting.looks and not self._waits and drafting.num_wanted_R.any():
            self._lengths.observe(drafting.num_needed)

    def _choose_lengths(self, drafting: Drafting, policy: BlockPolicy) -> None:
        """Run the blocks of those that go on, and ask how much to draw of each, once and for all steps."""
        index_A = np.flatnonzero(drafting.goes_on_R)
        if len(index_A):
            confidences_AB = self._runs.confidences(drafting, index_A)
            asked = drafting.sequences(index_A, 0, self._policy_state)
            num_A = np.minimum(drafting.num_wanted_R[index_A], policy.num_to_draw(asked, confidences_AB))
            drafting.num_wanted_R[index_A], drafting.goes_on_R[index_A] = num_A, num_A > 0
            drafting.confidences_RB = np.zeros((len(drafting.goes_on_R), confidences_AB.shape[1]))
            drafting.confidences_RB[index_A] = confidences_AB
        drafting.asks, drafting.looks = False, self._waits

    def _give(self, drafting: Drafting, num_steps: int) -> list[GivenSteps]:
        """Give the device so many steps, but for those in which all sequences have stopped."""
        first, active_A = drafting.num_steps, drafting.active_A
        actives: list[np.ndarray] = []
        # Of those that go on, the others want none: in most rounds all want the same number of steps.
        num_wanted_A = (drafting.num_wanted_R * drafting.goes_on_R)[active_A]
        least = int(num_wanted_A.min(initial=first + num_steps))
        for depth in range(first, first + num_steps):
            if depth >= least:
                active_A = active_A[(drafting.goes_on_R & (drafting.num_wanted_R > depth))[active_A]]
            if drafting.asks and not drafting.looks and depth and len(active_A):
                asked = drafting.sequences(active_A, depth, self._policy_state)
                active_A = active_A[self._policy.wants_more(asked)]
            if not len(active_A):
                break
            actives.append(active_A)
        given = self._runs.give(drafting, actives)
        drafting.num_steps += num_steps
        return given

    def _receive(self, drafting: Drafting, given: list[GivenSteps]) -> list[DrawnTokens]:
        """Wait for the steps' tokens, and for the next tokens: some sequences have ended."""
        tokens, unknown = self._runs.receive(given)
        if unknown is not None:
            ids_W = unknown.token_ids_W.numpy()
            self._draft_state.token_ids[unknown.places_W] = ids_W
            is_over_R = np.isin(drafting.batch.draft_slots_R, unknown.places_W[0][self._is_last(ids_W)])
            drafting.goes_on_R &= ~is_over_R
        return tokens

    def _take_run(self, drafting: Drafting, given: list[GivenSteps], tokens: DrawnTokens) -> None:
        """Decide after each step, as if it had just been taken. ``tokens``: of all steps."""
        if self._waits:
            self._take(drafting, given[0].first_depth, tokens)
            return
        sizes = [len(active_A) for each in given for active_A in each.actives]
        step = begin = 0
        decides_at_once = drafting.looks and self._run_policy is not None and self._head is None
        while step < len(sizes):
            depth, size = given[0].first_depth + step, sizes[step]
            num_alike, found = sizes[step:].count(size), 0
            if decides_at_once and num_alike > 1:
                alike = tokens.select(slice(begin, begin + num_alike * size))
                found = self._take_unanimous(drafting, depth, alike, num_alike)
                decides_at_once = found > 0
            begin += found * size
            if found < num_alike:
                self._take(drafting, depth + found, tokens.select(slice(begin, begin + size)))
                begin, found = begin + size, found + 1
            step += found

    def _take_unanimous(self, drafting: Drafting, depth: int, tokens: DrawnTokens, num_steps: int) -> int:
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
        rows = drafting.sequences(index_A, depth + 1, self._policy_state)
        found = policy.num_unanimous(rows, DraftFeatures(*features_3T))
        if found:
            self._put(drafting, tokens.select(slice(found * len(index_A))))
            drafting.num_needed += found
        return found

    def _take(self, drafting: Drafting, depth: int, tokens: DrawnTokens) -> None:
        """Take a step, which may have drawn tokens of sequences that had stopped before."""
        tokens = drafting.still_going(tokens)
        drafting.num_needed += len(tokens.index_T) > 0
        earlier_A = own_A = None
        if self._head is not None:
            places = drafting.places(tokens.index_T, depth)
            earlier_A, own_A = self._head.keep(tokens.columns_CT[-1], places, is_first=depth == 0)
            if depth and self._decides_after_pass:
                self._answer(drafting, depth, earlier_A)
                tokens, earlier_A = tokens.select(drafting.goes_on_R[tokens.index_T]), None
        features_3A = tokens.features_3T if self._policy.uses_features else None
        features = None if features_3A is None else DraftFeatures(*features_3A)
        drafting.told = Told(tokens.index_T, features, earlier_A)
        if own_A is not None:
            drafting.told = drafting.told.with_estimates(own_A)
        self._put(drafting, tokens)
        self._ask(drafting, depth + 1)

    def _put(self, drafting: Drafting, tokens: DrawnTokens) -> None:
        """Keep these tokens. A sequence ends after a stop token, and before the first token whose logits were
        not finite. Neither depends on the tokens dropped."""
        state, index_T, ids_T = self._draft_state, tokens.index_T, tokens.token_ids_T
        probabilities_T, features_3T = tokens.columns_CT[1], tokens.features_3T
        places = drafting.places(index_T, tokens.depths_T)
        state.token_ids[places], state.probabilities[places] = ids_T, probabilities_T
        if state.has_forced:
            state.is_forced[places] = False
        if features_3T is not None:
            state.features.keep(places, features_3T)
        # Positions ascend, so the last write is the largest.
        drafting.ends_R[index_T] = places[1] + 1
        nonfinite_T = ~(probabilities_T > 0)
        for is_end_T, num_kept in ((self.is_stop_V[ids_T], 1), (nonfinite_T, 0)):
            ends = is_end_T.nonzero()[0]
            if len(ends):
                np.minimum.at(drafting.ends_R, index_T[ends], places[1][ends] + num_kept)
                drafting.goes_on_R[index_T[ends]] = False
                if not num_kept and not self._has_warned:
                    self._has_warned = True
                    logger.warning(DRAFT_NOT_FINITE)

    def _ask(self, drafting: Drafting, depth: int) -> None:
        """Which of those that go on have the step of this depth: what is forced stands before it, as many are
        wanted, and the policy says so."""
        if self.forced is not None:
            self.forced.before_step(drafting)
        drafting.goes_on_R &= drafting.num_wanted_R > depth
        if not depth or (drafting.looks and not self._decides_after_pass):
            self._answer(drafting, depth)

    def _answer(self, drafting: Drafting, depth: int, estimates_A: np.ndarray | None = None) -> None:
        """Ask the policy which of those that go on do so; ``estimates``: of the last tokens of these."""
        index_A, told = np.flatnonzero(drafting.goes_on_R), drafting.told
        if drafting.asks and len(index_A):
            told = told and told.select(drafting.goes_on_R[told.index_A])
            if told is not None and estimates_A is not None:
                told = told.with_estimates(estimates_A)
            asked = drafting.sequences(index_A, depth, self._policy_state, told)
            drafting.goes_on_R[index_A] = self._policy.wants_more(asked)
