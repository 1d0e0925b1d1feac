"""A rank of the test of verify outputs: all ranks know the whole logits; each verifies with its own shard."""

import numpy as np
import torch
import torch.distributed as dist

from specdist.engine.messages.interfaces import VerifyInput, VerifyOutput
from specdist.engine.target.local_target import FullDistributions
from specdist.engine.target.sharded_target import Collectives, VocabParallelVerifier
from specdist.models.batch.flat import FlatBatch
from specdist.sampling.distributions import Dense, OneHot, SamplingSettings
from specdist.sampling.keys import stream_key
from specdist.sampling.vocab_parallel import vocab_ranges
from tests.ranks import join, leave

NUM_ROWS, BLOCK = 6, 6
VOCAB_SIZE = 32_000


def verify_input_about(token_ids_T: np.ndarray) -> VerifyInput:
    """Blocks of one next token and five candidates."""
    places = np.arange(NUM_ROWS * BLOCK)
    batch = FlatBatch(token_ids_T, places // BLOCK, places % BLOCK + 20)
    keys = np.array([stream_key(3, row, 0) for row in range(NUM_ROWS)])
    judges = places[places % BLOCK < BLOCK - 1]
    return VerifyInput(
        batch=batch,
        logits_indices_N=places,
        stream_keys_N=keys[batch.slots_T],
        target_logits_indices_C=judges,
    )


class Counted(Collectives):
    """Counts what all ranks together send; the same on every rank."""

    num_calls = num_bytes = 0

    def _count(self, tensor: torch.Tensor, num_copies: int) -> None:
        self.num_calls, self.num_bytes = self.num_calls + 1, self.num_bytes + tensor.nbytes * num_copies

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        self._count(tensor, self.size - 1)
        return super().gather(tensor)

    def gather_everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count(tensor, self.size * (self.size - 1))
        return super().gather_everywhere(tensor)

    def from_rank0(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count(tensor, self.size - 1)
        return super().from_rank0(tensor)


def verify_outputs_on(
    logits: torch.Tensor, settings: SamplingSettings, verify_input: VerifyInput
) -> VerifyOutput | None:
    """The verify outputs of rank 0; the others take their part up to the next tokens."""
    collectives = Counted(group)
    ids = vocab_ranges(logits.shape[1], collectives.size)[collectives.rank]
    vocabulary = VocabParallelVerifier(collectives, settings=settings, vocab_size=logits.shape[1])
    own = logits[:, ids.start : ids.stop]
    verify_output = vocabulary.verify(own, verify_input)
    if verify_output is None:
        vocabulary.serve_next_distributions()
    counted.append(collectives)
    return verify_output


topology = join(tp_size=3)
group = dist.new_group([0, 1, 2])
counted: list[Counted] = []
generator = torch.Generator().manual_seed(0)
logits = 3 * torch.randn(NUM_ROWS * BLOCK, VOCAB_SIZE, generator=generator)
# Nearly all are likely tokens.
likely = logits.argsort(dim=1, descending=True)[:, 3].numpy()
verify_input = verify_input_about(np.roll(likely, 1))
first_places = np.arange(NUM_ROWS) * BLOCK
# Bytes exchanged in a pass; an all-reduce of the logits would move 18.4 MB.
for settings, num_calls, num_bytes in (
    (SamplingSettings(temperature=0.0), 1, 36 * 16),
    (SamplingSettings(is_coupled=True), 1, 36 * 16),
    # A log-normaliser each, a score for each of the 30 candidates, the indices, and 6 rows of a third.
    (SamplingSettings(), 3, (36 + 30) * 8 + 36 * 4 + 6 * 10_667 * 4),
    # The 50 largest logits of each row go to both others as well.
    (SamplingSettings(top_k=50), 4, (36 + 30) * 8 + 36 * 4 + 6 * 10_667 * 4 + 3 * 36 * 50 * 4),
    (SamplingSettings(top_p=0.9), 1, 36 * 10_667 * 4),
):
    verify_output = verify_outputs_on(logits, settings, verify_input)
    if verify_output is not None:
        expected = FullDistributions.of(logits, settings, verify_input)
        np.testing.assert_allclose(
            verify_output.candidate_probabilities(), expected.candidate_probabilities(), atol=1e-6, rtol=0
        )
        found, whole = (each.next_distributions(first_places) for each in (verify_output, expected))
        if isinstance(whole, OneHot):
            assert isinstance(found, OneHot) and torch.equal(found.token_ids_N, whole.token_ids_N)
        else:
            # From the same logits in the same order: equal bit by bit.
            assert isinstance(found, Dense) and isinstance(whole, Dense)
            assert torch.equal(found.probabilities_NV, whole.probabilities_NV)
    assert (counted[-1].num_calls, counted[-1].num_bytes) == (num_calls, 2 * num_bytes), settings

# Where nothing is asked, nothing is exchanged.
nothing = np.zeros(0, np.int64)
empty = VerifyInput(
    batch=FlatBatch(nothing, nothing, nothing),
    logits_indices_N=nothing,
    stream_keys_N=nothing,
    target_logits_indices_C=nothing,
)
verify_outputs_on(torch.zeros(0, VOCAB_SIZE), SamplingSettings(), empty)
assert counted[-1].num_calls == 0
leave()
