"""SPRINTER's Theorems 2 and 3 through the engine, with a pair and a verifier that are known exactly.

Token i is followed by i + 1, says the draft, up to the last good token, and then by a bad one for ever. The
target says the same of the good ones, and never draws the bad one: after it and after the last good token
it begins again with 0. So a block whose next token is token i has r = NUM_GOOD - i acceptable tokens before
it, and after them no other, just as the theorems assume. The verifier knows the tokens, and lets good and bad
ones pass with chances of their own.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.passes.hidden import HiddenStateHead
from specdist.policies import Sprinter
from tests.engine.harness import Harness, requests_for
from tests.engine.sampled import PLAIN
from tests.job.sprinter_formulas import sprinter_run_length, sprinter_stopping_time
from tests.models.families import tiny_model

NUM_GOOD = 4
BAD = NUM_GOOD + 1
VOCAB_SIZE = BAD + 1
NUM_ROWS, NUM_BLOCKS = 100, 12
# Of at most fifteen means with fixed seeds: odds of a false alarm 1 in 1000.
MOST_ERRORS = 4.0


def chain_model(successors: dict[int, int]) -> PreTrainedModel:
    """A model that sees only the last token and is certain of the next."""
    model = tiny_model("llama", vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=1,
                       tie_word_embeddings=False)  # fmt: skip
    width = model.config.hidden_size
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # While their root mean square is 1, the last norm leaves them unchanged.
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB_SIZE, width) * width**0.5)
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        for token_id, successor in successors.items():
            model.lm_head.weight[successor, token_id] = 100.0
    return model


class KnownVerifier(HiddenStateHead):
    """Lets a good token pass with one probability and a bad one with another, independently each time."""

    def __init__(self, true_positive: float, false_positive: float) -> None:
        super().__init__()
        self._chances = torch.full((VOCAB_SIZE,), true_positive)
        self._chances[BAD] = false_positive
        self._generator = torch.Generator().manual_seed(11)

    def forward(self, hidden_NH: Tensor, features_3N: Tensor | None = None) -> Tensor:
        del features_3N
        passes_N = torch.rand(len(hidden_NH), generator=self._generator) < self._chances[hidden_NH.argmax(1)]
        return torch.where(passes_N, 20.0, -20.0)


@pytest.mark.parametrize(
    ("true_positive", "false_positive"), [(0.8, 0.3), (0.6, 0.5), (0.95, 0.1)], ids=["some", "poor", "good"]
)
def test_runs_and_steps_are_as_long_as_the_theorems_say(true_positive: float, false_positive: float) -> None:
    good = {token_id: token_id + 1 for token_id in range(NUM_GOOD)}
    target = chain_model({**good, NUM_GOOD: 0, BAD: 0})
    draft = chain_model({**good, NUM_GOOD: BAD, BAD: BAD})
    replica = Harness(
        target, draft, policy=Sprinter(max_draft_tokens=60, verifier_threshold=0.5), is_traced=True,
        head=KnownVerifier(true_positive, false_positive), trusts_draft=True, settings=PLAIN,
        max_new_tokens=130, max_seq_len=160, max_num_seqs=NUM_ROWS, max_num_batched_tokens=61 * NUM_ROWS,
        num_pages=64 * NUM_ROWS,
    )  # fmt: skip
    lengths = defaultdict(list)
    for completion in replica.generate(requests_for([[0]] * NUM_ROWS)):
        blocks = defaultdict(list)
        for token in completion.trace:
            blocks[token.round].append(token)
        # The first so many, and none that the end of a row may have cut short: those would be biased.
        for number in sorted(blocks)[:NUM_BLOCKS]:
            block = blocks[number]
            assert block[-1].position < 120
            num_good = NUM_GOOD - completion.token_ids[block[0].position - 1]
            assert [token.token_id == BAD for token in block] == [
                depth >= num_good for depth in range(len(block))
            ]
            # All trusted, except the last, which the verifier doubts and the target verifies.
            assert [token.is_verified for token in block] == [False] * (len(block) - 1) + [True]
            lengths[num_good].append(len(block))
    assert sum(map(len, lengths.values())) == NUM_ROWS * NUM_BLOCKS
    assert set(lengths) == set(range(NUM_GOOD + 1))
    for num_good, found in lengths.items():
        known = {
            "num_acceptable": num_good, "true_positive": true_positive, "false_positive": false_positive
        }  # fmt: skip
        num_steps = np.array(found)
        error = max(num_steps.std(), 0.3) / len(found) ** 0.5
        assert abs((num_steps - 1).mean() - sprinter_run_length(**known)) < MOST_ERRORS * error
        assert abs(num_steps.mean() - sprinter_stopping_time(t_draft=1.0, **known)) < MOST_ERRORS * error
        if num_good == NUM_GOOD:
            assert error < 0.05 * num_steps.mean()
