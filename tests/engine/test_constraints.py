"""Constrained completions follow the target's own distribution under the masks, wherever they were drafted.

A grammar of 70 completions over the Markov pair's seven tokens: each has a known probability, and a
chi-square compares them with what the engine emits. A third of the drafted tokens are forced.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from specdist.engine.request import Completion, Request
from specdist.engine.rounds.faults import NUM_SUSPECT_ROWS
from specdist.policies import FixedLength, VerifiedBlocks
from specdist.policies.payoff import ALONE, LISTEN, SYNCHRONOUS, RoundShape
from specdist.sampling.constraints.constraint import Constraint
from specdist.sampling.constraints.masker import RowRule, ThinkingMarkers
from specdist.sampling.distributions import SamplingSettings
from specdist.sampling.processing.row_table import Processing, TokenOptions
from tests.engine.harness import Harness
from tests.engine.markov import markov_pair
from tests.engine.sampled import ALARM, COUPLED, FILTERED, PLAIN, markov_replica
from tests.engine.sliced import SlicedMarkovReplica
from tests.engine.test_draft_cache import Cached
from tests.sampling.constraints.letters import END, letters_masker
from tests.sampling.constraints.reference import completions_of
from tests.statistics import chi_square_p_value

TARGET, DRAFT = markov_pair()
PATTERN = "(ab|d)c?(ddd[abc]|ab)d?"
GRAMMAR = Constraint("regex", PATTERN).grammar
# As many completions, but long enough for a small cache to be too small.
LONG = Constraint("regex", "d{16}" + PATTERN).grammar
PROMPT = [1, 2, 3, 1, 6]
NUM_SAMPLES = 800
GREEDY = SamplingSettings(temperature=0.0)
BRANCHES = {"num_ahead_tokens": 4, "num_branches": 2}
RUNS = {"forced_room": 12, "num_draft_tokens": 2}
SHAPES = [
    SYNCHRONOUS,
    RoundShape(num_ahead=3, num_branches=1),
    LISTEN,
    ALONE,
    RoundShape(num_rounds_alone=3),
]
# Both sides share one, as in one process.
SHARED = letters_masker()
OF_NGRAMS: dict[str, Any] = {"ngrams": True, "pair": (TARGET, None)}
MODES: dict[str, tuple[SamplingSettings, dict[str, Any]]] = {
    "synchronous": (PLAIN, {}),
    "synchronous, filtered, runs": (
        FILTERED,
        {"forced_room": 8, "num_draft_tokens": 2, "masker": lambda: SHARED},
    ),
    "branches, runs": (PLAIN, BRANCHES | RUNS),
    "any shape, runs": (PLAIN, BRANCHES | RUNS | {"shapes": SHAPES}),
    "coupled, branches": (COUPLED, {"masker": lambda: SHARED, **BRANCHES, **RUNS}),
    "ngram": (PLAIN, OF_NGRAMS),
    "vocabulary shards": (PLAIN, {"kind": SlicedMarkovReplica}),
}


def masked(settings: SamplingSettings) -> SamplingSettings:
    numbers = TokenOptions(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
    return replace(settings, processing=Processing(defaults=numbers, has_masks=True))


def constrained(settings: SamplingSettings = PLAIN, **options: Any) -> Harness:
    return markov_replica(masked(settings), **{"masker": letters_masker, "eos": [END]} | options)


def generate(harness: Harness, num_samples: int, rule: RowRule | None = None) -> list[Completion]:
    text = (rule or RowRule(GRAMMAR)).text
    completions = harness.generate(
        [Request(row_id=0, sample_index=i, prompt_ids=PROMPT, constraint=text) for i in range(num_samples)]
    )
    assert all(completion.error is None for completion in completions)
    return completions


def p_value(completions: list[Completion], expected: dict[tuple[int, ...], float]) -> float:
    counts = Counter(tuple(completion.token_ids) for completion in completions)
    assert counts.keys() <= expected.keys(), "a completion that the grammar does not allow"
    known = sorted(expected)
    return chi_square_p_value(
        torch.tensor([counts[each] for each in known]), torch.tensor([expected[each] for each in known])
    )


class CountingPolicy(FixedLength):
    """Remembers what it is told of blocks: drafted and accepted tokens of each."""

    def __init__(self, num_draft_tokens: int) -> None:
        super().__init__(num_draft_tokens)
        object.__setattr__(self, "counted", [])

    @property
    def initial_history(self) -> tuple[float, ...]:
        """Policies without any are not told."""
        return (0.0,)

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        self.counted.append(np.stack([blocks.num_drafted_R, blocks.num_accepted_R], axis=1))
        return blocks.histories_RH


@pytest.mark.parametrize("mode", MODES)
def test_completions_follow_the_masked_target_s_distribution(mode: str) -> None:
    settings, options = MODES[mode]
    harness = constrained(settings, **options)
    completions = generate(harness, NUM_SAMPLES)
    expected = completions_of(TARGET, PROMPT, GRAMMAR, settings)
    assert {completion.finish_reason for completion in completions} == {"stop"}
    assert p_value(completions, expected) > ALARM
    stats = harness.stats_recorder.close_shard(0)
    if "ngram" in mode:
        assert 0.15 < stats.num_accepted_tokens / stats.num_draft_tokens < 1
    elif len(harness.runners) > 1:
        # Acceptance, rejection and force must all have been frequent, or nothing was tested.
        assert 0.3 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95
        assert stats.num_forced_draft_tokens > 0.15 * stats.num_draft_tokens


@pytest.mark.parametrize(
    "options",
    [{}, BRANCHES | RUNS | {"shapes": SHAPES, "settings": COUPLED}],
    ids=["synchronous", "any shape, runs"],
)
def test_a_preempted_completion_goes_on_under_its_constraint(options: dict[str, Any]) -> None:
    """Token by token as if there had been room, though in another slot and after a replay."""
    has_runs = "forced_room" in options
    rule = RowRule(Constraint("regex", f"([ab]ddd){{16}}{PATTERN}").grammar if has_runs else LONG)
    limits = {"max_new_tokens": 80 if has_runs else 30, "max_seq_len": 96, "max_num_seqs": 100, **options}
    roomy = generate(constrained(**limits), 100, rule)
    harness = constrained(**limits, num_pages=300)
    crowded = generate(harness, 100, rule)
    assert harness.stats_recorder.close_shard(0).num_preemptions > 5
    assert [each.token_ids for each in crowded] == [each.token_ids for each in roomy]


@pytest.mark.parametrize(
    "options",
    [BRANCHES | RUNS, {"kind": SlicedMarkovReplica}],
    ids=["branches, runs", "vocabulary shards"],
)
def test_a_matcher_that_gives_up_ends_its_row_alone(options: dict[str, Any]) -> None:
    """Neither the target's logits nor its checkpoint are to blame, however many rows it is."""
    masker = letters_masker()
    harness = constrained(masker=lambda: masker, **options)
    dead = Constraint("grammar", 'start: "ab" rule\nrule: rule "c"').grammar
    rules = [*[RowRule(dead)] * (NUM_SUSPECT_ROWS + 2), RowRule(GRAMMAR)]
    found = harness.generate(
        [
            Request(row_id=i, sample_index=0, prompt_ids=PROMPT, constraint=rule.text)
            for i, rule in enumerate(rules)
        ]
    )
    *ended, last = sorted(found, key=lambda completion: completion.request.row_id)
    assert last.error is None and last.finish_reason == "stop"
    for completion in ended:
        assert completion.finish_reason == "error" and completion.error is not None
        assert completion.error.startswith("the row's constraint allows no token at position")
        assert completion.error.endswith("no token is allowed next, and the completion may not end here")


