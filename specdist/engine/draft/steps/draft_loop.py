"""The draft loop: launch steps on the draft's device, collect what they have drawn, and keep a part of it.

On a host, and where logits are processed, a run is one step. A device would stand still while the host asks a
policy after each: it gets *runs* of steps, and the host waits once for what they have drawn. The policy
then says how long the blocks are, by the features of these tokens, or by a trained head's estimates of them.
What a run has drawn beyond the end of a block is dropped unseen: no length depends on it, so the block is the
one that single steps draft. Sequences that have stopped are left out of the next run.

Most policies end a block before a pass; one that needs a trained head's estimate of the last token, after it,
since the pass over a token gives it. What was drawn by that pass for a sequence that stops there is dropped
unseen, too; a fully accepted block needs that pass, any other has run it for nothing.

Of a block drafter all distributions of a block are known after one pass. A policy for the batch is then
asked, before the first draw, for the block's length, which so depends on no drawn token at all. Where logits
are processed by what was drawn, it is asked token by token, as of any draft.

A sequence is drafted in its slot. If the draft works ahead, *branches* of it are drafted in slots of their
own, numbered after those of the sequences; *draft slots* are both, and are treated alike here.

R draft slots to draft for, A of them that a step draws for, T tokens of several steps, D steps, W next
tokens, C columns of a token.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection

import numpy as np

from specdist.engine.draft.steps.draft_runs import DraftRuns, RunLengths
from specdist.engine.draft.steps.draft_state import DraftState
from specdist.engine.draft.steps.draft_steps import DraftBatch, Drafting, DrawnTokens
from specdist.engine.draft.steps.forced_tokens import ForcedTokens
from specdist.engine.draft.steps.policy_state import PolicyState
from specdist.engine.target.pipeline import LogitsPipeline
from specdist.models.passes.runner import ModelRunner
from specdist.policies import DraftFeatures, LengthPolicy
from specdist.sampling.distributions import FIRST_NEXT, NOT_FINITE, NextDraws, SamplingSettings
from specdist.utils.ranges import arange_segments, places_from

logger = logging.getLogger(__name__)

DRAFT_NOT_FINITE = (
    "the draft's logits are not finite (NaN or infinite) at some positions: no tokens are drafted there"
)


def waits_after_each_step(runner: ModelRunner, pipeline: LogitsPipeline | None) -> bool:
    """Whether the policy is asked after each step: on a device it is asked after several, which on a host
    would cost steps. Where logits are processed, the host knows each token before the next one."""
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
            keeps_features=policy.uses_features or is_traced, max_draft_tokens=policy.max_draft_tokens,
        )  # fmt: skip
        self._head = self._runs.head
        self.pass_counts = self._runs.pass_counts
        # With a trained head forced tokens are run like others: their passes give its estimates.
        self.forced: ForcedTokens | None = None
        if pipeline is not None and pipeline.has_masks and self._head is None:
            self.forced = ForcedTokens(pipeline, draft_state, self.is_stop_V, self.pass_counts)
        self._waits = waits_after_each_step(runner, pipeline)
        self._lengths = RunLengths(policy.max_draft_tokens + 1)
        self._chooses_blocks = self._runs.blocks is not None and pipeline is None and policy.is_for_batch
        reads_drawing_state = runner.head is not None and runner.head.reads_drawing_state
        self._ends_after_pass = policy.needs_last_estimate and not reads_drawing_state
        self._has_warned = False

    def next_tokens(self, draws: NextDraws, *, must_be_known: bool) -> np.ndarray:
        """Next tokens, on the host; or what stands for them until :meth:`extend` has put them there."""
        if must_be_known or self._waits:
            return draws.token_ids_W.cpu().numpy()
        self._runs.pending = draws
        return FIRST_NEXT - np.arange(len(draws.slots_W))

    def extend(self, draft_batch: DraftBatch) -> np.ndarray:
        """Draft from each ``tails`` position on, until there are ``num_wanted`` tokens or a stop token, or
        the policy stops. Returns the numbers [R] of tokens drafted."""
        try:
            return self.collect(self.launch(draft_batch))
        finally:
            self._runs.pending = None

    def launch(self, draft_batch: DraftBatch) -> Drafting:
        """Begin to :meth:`extend`: launch the first run of steps, without waiting for it."""
        num_wanted_R, tails_R = self.num_wanted(draft_batch), draft_batch.tails_R
        limits_R = tails_R + num_wanted_R
        if self.forced is not None and draft_batch.most_R is not None:
            limits_R = tails_R + np.where(self._are_over(draft_batch), 0, draft_batch.most_R)
        is_asked = draft_batch.round is not None
        looks = is_asked and self._policy.looks_at_tokens and bool(num_wanted_R.any())
        drafting = Drafting(draft_batch, self._policy_state, looks, num_wanted_R, limits_R)
        if self._waits:
            self._runs.uniforms_of_all(drafting)
        is_known = self._runs.pending is None or not self._policy.is_for_batch
        is_cheap = self._lengths.expects_any and not draft_batch.has_prompts_left
        if not is_known and (self._chooses_blocks or not is_cheap):
            # The policy has to know which sequences have ended: now, or else after the first run.
            self._collect_steps(drafting)
            is_known = True
        if is_known:
            self._begin_blocks(drafting)
        self._launch_steps(drafting)
        return drafting

    def collect(self, drafting: Drafting) -> np.ndarray:
        """Receive what was launched, and go on until every block is as long as it is wanted. Returns the
        numbers [R] of tokens drafted."""
        while drafting.launched:
            first = drafting.launched[0].first_depth
            tokens = self._collect_steps(drafting)
            if not drafting.is_asked:
                self._begin_blocks(drafting)
            self._take(drafting, tokens, first)
            self._launch_steps(drafting)
        if self._runs.pending is not None:
            self._collect_steps(drafting)
        if drafting.looks and not self._waits:
            self._lengths.observe(drafting.num_needed)
        tails_R, slots_R = drafting.batch.tails_R, drafting.batch.draft_slots_R
        if drafting.num_steps:
            num_computed = self._draft_state.num_computed
            num_computed[slots_R] = np.minimum(num_computed[slots_R], drafting.ends_R)
        num_drafted_R: np.ndarray = drafting.ends_R - tails_R
        if self._chooses_blocks:
            confidences_C: np.ndarray | float = np.nan
            if drafting.confidences_RB is not None:
                lines, depths = np.arange(len(slots_R)).repeat(num_drafted_R), arange_segments(num_drafted_R)
                confidences_C = drafting.confidences_RB[lines, depths]
            places = places_from(slots_R, tails_R, num_drafted_R)
            self._draft_state.features.keep_confidences(places, confidences_C)
        self.pass_counts.count_drafted(num_drafted_R)
        return num_drafted_R

    def num_wanted(self, draft_batch: DraftBatch) -> np.ndarray:
        """[R]: most tokens to draft; none after a stop token, or where the logits were not finite."""
        return np.where(self._are_over(draft_batch), 0, draft_batch.num_wanted_R)

    def _are_over(self, draft_batch: DraftBatch) -> np.ndarray:
        return self._is_last(self._draft_state.token_ids[draft_batch.draft_slots_R, draft_batch.tails_R - 1])

    def _is_last(self, token_ids_R: np.ndarray) -> np.ndarray:
        is_stop_R = self.is_stop_V[np.maximum(token_ids_R, 0)] & (token_ids_R >= 0)
        return is_stop_R | (token_ids_R == NOT_FINITE)

    def _begin_blocks(self, drafting: Drafting) -> None:
        """Put what is forced before the first draw, and ask how long the blocks are to be."""
        drafting.is_asked = True
        if self.forced is not None:
            self.forced.extend(drafting, np.flatnonzero(drafting.limits_R > drafting.batch.tails_R))
        if drafting.batch.round is None:
            return
        index_A = np.flatnonzero(drafting.num_wanted_R)
        if len(index_A):
            drafting.shorten(index_A, self._policy.wants(drafting.sequences(index_A, 0)))
        if self._chooses_blocks:
            self._choose_blocks(drafting)

    def _choose_blocks(self, drafting: Drafting) -> None:
        """Run the blocks of those that go on, and ask how much to draw of each, once and for all steps."""
        index_A = np.flatnonzero(drafting.num_wanted_R)
        if len(index_A):
            confidences_AB = self._runs.confidences(drafting, index_A)
            asked = drafting.sequences(index_A, 0)
            drafting.shorten(index_A, self._policy.num_to_draw(asked, confidences_AB))
            drafting.confidences_RB = np.zeros((len(drafting.num_wanted_R), confidences_AB.shape[1]))
            drafting.confidences_RB[index_A] = confidences_AB
        drafting.looks = False

    def _launch_steps(self, drafting: Drafting) -> None:
        """Launch the next run of steps: where nothing is asked in between, all of them."""
        first, active_A = drafting.num_steps, drafting.active_A
        num_wanted_A = drafting.num_wanted_R[active_A]
        num_steps = int(num_wanted_A.max(initial=0)) - first
        if num_steps <= 0:
            return
        if self._waits:
            num_steps = 1
        elif drafting.looks:
            num_steps = min(num_steps, self._lengths.next(first))
        active_indices = [active_A[num_wanted_A > depth] for depth in range(first, first + num_steps)]
        drafting.launched = self._runs.launch(drafting, active_indices)
        drafting.num_steps += num_steps

    def _collect_steps(self, drafting: Drafting) -> DrawnTokens:
        """Wait for the tokens of the steps launched, and for the next tokens: some sequences have ended."""
        tokens, has_next = self._runs.collect(drafting.launched)
        drafting.launched = []
        if has_next:
            drafting.num_wanted_R[self._are_over(drafting.batch)] = 0
        return tokens

    def _take(self, drafting: Drafting, tokens: DrawnTokens, first: int) -> None:
        """Keep a run's tokens up to the ends of their sequences; then the policy says how many of them, and
        whether more. ``first``: depth of its first step."""
        tokens = tokens.select(tokens.depths_T < drafting.num_wanted_R[tokens.index_T])
        is_over_R = self._end_blocks(drafting, tokens)
        most_R = drafting.num_wanted_R.copy()
        self._put(drafting, tokens.select(tokens.depths_T < most_R[tokens.index_T]))
        if self.forced is not None:
            self.forced.extend(drafting, tokens.index_T[~is_over_R[tokens.index_T]])
        if drafting.looks:
            self._ask(drafting, tokens, first)
        # Of a sequence that ended by the estimate of its last token, the pass over it was needed, too.
        num_run_R = drafting.num_wanted_R + (self._ends_after_pass & (drafting.num_wanted_R < most_R))
        tokens = tokens.select(tokens.depths_T < num_run_R[tokens.index_T])
        drafting.num_needed = int(tokens.depths_T.max(initial=drafting.num_needed - 1)) + 1

    def _end_blocks(self, drafting: Drafting, tokens: DrawnTokens) -> np.ndarray:
        """End sequences after a stop token, and before the first token whose logits were not finite. Neither
        depends on the tokens dropped. Returns which [R] have ended."""
        is_over_R = np.zeros(len(drafting.num_wanted_R), bool)
        is_finite_T = tokens.columns_CT[1] > 0
        for is_end_T, num_kept in ((self.is_stop_V[tokens.token_ids_T], 1), (~is_finite_T, 0)):
            ends = is_end_T.nonzero()[0]
            if len(ends):
                lines, depths = tokens.index_T[ends], tokens.depths_T[ends]
                np.minimum.at(drafting.num_wanted_R, lines, depths + num_kept)
                is_over_R[lines] = True
                if not num_kept and not self._has_warned:
                    self._has_warned = True
                    logger.warning(DRAFT_NOT_FINITE)
        return is_over_R

    def _put(self, drafting: Drafting, tokens: DrawnTokens) -> None:
        """Keep these tokens."""
        state, features_3T = self._draft_state, tokens.features_3T
        places = drafting.places(tokens.index_T, tokens.depths_T)
        state.token_ids[places], state.probabilities[places] = tokens.token_ids_T, tokens.columns_CT[1]
        if state.has_forced:
            state.is_forced[places] = False
        if features_3T is not None:
            state.features.keep(places, features_3T)

    def _ask(self, drafting: Drafting, tokens: DrawnTokens, first: int) -> None:
        """Ask for the lengths of blocks, by these tokens of a run that begins with the step ``first``: by all
        of them; or, where a block ends after the pass over its last token, by those that a pass has read."""
        is_late = int(self._ends_after_pass)
        # Drafted tokens at the first of these questions, and at the last.
        fewest, num_drafted = max(first + 1 - is_late, 1), drafting.num_steps - is_late
        index_A = np.flatnonzero(drafting.num_wanted_R > fewest)
        if not len(index_A) or num_drafted < fewest:
            return
        columns_CDA = tokens.grid(index_A, fewest - 1 + is_late, drafting.num_steps)
        features, earlier_DA = None, None
        if self._policy.uses_features and not is_late:
            features = DraftFeatures(*columns_CDA[2:5])
        if self._head is not None and (is_late or self._head.reads_drawing_state):
            features = features or DraftFeatures.unknown(*columns_CDA.shape[1:])
            features = dataclasses.replace(features, estimates=columns_CDA[-1])
        elif self._head is not None:
            earlier_DA = columns_CDA[-1].copy()
            if not first:
                earlier_DA[0] = np.nan
        asked = drafting.sequences(index_A, num_drafted, features, earlier_DA)
        drafting.shorten(index_A, self._policy.wants(asked))
