"""The messages of a round: between the target's side and the draft's, and to the ranks of the target.

R sequences that decode, W of them whose next token is sampled from the target's distribution, C candidates of
all sequences, one after the other, T flat tokens, N of them whose logits are wanted, P passes of the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specdist.engine.draft.target_states import TargetStates
from specdist.engine.messages.packing import NOTHING_TO_DO, FloatArray, not_sent
from specdist.engine.request import Sequence
from specdist.engine.schedule.plan import DRAW as DRAW
from specdist.engine.target.opened import OpenedSequences
from specdist.engine.times.reports import (
    NO_DRAFT_STEPS,
    AheadReport,
    DraftSteps,
    RoleTimes,
    TracedDrafts,
    Traffic,
)
from specdist.models.cache.pages import PageUpdates
from specdist.models.passes.flat import FlatBatch
from specdist.sampling.distributions import Distributions

NOTHING_MISSED = FlatBatch(*np.zeros((3, 0), np.int64))


@dataclass(frozen=True, kw_only=True)
class ProposalRequest:
    """Target → draft.

    Attributes:
        slots_R, num_accepted_R: how many candidates of its last block each sequence keeps.
        next_token_ids_R: the token after them where it is known (one-hot distributions, or a resumed
            sequence), else ``DRAW``.
        draft_now_R, num_redraft_R: most candidates, and for a resumed sequence as many as it had before.
        missed: next tokens of rounds in which the draft was not asked.
        next_distributions_W: the target's distributions for the ``DRAW`` sequences, in order.
        suspended_slots: of sequences that were preempted; a slot may have a new sequence already.
        opened, context: sequences that begin, and the context tokens of this round's target pass, which the
            draft runs too, after its reply; one with a window runs others.
        num_prefill_tokens: context tokens of the target pass.
        states: of the tokens that the last pass has run, for a draft that reads them.
        meanwhile: to be called while the request is under way, and before ``sequences`` are looked at.
    """

    page_updates: PageUpdates
    slots_R: np.ndarray
    num_accepted_R: np.ndarray
    next_token_ids_R: np.ndarray
    draft_now_R: np.ndarray
    num_redraft_R: np.ndarray
    suspended_slots: np.ndarray
    opened: OpenedSequences
    context: FlatBatch
    missed: FlatBatch = NOTHING_MISSED
    num_prefill_tokens: int = 0
    states: TargetStates | None = None
    # A tensor, sent separately.
    next_distributions_W: Distributions | None = not_sent()
    sequences: list[Sequence] = not_sent(())
    meanwhile: Callable[[], None] = not_sent(NOTHING_TO_DO)


@dataclass(frozen=True, kw_only=True)
class ProposalReply:
    """Draft → target: each sequence's next token, and the candidates after it with their draft probabilities.
    ``num_rounds_alone``: nothing is drafted, and the target need not ask for so many rounds.

    For the statistics: ``draft_pass_sizes_P`` (tokens of each pass since the last reply), ``draft_steps``,
    ``times`` and ``traffic``.
    """

    next_token_ids_R: np.ndarray
    num_drafted_R: np.ndarray
    candidate_ids_C: np.ndarray
    draft_probabilities_C: FloatArray
    ahead: AheadReport
    draft_pass_sizes_P: np.ndarray
    times: RoleTimes
    draft_steps: DraftSteps = NO_DRAFT_STEPS
    num_rounds_alone: int = 0
    traced: TracedDrafts | None = None
    traffic: Traffic = not_sent(Traffic())
