"""Candidates from memory beside those of a draft model: the tokens are the target's in any case."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdist.drafters import source_choice
from specdist.drafters.ngram_index import NgramIndex
from specdist.drafters.source_choice import MemorySettings
from specdist.drafters.text_store import BLOCK, NO_TEXTS, NO_TOKEN, OVERLAP, TextSettings, TextStore
from specdist.sampling.distributions import SamplingSettings
from specdist.theory.rounds import ALONE, IN_TURNS, LISTEN, RoundShape
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import MarkovModel, markov_pair, repetitive_model
from tests.engine.sampled import (
    ALARM,
    COUPLED,
    FILTERED,
    PLAIN,
    PROMPTS,
    TOP_K,
    markov_replica,
    p_values,
)

TARGET = repetitive_model()
# Of another one.
DRAFT = MarkovModel(0.2 * TARGET.logits_VVV + markov_pair(spread=2.0, seed=4)[0].logits_VVV)
NUM_SAMPLES = 400
# Of which much fits, and of which the oldest are forgotten.
TEXTS = TextSettings(
    num_tokens=4000,
    given=[np.random.default_rng(row).integers(7, size=50) for row in range(40)],
    adds_sequences=True,
)
GIVEN = TextSettings(num_tokens=4000, given=TEXTS.given)
GREEDY = SamplingSettings(temperature=0.0)
AHEAD: dict[str, Any] = {"num_ahead_tokens": 3, "num_branches": 1}
SHAPES = [
    IN_TURNS,
    RoundShape(num_ahead=3, num_branches=1),
    LISTEN,
    ALONE,
    RoundShape(num_rounds_alone=3),
]


def replica_with(
    settings: SamplingSettings = PLAIN, *, learns: bool = True, least_chance: float = 0.2, **options: Any
) -> Harness:
    memory = MemorySettings(
        max_tokens=6,
        max_model_tokens=3,
        least_chance=least_chance,
        learns_together=learns,
        texts=options.pop("texts", NO_TEXTS),
    )
    return markov_replica(settings, pair=(TARGET, DRAFT), num_draft_tokens=3, beside=memory, **options)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (FILTERED, {"learns": False}),
        (PLAIN, AHEAD),
        (TOP_K, {"shapes": SHAPES, **AHEAD}),
        (PLAIN, {"max_num_seqs": 400, "num_pages": 700, "texts": TEXTS}),
        (PLAIN, {"draft_window": 6, **AHEAD}),
    ],
    ids=["in_turns", "ahead", "any_shape", "preempted", "window"],
)
def test_tokens_follow_the_target_s_distribution(settings: SamplingSettings, options: dict[str, Any]) -> None:
    replica = replica_with(settings, **options)
    found = p_values(replica, TARGET, NUM_SAMPLES)
    assert min(found) > ALARM, found
    stats = replica.stats_recorder.close_shard(0)
    assert 0.05 < stats.num_memory_tokens / stats.num_draft_tokens < 0.9
    assert 0.05 < stats.num_accepted_memory_tokens / stats.num_memory_tokens < 0.8
    assert ("num_pages" in options) == (stats.num_preemptions > 5)


@pytest.mark.parametrize("settings", [GREEDY, COUPLED])
@pytest.mark.parametrize(
    "options",
    [{}, {"shapes": SHAPES, **AHEAD}, {"draft_window": 6, "shapes": SHAPES, **AHEAD}],
    ids=["in_turns", "any_shape", "window"],
)
def test_one_hot_targets_emit_what_they_emit_alone(
    settings: SamplingSettings, options: dict[str, Any]
) -> None:
    eos = [5] if settings.is_coupled else []
    alone = tokens_of(markov_replica(settings, pair=(TARGET, None), eos=eos))
    replica = replica_with(settings, eos=eos, texts=TEXTS, max_num_seqs=40, **options)
    assert tokens_of(replica) == alone
    stats = replica.stats_recorder.close_shard(0)
    assert 0 < stats.num_memory_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("least_gain", [0.0, 10.0])
def test_where_the_model_pays_no_more_the_draft_is_asked_for_memory_alone(
    least_gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at all where memory adds nothing either; the tokens are those of the target."""
    monkeypatch.setattr(source_choice, "LEAST_GAIN", least_gain)
    shapes = [RoundShape(num_rounds_alone=5), LISTEN]
    replica = replica_with(COUPLED, shapes=shapes, max_num_seqs=40, **AHEAD)
    assert tokens_of(replica) == tokens_of(markov_replica(COUPLED, pair=(TARGET, None)))
    stats = replica.stats_recorder.close_shard(0)
    # One round of seven listens; memory proposes in all of them, or in two.
    assert 0 < stats.num_ahead_chains < 0.3 * stats.num_row_steps
    assert (stats.num_memory_tokens > 0.25 * stats.num_row_steps) == (least_gain == 0.0)


@pytest.mark.parametrize("window", [None, 6])
def test_tokens_depend_neither_on_the_batch_nor_on_preemptions(window: int | None) -> None:
    """Under rejection, where every sequence learns alone: the choice of the source is its own, too."""
    common: dict[str, Any] = {"learns": False, "texts": GIVEN, "draft_window": window}
    expected = tokens_of(replica_with(FILTERED, **common))
    crowded = replica_with(FILTERED, **common, max_num_seqs=60, num_pages=130)
    assert tokens_of(crowded) == expected
    assert crowded.stats_recorder.close_shard(0).num_preemptions > 5


def test_other_rows_are_remembered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often they are preempted: every token that was said is in the store, and no prompt."""
    stores: list[TextStore] = []
    monkeypatch.setattr(NgramIndex, "begin", _noting_stores(NgramIndex.begin, stores))
    others = TextSettings(num_tokens=20000, adds_sequences=True)
    crowded = replica_with(COUPLED, texts=others, max_num_seqs=60, num_pages=130)
    num_tokens = sum(len(token_ids) for token_ids in tokens_of(crowded))
    num_preemptions = crowded.stats_recorder.close_shard(0).num_preemptions
    store = stores[0]
    begins = np.arange(0, int(store.count[0]), BLOCK)
    assert num_preemptions > 5 and int(store.count[0]) < store.capacity
    num_stored = int((store.tokens[: int(store.count[0])] != NO_TOKEN).sum()) - OVERLAP * len(begins)
    # A sequence's last tokens are committed without another round.
    assert 0.5 * num_tokens < num_stored <= num_tokens


def _noting_stores(begin: Any, stores: list[TextStore]) -> Any:
    def noting(index: NgramIndex, *arguments: Any) -> None:
        assert index._state.store is not None
        stores.append(index._state.store)
        begin(index, *arguments)

    return noting


def tokens_of(replica: Harness) -> list[list[int]]:
    completions = replica.generate(requests_for(PROMPTS, 60))
    assert all(completion.error is None for completion in completions)
    return [completion.token_ids for completion in completions]
