"""Budgets of thinking: where it ends, and what is forced."""

from __future__ import annotations

import numpy as np
import pytest

from specdist.sampling.constraints.constraint import Constraint
from specdist.sampling.constraints.masker import RowRule, ThinkingMarkers
from specdist.sampling.processing.row_table import QueryPositions, RowTable, TokenOptions
from tests.sampling.constraints.letters import END, letters_masker
from tests.sampling.constraints.reference import allowed_by_llguidance, token_ids_of

MARKERS = ThinkingMarkers(begin_ids=(3,), end_ids=(6, 4))
ALL = set(range(7))


def masks_after(
    prompt: list[int], completion: list[int], rule: RowRule, *, num_candidates: int = 0
) -> list[set[int]]:
    """The ids that are allowed after the completion without its last tokens, its candidates, and after each
    of these."""
    masker = letters_masker(MARKERS)
    masker.open([0], [rule.text])
    length = len(prompt) + len(completion)
    table = RowTable(TokenOptions(), 1, np.array([[*prompt, *completion, 0]]))
    table.num_prompt_tokens[0] = len(prompt)
    zeros = np.zeros(num_candidates + 1, np.int64)
    asked = QueryPositions(table, zeros, zeros, np.arange(length - num_candidates, length + 1))
    masks = masker.masks(asked)
    assert masks is not None
    return [set(token_ids_of(mask)) & ALL for mask in masks]


def allowed(prompt: list[int], completion: list[int], rule: RowRule) -> set[int]:
    return masks_after(prompt, completion, rule)[0]


def test_the_end_is_forced_when_the_budget_is_spent() -> None:
    rule = RowRule(max_thinking_tokens=3)
    assert allowed([1], [1, 2], rule) == ALL
    assert allowed([1], [1, 2, 3], rule) == {6}
    assert allowed([1], [1, 2, 3, 6], rule) == {4}
    assert allowed([1], [1, 2, 3, 6, 4], rule) == ALL
    # What the model has begun by itself is not begun again, and what it has ended is ended.
    assert allowed([1], [1, 2, 6], rule) == {4}
    assert allowed([1], [1, 6, 4, 2, 2], rule) == ALL
    assert allowed([1], [], RowRule(max_thinking_tokens=0)) == {6}


def test_a_prompt_that_closes_the_thinking_has_none() -> None:
    rule = RowRule(max_thinking_tokens=0)
    assert allowed([3, 6, 4], [1], rule) == ALL
    assert allowed([6, 4, 3], [], rule) == {6}, "opened again, after an earlier turn"
    assert allowed([6, 3, 4], [], rule) == {6}


def test_a_grammar_is_the_answer_s() -> None:
    grammar = Constraint("regex", "(ab|d)c?").grammar
    rule = RowRule(grammar, max_thinking_tokens=4)
    assert allowed([1], [2, 2], rule) == ALL - {END}, "an answer has to follow"
    for answer in ([], [1], [5], [4, 3]):
        found = allowed([1], [2, 6, 4, *answer], rule)
        assert found == set(allowed_by_llguidance(grammar, tuple(answer)))


@pytest.mark.parametrize("num_candidates", [1, 3, 7])
def test_the_positions_of_a_block_are_those_one_by_one(num_candidates: int) -> None:
    """A block may begin in the thinking and end in the answer."""
    rule = RowRule(Constraint("regex", "(ab|d)c?").grammar, max_thinking_tokens=3)
    completion = [1, 2, 1, 6, 4, 5, 3]
    found = masks_after([2], completion, rule, num_candidates=num_candidates)
    begin = len(completion) - num_candidates
    assert found == [allowed([2], completion[:end], rule) for end in range(begin, len(completion) + 1)]


@pytest.mark.parametrize(
    ("prompt", "completion", "thinking", "answer"),
    [
        ([1], [3, 1, 2, 6, 4, 5, END], [1, 2], [5, END]),
        ([1, 3], [1, 2, 6, 4, 6, 4], [1, 2], [6, 4]),
        ([1, 3], [1, 2, 6], [1, 2, 6], []),
        ([1], [3, 6], [6], []),
        ([1], [1, 2], None, [1, 2]),
        ([3, 6, 4], [1, 2], None, [1, 2]),
        ([3, 6, 4, 3], [1, 6, 4, 2], [1], [2]),
    ],
    ids=["begun", "begun-in-prompt", "cut", "begun-and-cut", "no-thinking", "closed", "opened-again"],
)
def test_thinking_and_answer_are_told_apart(
    prompt: list[int], completion: list[int], thinking: list[int] | None, answer: list[int]
) -> None:
    assert MARKERS.split(prompt, completion) == (thinking, answer)


def test_without_a_beginning_all_is_thinking_until_its_end() -> None:
    markers = ThinkingMarkers(begin_ids=(), end_ids=(6, 4))
    assert markers.split([1], [1, 2]) == ([1, 2], [])
    assert markers.split([1], [1, 6, 4, 2]) == ([1], [2])
