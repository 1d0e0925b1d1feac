"""Where a sequence stops: end tokens, stop strings, loops, and its greatest length. No tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from specdist.engine.request import FinishReason, Sequence
from specdist.engine.schedule.detokenizer import NOT_A_CHARACTER, Detokenizer, first_stop
from specdist.engine.schedule.repeats import num_until_loop

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
        detokenizer: of the target's tokenizer.
        token_ids: stop tokens; a completion's last token may be one, its text does not contain it.
        strings: stop strings of requests without their own; a completion's text ends before the first. They
            may hold special tokens, though a completion's text has none.
        repeats: copies of the same tokens that end a completion, of requests without their own number; 0:
            none do; negative: as many do, and the first of them alone is kept.
    """

    detokenizer: Detokenizer
    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    repeats: int = 0

    def _strings_of(self, sequence: Sequence) -> tuple[str, ...]:
        return self.strings if sequence.request.stop is None else sequence.request.stop

    def repeats_of(self, sequence: Sequence) -> int:
        return self.repeats if sequence.request.stop_repeats is None else sequence.request.stop_repeats

    def may_end(self, sequence: Sequence, new_ids: list[int]) -> bool:
        """Whether any of these tokens may end the sequence, as far as that is seen without their text."""
        strings = self._strings_of(sequence)
        num_tokens = len(sequence.token_ids) + len(new_ids)
        may_loop = num_tokens >= sequence.loops_from and self.repeats_of(sequence) != 0
        has_room = num_tokens < sequence.max_length and not may_loop
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
        if repeats := self.repeats_of(sequence):
            until = num_until_loop(sequence, new_ids[:num_kept], abs(repeats))
            if until is not None and (until < num_kept or reason != "stop"):
                num_kept, reason = until, "repetition"
        if strings and num_kept:
            until = self._num_until_stop(sequence, new_ids[:num_kept], strings)
            if until is not None:
                num_kept, reason = until, "stop"
        return StopCheck(num_kept, reason)

    def _num_until_stop(self, sequence: Sequence, new_ids: list[int], strings: tuple[str, ...]) -> int | None:
        """How many new tokens there are up to the first that completes a stop string. There was none before,
        so the last tokens tell whether one may have come; it takes no longer late in a completion."""
        num_bytes = max(len(string.encode()) for string in strings)
        last_ids = self.detokenizer.last_tokens(sequence.token_ids, num_bytes)
        text = self.detokenizer.decode(last_ids + new_ids, False)
        if NOT_A_CHARACTER not in text and first_stop(text, strings) is None:
            return None
        prompt_ids, committed = sequence.request.prompt_ids, sequence.token_ids[sequence.num_prompt_tokens :]
        for count in range(1, len(new_ids) + 1):
            if self.detokenizer.may_hold(last_ids + new_ids[:count], strings):
                # They may reach into the prompt.
                text = self.detokenizer.added(prompt_ids, committed + new_ids[:count], skip_special=False)
                if first_stop(text, strings) is not None:
                    return count
        return None

    def text(self, sequence: Sequence) -> str:
        """The completion's text, up to the first stop string."""
        token_ids = sequence.token_ids[sequence.num_prompt_tokens :]
        strings = self._strings_of(sequence)
        return self.detokenizer.until_stop(sequence.request.prompt_ids, token_ids, strings)
