"""What is learned of finished rows, and which draft is at work afterwards."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from specdist.learning.adaptation import (
    LEAST_ROWS,
    PATIENCE,
    Adaptation,
    AdaptSettings,
    Judgement,
    Served,
    Switch,
    copy_of,
)
from specdist.learning.rows import RowBuffer
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError
from tests.models.families import VOCAB_SIZE, tiny_model

GREEDY = SamplingSettings(temperature=0.0)
NUM_ROWS, PROMPT = 24, 4


def told(num_rows: int = NUM_ROWS) -> list[np.ndarray]:
    """The target counts on in steps of 3 from wherever a prompt ends."""
    return [(np.arange(24) * 3 + row) % VOCAB_SIZE for row in range(num_rows)]


class Draft:
    """Weights at work, and a record of what has taken over."""

    def __init__(self, **options: object) -> None:
        self.model = tiny_model("llama", seed=5).float()
        self.weights = dict(self.model.named_parameters(remove_duplicate=False))
        self.switches: list[Switch] = []
        self.is_busy = False
        settings = AdaptSettings(**{  # type: ignore[arg-type]
            "sampling": GREEDY, "vocab_size": VOCAB_SIZE, "rate": 1e-2, "batch_tokens": 80, "interval": 6,
            **options,
        })  # fmt: skip
        copied = copy_of(self.model, self.weights, torch.device("cpu"))
        self.adaptation = Adaptation(
            copied, settings, Served(weights=dict(self.weights), replace=self.replace), self
        )
        for row in told():
            self.adaptation.rows.add(row, PROMPT, 0)

    @torch.no_grad()
    def replace(self, weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            self.weights[name].copy_(weight)

    def may_switch(self) -> bool:
        return not self.is_busy

    def on_switch(self, switch: Switch) -> None:
        self.switches.append(switch)

    def judge(self, times: int = 1) -> None:
        """Learn until so many comparisons are made."""
        pieces, adaptation = self.adaptation.pieces(), self.adaptation
        for _ in range(times):
            adaptation.last = None
            while adaptation.last is None:
                next(pieces)
            next(pieces)


def agreement(draft: Draft) -> float:
    """The share of the latest rows' tokens that the draft at work would draft, by transformers."""
    right = total = 0
    for row in draft.adaptation.rows.latest:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        drawn = draft.model(ids[None], use_cache=False).logits[0].argmax(-1)[PROMPT - 1 : -1]
        right, total = right + int((drawn == ids[PROMPT:]).sum()), total + len(drawn)
    return right / total


def test_a_copy_that_drafts_more_takes_over() -> None:
    draft = Draft()
    before = agreement(draft)
    draft.judge(3)
    assert draft.switches[0].judgement.of_draft == pytest.approx(before)
    assert draft.switches[-1].judgement.of_copy == pytest.approx(agreement(draft))
    assert agreement(draft) > before + 0.3


def test_a_copy_that_drafts_less_does_not_and_goes_back() -> None:
    """At a rate at which nothing is learned but noise."""
    draft = Draft(rate=30.0, interval=1, batch_tokens=20)
    for row in told():
        # The draft at work is right already.
        ids = torch.from_numpy(row.astype(np.int64))[:PROMPT]
        for _ in range(8):
            ids = torch.cat([ids, draft.model(ids[None], use_cache=False).logits[0, -1:].argmax(-1)])
        draft.adaptation.rows.add(ids.numpy(), PROMPT, 0)
    before = {name: weight.clone() for name, weight in draft.weights.items()}
    draft.judge(PATIENCE - 1)
    assert not draft.switches and draft.adaptation.learned.num_adapt_switches == 0
    assert draft.adaptation.last is not None and draft.adaptation.last.of_draft > 0.9
    copied = dict(draft.adaptation._model.named_parameters())
    assert not all(torch.equal(weight, before[name]) for name, weight in copied.items())
    draft.judge()
    assert all(torch.equal(weight, before[name]) for name, weight in copied.items())
    assert all(torch.equal(weight, before[name]) for name, weight in draft.weights.items())


def test_any_copy_takes_over_with_a_negative_margin_unless_its_keeper_is_busy() -> None:
    draft = Draft(rate=30.0, interval=1, batch_tokens=20, margin=-1.0)
    draft.is_busy = True
    draft.judge(2)
    assert not draft.switches
    draft.is_busy = False
    draft.judge(1)
    assert len(draft.switches) == 1
    copied = dict(draft.adaptation._model.named_parameters())
    assert all(torch.equal(copied[name], draft.weights[name]) for name in copied)


def test_a_better_copy_is_better_by_the_margin_and_not_by_chance() -> None:
    def is_better(gain: float, error: float, margin: float) -> bool:
        return Judgement(num_tokens=9, of_draft=0.5, of_copy=0.5 + gain, error=error).is_better(margin)

    assert is_better(0.03, 0.01, 0.01)
    assert not is_better(0.03, 0.02, 0.01)
    assert not is_better(0.03, 0.01, 0.04)
    assert not is_better(0.0, 0.0, 0.0)
    assert is_better(-0.5, 0.1, -1.0)


def test_the_latest_rows_judge_and_the_oldest_go_first() -> None:
    rows = RowBuffer(max_tokens=60, num_latest=2)
    for index, row in enumerate(told(8)):
        rows.add(row[:10], PROMPT, index)
    assert rows.num_tokens == 60
    assert [row.stream_key for row in rows.latest] == [6, 7]
    random = np.random.default_rng(0)
    assert {rows.draw(random).stream_key for _ in range(60)} == {2, 3, 4, 5}
    rows.add(told(1)[0][: PROMPT + 1], PROMPT, 8)
    assert rows.num_tokens == 60, "nothing to learn from"


def test_nothing_is_learned_before_there_are_rows() -> None:
    draft = Draft()
    draft.adaptation.rows._rows.clear()
    pieces = draft.adaptation.pieces()
    assert len(set(itertools.islice(pieces, 3))) == 1
    for row in told(2 * LEAST_ROWS):
        draft.adaptation.rows.add(row, PROMPT, 0)
    assert next(pieces) == "embeddings"


def test_a_family_without_known_layers_is_refused() -> None:
    draft = Draft()
    draft.adaptation._model.model.layers.extend([])
    draft.model.model.first = draft.model.model.layers
    del draft.model.model.layers
    with pytest.raises(UserError, match="cannot be trained layer by layer"):
        Adaptation(draft.model, draft.adaptation._settings, Served(weights={}, replace=lambda weights: None))
