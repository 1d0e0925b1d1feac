"""Masks of the rows that run: the :class:`specdist.sampling.processing.processors.TokenMasker` of grammars
and of budgets for thinking, whose end is looked for in a sequence's tokens.

The target asks for all positions of a block together, the draft for one position of a line at a time; a line
is where a continuation stands. Every line has a matcher of its own, which follows whatever tokens the line
has: what was rejected is rolled back, what another rank has committed is caught up on, and a row that was
preempted is followed anew. Nothing but the tokens decides what is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from specdist.sampling.constraints.matcher import Grammars, Matcher, forbid, masks_of_everything, set_only
from specdist.sampling.processing.row_table import QueryPositions

# Ends of thinking that models of the hub write, each with its beginning.
THINKING = {"</think>": "<think>", "[/THINK]": "[THINK]"}


@dataclass(frozen=True)
class ThinkingMarkers:
    """Tokens with which thinking begins, perhaps in the prompt already (empty: not marked), and ends."""

    begin_ids: tuple[int, ...]
    end_ids: tuple[int, ...]

    def are_closed(self, prompt_ids: list[int]) -> bool:
        """Whether the prompt ends the thinking already, as chat templates do to switch it off."""
        end = _last(prompt_ids, self.end_ids)
        return end >= 0 and end > (_last(prompt_ids, self.begin_ids) if self.begin_ids else -1)

    def end_in(self, completion_ids: list[int]) -> int | None:
        """How many tokens there are up to the end of the first end marker; None without one."""
        first, size, place = self.end_ids[0], len(self.end_ids), -1
        # A step for every possible beginning, not for every token: this is asked at every position.
        for _ in range(completion_ids.count(first)):
            place = completion_ids.index(first, place + 1)
            if tuple(completion_ids[place : place + size]) == self.end_ids:
                return place + size
        return None

    def split(self, prompt_ids: list[int], completion_ids: list[int]) -> tuple[list[int] | None, list[int]]:
        """The tokens of the thinking, without its markers, and those of the answer. The first are None if the
        prompt has closed the thinking, or if neither marker is there to say that it has begun."""
        if self.are_closed(prompt_ids):
            return None, completion_ids
        end = self.end_in(completion_ids)
        thinking_ids = completion_ids if end is None else completion_ids[: end - len(self.end_ids)]
        begin = _last(thinking_ids, self.begin_ids) if self.begin_ids else -1
        if end is None and self.begin_ids and begin < 0 and _last(prompt_ids, self.begin_ids) < 0:
            return None, completion_ids
        if begin >= 0:
            thinking_ids = thinking_ids[:begin] + thinking_ids[begin + len(self.begin_ids) :]
        return thinking_ids, [] if end is None else completion_ids[end:]

    def next_of_end(self, completion_ids: list[int]) -> int:
        """The token with which the end marker goes on, if these tokens end with its beginning; else its
        first."""
        for size in range(len(self.end_ids) - 1, 0, -1):
            if tuple(completion_ids[-size:]) == self.end_ids[:size]:
                return self.end_ids[size]
        return self.end_ids[0]


def _last(token_ids: list[int], marker: tuple[int, ...]) -> int:
    """Where the marker is for the last time; -1 without it."""
    size = len(marker)
    for place in range(len(token_ids) - size, -1, -1):
        if tuple(token_ids[place : place + size]) == marker:
            return place
    return -1


@dataclass(frozen=True, eq=False)
class RowRule:
    """What a row must keep to.

    Attributes:
        grammar: of its answer, as llguidance takes it; empty: none.
        max_thinking_tokens: after so many tokens the end of thinking is forced; None: there is no thinking
            apart from the answer, or as much of it as the model likes.
    """

    grammar: str = ""
    max_thinking_tokens: int | None = None

    @property
    def text(self) -> str:
        """The rule as :attr:`specdist.engine.request.Request.constraint`; empty where all is allowed."""
        if not self.grammar and self.max_thinking_tokens is None:
            return ""
        return json.dumps([self.grammar, self.max_thinking_tokens])

    def ends_thinking(self, num_tokens: int) -> bool:
        """Whether the end is forced after so many tokens of thinking."""
        return self.max_thinking_tokens is not None and num_tokens >= self.max_thinking_tokens


class RowMasker:
    """The masks of one side; the two sides share nothing.

    ``markers``: of a run whose model thinks; its grammars are of what follows the end of thinking.
    """

    def __init__(
        self,
        grammars: Grammars | None,
        *,
        vocab_size: int,
        stop_token_ids: Collection[int] = (),
        markers: ThinkingMarkers | None = None,
    ) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._stop_token_ids = [token_id for token_id in stop_token_ids if token_id < vocab_size]
        self._markers = markers
        self._rules: dict[int, RowRule] = {}
        # Whether the prompt has closed the thinking, by slot.
        self._is_closed: dict[int, bool] = {}
        # Each line's matcher, and the rule of the row that it is for.
        self._matchers: dict[int, tuple[RowRule, Matcher]] = {}

    def open(self, slots: list[int], constraints: list[str]) -> None:
        """New rows are in these slots. ``constraints``: texts of their rules."""
        for slot, text in zip(slots, constraints, strict=True):
            self._rules.pop(slot, None)
            self._is_closed.pop(slot, None)
            if text:
                self._rules[slot] = RowRule(*json.loads(text))

    def masks(self, asked: QueryPositions) -> np.ndarray | None:
        """int32 [N, words]; None if no position has a rule."""
        lines, slots = asked.lines_N.tolist(), asked.slots_N.tolist()
        places: list[tuple[Matcher, int, list[int], int]] = []
        masks: np.ndarray | None = None
        end = 0
        while end < len(lines):
            begin, line = end, lines[end]
            while end < len(lines) and lines[end] == line:
                end += 1
            rule = self._rules.get(slots[begin])
            if rule is None:
                continue
            if masks is None:
                masks = masks_of_everything(len(lines), self._vocab_size)
            token_ids = asked.new_tokens_before(end - 1).tolist()
            # Of the block's positions, those in the thinking come first.
            num_before = len(token_ids) - (end - 1 - begin)
            answer = self._answer_begin(asked, end - 1, token_ids)
            num_thinking = min(max(0, answer - num_before), end - begin)
            for index in range(num_thinking):
                self._limit_thinking(masks, begin + index, rule, token_ids[: num_before + index])
            first = begin + num_thinking
            if rule.grammar and first < end:
                known = max(num_before, answer)
                places.append((self._matcher(line, rule), first, token_ids[answer:], known - answer))
        if places:
            assert masks is not None and self._grammars is not None
            self._grammars.fill(masks, places)
        return masks

    def forced(self, asked: QueryPositions, most_N: list[int]) -> list[list[int]]:
        """See :class:`specdist.sampling.processing.processors.TokenMasker`."""
        found: list[list[int]] = []
        for index, (line, slot) in enumerate(
            zip(asked.lines_N.tolist(), asked.slots_N.tolist(), strict=True)
        ):
            run: list[int] = []
            rule = self._rules.get(slot)
            if rule is not None and most_N[index] > 0:
                token_ids = asked.new_tokens_before(index).tolist()
                while len(run) < most_N[index] and (
                    added := self._forced_next(asked, index, rule, line, token_ids + run)
                ):
                    run += added
                    if added[-1] in self._stop_token_ids:
                        break
            found.append(run[: most_N[index]])
        return found

    def failure(self, slot: int) -> str | None:
        """See :class:`specdist.sampling.processing.processors.TokenMasker`."""
        rule, known = self._rules.get(slot), self._matchers.get(slot)
        is_own = rule is not None and known is not None and known[0] is rule
        return known[1].failure if is_own and known is not None else None

    def _forced_next(
        self, asked: QueryPositions, index: int, rule: RowRule, line: int, token_ids: list[int]
    ) -> list[int]:
        """Tokens that follow these of the completion for certain; none where that is not known."""
        answer = self._answer_begin(asked, index, token_ids)
        if answer > len(token_ids):
            assert self._markers is not None
            return [self._markers.next_of_end(token_ids)] if rule.ends_thinking(len(token_ids)) else []
        return self._matcher(line, rule).forced_after(token_ids[answer:]) if rule.grammar else []

    def _answer_begin(self, asked: QueryPositions, index: int, token_ids: list[int]) -> int:
        """How many tokens of the completion are before its answer; one more than there are if it is still
        thinking."""
        if self._markers is None:
            return 0
        slot = int(asked.slots_N[index])
        if slot not in self._is_closed:
            prompt_ids = asked.tokens_before(index)[: int(asked.table.num_prompt_tokens[slot])]
            self._is_closed[slot] = self._markers.are_closed(prompt_ids.tolist())
        if self._is_closed[slot]:
            return 0
        found = self._markers.end_in(token_ids)
        return len(token_ids) + 1 if found is None else found

    def _limit_thinking(self, masks: np.ndarray, row: int, rule: RowRule, token_ids: list[int]) -> None:
        """Mask what may not follow these tokens at a position in the thinking."""
        assert self._markers is not None
        if rule.ends_thinking(len(token_ids)):
            set_only(masks[row], self._markers.next_of_end(token_ids))
        elif rule.grammar:
            # A completion does not end before its answer.
            for token_id in self._stop_token_ids:
                forbid(masks[row], token_id)

    def _matcher(self, line: int, rule: RowRule) -> Matcher:
        known = self._matchers.get(line)
        if known is None or known[0].grammar != rule.grammar:
            assert self._grammars is not None
            known = rule, self._grammars.matcher(rule.grammar)
        elif known[0] is not rule:
            known[1].begin()
        self._matchers[line] = rule, known[1]
        return known[1]
