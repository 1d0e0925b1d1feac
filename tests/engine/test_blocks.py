"""The blocks of a pass as arrays: those of the sequences that go on, token by token."""

from __future__ import annotations

import numpy as np

from specdist.engine.messages.proposals import ProposalReply
from specdist.engine.request import FinishReason, Request, Sequence
from specdist.engine.rounds.verify import NewBlocks, Tails, flat_batch
from specdist.engine.times.reports import AheadReport, RoleTimes


def test_a_sequence_that_ends_with_its_next_token_leaves_none_of_its_candidates() -> None:
    """A stop string may end one in the middle of the batch, after which the draft has drafted on."""
    sequences = [
        Sequence(
            request=Request(row_id=slot, sample_index=0, prompt_ids=[1] * length),
            order=slot,
            stream_key=slot,
            max_length=20,
            token_ids=[1] * length,
            slot=slot,
        )
        for slot, length in enumerate((3, 5, 4))
    ]
    reply = ProposalReply(
        next_token_ids_R=np.array([10, 20, 30]),
        num_drafted_R=np.array([2, 1, 1]),
        candidate_ids_C=np.array([11, 12, 21, 31]),
        draft_probabilities_C=np.ones(4),
        ahead=AheadReport.nothing(3),
        draft_pass_sizes_P=np.zeros(0, np.int64),
        times=RoleTimes(),
    )
    ends: list[FinishReason | None] = [None, "stop", None]
    blocks = NewBlocks.of(reply, sequences, Tails.of(sequences), ends, trusts_draft=False)
    batch = flat_batch(blocks, [])
    assert np.asarray(batch.token_ids_T).tolist() == [10, 11, 12, 30, 31]
    assert batch.slots_T.tolist() == [0, 0, 0, 2, 2]
    assert batch.positions_T.tolist() == [3, 4, 5, 4, 5]