@pytest.mark.parametrize(
    ("settings", "options"), [(PLAIN, {}), (GREEDY, BRANCHES)], ids=["sampled", "greedy, branches"]
)
def test_a_draft_that_equals_its_target_is_always_accepted(
    settings: SamplingSettings, options: dict[str, Any]
) -> None:
    """Under the same masks, in slots that had rows with other ones; free rows share the batch."""
    harness = constrained(settings, pair=(TARGET, TARGET), max_new_tokens=12, max_num_seqs=20, **options)
    other = Constraint("regex", "(bc|c)[abd]{2}c").grammar
    rules = [RowRule(GRAMMAR).text, "", RowRule(other).text]
    completions = harness.generate(
        [Request(row_id=i, sample_index=0, prompt_ids=PROMPT, constraint=rules[i % 3]) for i in range(150)]
    )
    assert harness.stats_recorder.close_shard(0).num_misses == 0
    for first, grammar in [(0, GRAMMAR), (2, other)]:
        allowed = completions_of(TARGET, PROMPT, grammar, PLAIN)
        assert all(tuple(completion.token_ids) in allowed for completion in completions[first::3])
    assert not all(tuple(completion.token_ids) in allowed for completion in completions[1::3])


def test_forced_tokens_cost_no_draft_pass() -> None:
    """All of a block is forced: the draft is never run but for the prompt."""
    harness = constrained(num_draft_tokens=2, forced_room=6)
    grammar = Constraint("regex", "dddddddd").grammar
    (completion,) = generate(harness, 1, RowRule(grammar))
    assert completion.token_ids == [4] * 8 + [END]
    stats = harness.stats_recorder.close_shard(0)
    assert stats.num_draft_passes == 0 and stats.num_forced_draft_tokens == stats.num_accepted_tokens == 8
    # All in one block, though the policy drafts two tokens.
    assert stats.num_drafts == 1


