"""The last hidden states of the flat forward against transformers' own."""

import numpy as np
import pytest
import torch

from specdist.models.batch.flat import FlatBatch
from tests.engine.harness import paged_runner
from tests.models.chunks import give_pages
from tests.models.families import VOCAB_SIZE, tiny_model

PAGE_SIZE, LENGTH = 4, 30
# float32 sums in another order; the states are of order 1.
TOLERANCE = 5e-5


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_they_are_those_of_a_plain_forward(family: str) -> None:
    """In two chunks, of some tokens: the logits beside them are those of an ordinary pass."""
    plain = tiny_model(family)
    token_ids = np.random.default_rng(0).integers(2, VOCAB_SIZE, LENGTH)
    with torch.inference_mode():
        output = plain(torch.from_numpy(token_ids)[None], output_hidden_states=True)
    runner = paged_runner(plain)
    give_pages(runner, token_ids[None], page_size=PAGE_SIZE)
    for begin, end, asked in ((0, 17, [0, 5, 16]), (17, LENGTH, [3, 12])):
        places = np.arange(begin, end)
        batch = FlatBatch(token_ids[begin:end], np.zeros(end - begin, np.int64), places)
        logits_NV, hidden_NH = runner.forward_with_hidden(batch, asked)
        wanted_NH = output.hidden_states[-1][0, places[asked]]
        torch.testing.assert_close(hidden_NH, wanted_NH, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(logits_NV, runner.forward(batch, asked))
