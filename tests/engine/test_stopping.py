"""Where a completion ends if its end falls inside a block."""

import dataclasses

import pytest

from specdist.engine.request import FinishReason, Request, Sequence
from specdist.engine.schedule.stopping import StopCheck, StopRules
from tests.engine.harness import DETOKENIZER

EOS = 7


def sequence_of(num_committed: int, max_length: int) -> Sequence:
    request = Request(row_id=0, sample_index=0, prompt_ids=[1, 2])
    token_ids = [1, 2, *[0, 1, 2, 3, 4][:num_committed]]
    return Sequence(request=request, order=1, stream_key=0, max_length=max_length, token_ids=token_ids)


@pytest.mark.parametrize(
    ("new_ids", "num_kept", "reason"),
    [
        ([3, 3, 5], 3, None),
        ([], 0, None),
        ([3, EOS, 4, EOS], 2, "stop"),
        ([EOS], 1, "stop"),
        # "EF", of which the first letter may have been committed before.
        ([4, 5, 6], 2, "stop"),
        ([5, 6], 1, "stop"),
        # The stop token comes first, or the string does.
        ([EOS, 4, 5], 1, "stop"),
        ([4, 5, EOS], 2, "stop"),
        # Room for six.
        ([3, 3, 3, 3, 3, 3, 3], 6, "length"),
        ([3, 3, 3, 3, 3, 3], 6, "length"),
        ([3, 3, 3, 3, 3, EOS], 6, "stop"),
        ([3, 3, 3, 3, 3, 3, EOS], 6, "length"),
    ],
)
def test_a_block_is_kept_up_to_its_stop(
    new_ids: list[int], num_kept: int, reason: FinishReason | None
) -> None:
    rules = StopRules(DETOKENIZER, frozenset([EOS]), ("EF",))
    assert rules.check(sequence_of(5, max_length=13), new_ids) == StopCheck(num_kept, reason)


def test_next_tokens_end_the_sequences_that_any_or_their_own_one_ends() -> None:
    """As one check of each would say. Room for the next token alone, and stop strings, are seen before it."""
    sequences = [sequence_of(5, max_length) for max_length in (8, 9, 13, 13, 13, 8)]
    sequences[3].request = dataclasses.replace(sequences[3].request, stop=("EF",))
    next_ids = [3, 3, EOS, 5, -2, EOS]
    rules = StopRules(DETOKENIZER, frozenset([EOS]))
    assert rules.near_ends(sequences) == [0, 3, 5]
    ends = rules.ends(sequences, next_ids, rules.near_ends(sequences), not_finite=-2)
    assert ends == ["length", None, "stop", "stop", "error", "stop"]
    assert rules.ends(sequences[1:3], [3, 4], [], not_finite=-2) == [None, None]


def test_a_request_has_stop_strings_of_its_own() -> None:
    """Instead of the run's."""
    rules, sequence = StopRules(DETOKENIZER, frozenset(), ("EF",)), sequence_of(0, max_length=13)
    sequence.request = dataclasses.replace(sequence.request, stop=("C", "D"))
    assert rules.check(sequence, [4, 5, 3, 1]) == StopCheck(3, "stop")
    sequence.token_ids += [4, 5, 3]
    assert rules.text(sequence) == "EF"