@pytest.mark.parametrize(
    ("options", "num_passes"),
    [
        ({}, (3, 4, 4)),
        ({"num_ahead_tokens": 3, "num_branches": 2}, (3, 4, 4)),
        ({"num_ahead_tokens": 3, "shapes": [RoundShape(num_ahead=3)]}, (3, 4, 4)),
        # Of the model nothing: the target samples what is free.
        ({"num_ahead_tokens": 3, "shapes": [RoundShape(num_rounds_alone=50)]}, (3, 12, 8)),
    ],
    ids=[
        "synchronous",
        "branches",
        "asynchronous, chosen",
        "alone, chosen",
    ],
)
def test_forced_tokens_come_on_top_of_drawn_ones(
    options: dict[str, Any], num_passes: tuple[int, int]
) -> None:
    """Whatever the draft does in a round: one that equals its target has as many passes as a synchronous one.
    Blocks have 14 forced tokens and the next one; or 11 candidates, with two drawn, and the next one."""
    for pattern, num_expected in zip(("d{40}", "([ab]ddd){12}", "[ac]{6}d{34}"), num_passes, strict=True):
        harness = constrained(
            PLAIN,
            pair=(TARGET, TARGET),
            max_new_tokens=60,
            max_seq_len=96,
            max_num_seqs=20,
            **RUNS,
            **options,
        )
        completions = generate(harness, 20, RowRule(Constraint("regex", pattern).grammar))
        assert {len(each.token_ids) for each in completions} <= {41, 49}
        assert harness.stats_recorder.close_shard(0).num_row_steps == 20 * num_expected


def test_policies_count_the_tokens_that_were_drawn() -> None:
    """Two of them in each block, whatever is forced before, between and after them."""
    policy = CountingPolicy(2)
    rule = RowRule(Constraint("regex", "(dddd[abc]|a[bd]ccc){8}").grammar)
    completions = generate(constrained(policy=policy, forced_room=16, max_new_tokens=60), 40, rule)
    assert {each.finish_reason for each in completions} == {"stop"}
    counted = np.concatenate(policy.counted)
    assert counted[:, 0].max() == 2 and (counted[:, 1] <= counted[:, 0]).all()
    assert 0.2 < (counted[:, 1] == 0).mean() < 0.8


@pytest.mark.parametrize("options", [{}, BRANCHES], ids=["synchronous", "branches"])
def test_the_draft_s_cache_takes_in_what_was_forced(options: dict[str, Any]) -> None:
    """Also in a branch that becomes the row's candidates; else the draft would go on from stale tokens."""
    rule = RowRule(Constraint("regex", "(abd(ab|d)c?ddd[abc]){3}").grammar)
    harness: Any = constrained(kind=Cached, max_new_tokens=40, max_num_seqs=20, **options)
    generate(harness, 40, rule)
    stats = harness.stats_recorder.close_shard(0)
    assert harness.num_checked > 300 and stats.num_forced_draft_tokens > 200
    assert stats.num_branch_hits > 10 or not options


def test_a_budget_of_thinking_is_kept_as_by_the_target_alone() -> None:
    """Of coupled draws the tokens are the target's own; an answer follows, within its grammar."""
    markers = ThinkingMarkers(begin_ids=(), end_ids=(6, 4))
    rule = RowRule(GRAMMAR, max_thinking_tokens=6)
    thinking = partial(constrained, COUPLED, masker=partial(letters_masker, markers), max_new_tokens=40)
    alone = generate(thinking(pair=(TARGET, None)), 60, rule)
    found = generate(thinking(**BRANCHES), 60, rule)
    assert [each.token_ids for each in found] == [each.token_ids for each in alone]
    answers = completions_of(TARGET, PROMPT, GRAMMAR, PLAIN)
    lengths = set()
    for completion in found:
        end = markers.end_in(completion.token_ids)
        assert end is not None and tuple(completion.token_ids[end:]) in answers
        lengths.add(end - 2)
    assert max(lengths) == 6 and len(lengths) > 2, "some end by themselves, some are ended"
