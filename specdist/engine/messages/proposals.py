"""The messages of a round between the target's side and the draft's.

R sequences that decode, W of them whose next token is sampled from the target's distribution, C candidates of
all sequences, one after the other, T flat tokens, P forwards of the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from specdist.engine.messages.opened import OpenedSequences
from specdist.engine.messages.target_states import TargetStates
from specdist.engine.request import Sequence
from specdist.engine.schedule.plan import DRAW as DRAW
from specdist.engine.times.reports import (
    NO_DRAFT_STEPS,
    AheadReport,
    DraftSteps,
    RoleTimes,
)
from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.pages import PageUpdates
from specdist.sampling.distributions import Dense

NO_TOKENS = FlatBatch(*np.zeros((3, 0), np.int64))


@dataclass(frozen=True, kw_only=True)
class ProposalRequest:
    """Target → draft.

    Attributes:
        slots_R, num_accepted_R: how many candidates of its last block each sequence keeps.
        next_token_ids_R: the token after them where it is known (one-hot distributions, or a resumed
            sequence), else ``DRAW``.
        draft_now_R, num_redraft_R: most candidates, and for a resumed sequence as many as it had before.
        suspended_slots: of sequences that were preempted; a slot may have a new sequence already.
        opened, context: sequences that begin, and the context tokens of this round's target pass, which the
            draft runs too, after its reply; one with a window runs others.
        missed: next tokens of rounds in which the draft was not asked.
        num_prefill_tokens: context tokens of the target pass.
        states: of the tokens that the last pass has run, for a draft that reads them.
        next_distributions_W: the target's distributions for the ``DRAW`` sequences, in order. Like those of
            the states, its tensor follows the message.
        sequences, meanwhile: not sent. ``meanwhile`` is to be called while the request is under way, and
            before ``sequences`` are looked at.
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
    missed: FlatBatch = NO_TOKENS
    num_prefill_tokens: int = 0
    states: TargetStates | None = None
    next_distributions_W: Dense | None = None
    sequences: list[Sequence] = field(default_factory=list)
    meanwhile: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class ProposalReply:
    """Draft → target: each sequence's next token, and the candidates after it with their draft probabilities.
    ``num_rounds_alone``: nothing is drafted, and the target need not ask for so many rounds.

    For the statistics: ``draft_pass_sizes_P`` (tokens of each pass since the last reply), ``draft_steps``
    and ``times``. For the trace: ``features_3C`` of the candidates, as of
    :attr:`specdist.policies.DraftFeatures.stacked`.
    """

    next_token_ids_R: np.ndarray
    num_drafted_R: np.ndarray
    candidate_ids_C: np.ndarray
    draft_probabilities_C: np.ndarray
    ahead: AheadReport
    draft_pass_sizes_P: np.ndarray
    times: RoleTimes
    draft_steps: DraftSteps = NO_DRAFT_STEPS
    num_rounds_alone: int = 0
    features_3C: np.ndarray | None = None
