"""Where a sequence stops: end tokens, stop strings, and its greatest length. No tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from specdist.engine.request import FinishReason
from specdist.engine.sequence import Sequence

# The text of a completion's last tokens is the end of its text, but for a space or so where it begins; unless
# it begins inside a character, whose bytes then show as a character that stands for none.
MARGIN, NOT_A_CHARACTER = 8, "\N{REPLACEMENT CHARACTER}"
# Not the id of any token, so never a stop token.
NO_STOP = -1


class StopCheck(NamedTuple):
    """How many of the new tokens belong to the completion, and why it ends there, if it does."""

    num_kept: int
    reason: FinishReason | None


@dataclass(frozen=True)
class StopRules:
    """What ends a completion, besides its maximum length.

    Attributes:
        decode: token ids to text, without special tokens.
        token_ids: stop tokens; a completion's last token may be one, its text does not contain it.
        strings: stop strings of requests without their own; a completion's text ends before the first.
    """

    decode: Callable[[list[int]], str]
    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

    def _strings_of(self, sequence: Sequence) -> tuple[str, ...]:
        return self.strings if sequence.request.stop is None else sequence.request.stop

    def may_end(self, sequence: Sequence, new_ids: list[int]) -> bool:
        """Whether any of these tokens may end the sequence, as far as that is seen without their text."""
        strings = self._strings_of(sequence)
        has_room = len(new_ids) < sequence.max_length - len(sequence.token_ids)
        return bool(strings) or not has_room or not self.token_ids.isdisjoint(new_ids)

    def near_ends(self, sequences: list[Sequence]) -> list[int]:
        """Indices of the sequences that any next token may end, as far as that is seen without it."""
        return [index for index, sequence in enumerate(sequences) if self.may_end(sequence, [NO_STOP])]

    def ends(
        self, sequences: list[Sequence], next_token_ids: list[int], near_ends: list[int], *, not_finite: int
    ) -> list[FinishReason | None]:
        """How these next tokens would end their sequences, where they would.

        Args:
            near_ends: what :meth:`near_ends` says of the sequences.
            not_finite: in the place of a token that could not be drawn.
        """
        found: list[FinishReason | None] = [None] * len(sequences)
        ending_ids = self.token_ids | {not_finite}
        may_end = set(near_ends)
        if not ending_ids.isdisjoint(next_token_ids):
            may_end |= {index for index, token_id in enumerate(next_token_ids) if token_id in ending_ids}
        for index in may_end:
            token_id = next_token_ids[index]
            is_token = token_id != not_finite
            found[index] = self.check(sequences[index], [token_id]).reason if is_token else "error"
        return found

    def check(self, sequence: Sequence, new_ids: list[int]) -> StopCheck:
        """Look for the first stop in tokens that are about to be appended."""
        if not self.may_end(sequence, new_ids):
            return StopCheck(len(new_ids), None)
        reason: FinishReason | None = None
        num_kept, room = len(new_ids), sequence.max_length - len(sequence.token_ids)
        strings = self._strings_of(sequence)
        if num_kept >= room:
            num_kept, reason = room, "length"
        for index, token_id in enumerate(new_ids[:num_kept]):
            if token_id in self.token_ids:
                num_kept, reason = index + 1, "stop"
                break
        if strings and num_kept and self._may_stop(sequence, new_ids[:num_kept], strings):
            committed = sequence.token_ids[sequence.num_prompt_tokens :]
            if first_stop(self.decode(committed + new_ids[:num_kept]), strings) is not None:
                num_kept = next(
                    count
                    for count in range(1, num_kept + 1)
                    if first_stop(self.decode(committed + new_ids[:count]), strings) is not None
                )
                reason = "stop"
        return StopCheck(num_kept, reason)

    def _may_stop(self, sequence: Sequence, new_ids: list[int], strings: tuple[str, ...]) -> bool:
        """Whether one of the strings may have come with new tokens, by the last tokens' text alone: there was
        none before, and it takes no longer late in a completion."""
        num_before = least = max(map(len, strings)) + MARGIN
        token_ids = sequence.token_ids
        while num_before < len(token_ids) - sequence.num_prompt_tokens:
            before = token_ids[-num_before:]
            if len(self.decode(before)) >= least:
                text = self.decode(before + new_ids)
                return NOT_A_CHARACTER in text or first_stop(text, strings) is not None
            num_before *= 2
        return True

    def text(self, sequence: Sequence) -> str:
        """The completion's text, up to the first stop string."""
        text = self.decode(sequence.token_ids[sequence.num_prompt_tokens :])
        return text[: first_stop(text, self._strings_of(sequence))]


def first_stop(text: str, strings: tuple[str, ...]) -> int | None:
    """Where the first of the strings begins."""
    found = [index for string in strings if (index := text.find(string)) >= 0]
    return min(found, default=None)
