"""The text of each token of a completion, of which together its text is made."""

from __future__ import annotations

from itertools import accumulate

from specdist.engine.schedule.detokenizer import NOT_A_CHARACTER, Detokenizer, common_length

# Tokens that may wait for a character to be completed; of so many, the first are none.
MAX_WAITING = 8


class TokenTexts:
    """The texts of ``token_ids`` after ``before_ids``.

    Attributes:
        texts: by token. Joined they are what the tokens add, without special tokens. A character is of the
            last token that it needs; so are bytes of a text that are no characters.
    """

    def __init__(self, detokenizer: Detokenizer, before_ids: list[int], token_ids: list[int]) -> None:
        self._decode, context = detokenizer.decode, detokenizer.context(before_ids)
        self._ids, self._num_before = context + token_ids, len(context)
        # What each token is decoded after, and how much of that has been written.
        self._begins: list[tuple[int, int]] = []
        self.texts: list[str] = []
        begin, end = 0, len(context)
        for place in range(len(context), len(self._ids)):
            self._begins.append((begin, end))
            text = self._written(begin, end, self._ids[end : place + 1])
            num_waiting = place + 1 - end
            is_last = place + 1 == len(self._ids)
            if text.endswith(NOT_A_CHARACTER) and num_waiting < MAX_WAITING and not is_last:
                text = ""
            self.texts.append(text)
            if text:
                begin, end = end, place + 1
        self._agree_with(detokenizer.added(before_ids, token_ids))

    def _written(self, begin: int, end: int, own_ids: list[int]) -> str:
        known = self._decode(self._ids[begin:end], True)
        text = self._decode(self._ids[begin:end] + own_ids, True)
        return text[common_length(known, text) :]

    def _agree_with(self, whole: str) -> None:
        """Bytes that are no character may make those before and after them none as well: what differs is of
        the token that ends it."""
        joined = "".join(self.texts)
        if joined == whole:
            return
        num_same = common_length(joined, whole)
        room = min(len(joined), len(whole)) - num_same
        num_same_after = min(common_length(joined[::-1], whole[::-1]), room)
        moved = len(whole) - len(joined)
        ends = [
            min(end, num_same) if end < len(joined) - num_same_after else end + moved
            for end in accumulate(map(len, self.texts))
        ]
        self.texts = [whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def other(self, index: int, token_id: int) -> str:
        """The text of another token in the place of one; nothing where it would not complete a character."""
        place = self._num_before + index
        if token_id == self._ids[place]:
            return self.texts[index]
        begin, end = self._begins[index]
        return self._written(begin, end, [*self._ids[end:place], token_id]).rstrip(NOT_A_CHARACTER)
