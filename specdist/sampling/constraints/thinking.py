"""The end of thinking, as a model writes it, and where it is in a sequence of tokens."""

from __future__ import annotations

from dataclasses import dataclass

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
