"""Which positions of the four texts are taken, and how a mixed completion is cut into segments."""

from __future__ import annotations

from collections import Counter

import numpy as np

from specdist.training.collect.texts import NUM_STRETCHES, Text, stretch_lengths, verifier_texts

STOP = 9
PROMPT = [1, 2, 3, 4, 4, 4, 4]


def texts_of(row_id: int = 0, *, max_seq_len: int = 100, **changes: object) -> dict[str, Text]:
    row = {
        "prompt_ids": PROMPT,
        "draft_ids": [5] * 8,
        "target_ids": [6] * 9 + [STOP],
        "mixed_ids": [5, 5, 6, 6, 6, 6, 5, 5, 5],
        "by_draft": [True, True, False, False, False, False, True, True, True],
    } | changes
    found = verifier_texts(
        row_id,
        **row,  # type: ignore[arg-type]
        seed=1,
        max_seq_len=max_seq_len,
        stop_token_ids=frozenset([STOP]),
    )
    return {text.kind: text for text in found}


def places(text: Text) -> list[int]:
    return text.places_N.tolist()


def test_every_kind_gives_as_many_positions_as_the_shortest_has() -> None:
    """The original has places 1 to 7, and so have the mixed one's tokens of both: 10 to 16."""
    texts = texts_of()
    assert places(texts["original"]) == list(range(1, 8))
    assert places(texts["mixed"]) == list(range(10, 17))
    for kind, last in (("draft", 15), ("target", 16)):
        found = places(texts[kind])
        # Its own first token is in every prefix, and nothing is drafted after the stop token.
        assert len(set(found)) == 7 and found == sorted(found) and found[0] >= 8 and found[-1] <= last


def test_positions_are_drawn_uniformly() -> None:
    """Over rows every place of the target's text is taken as often: 7 of 9, in 400 rows 311 times, ± 4 σ."""
    counts = Counter(place for row_id in range(400) for place in places(texts_of(row_id)["target"]))
    assert sorted(counts) == list(range(8, 17))
    assert all(abs(count - 311) < 34 for count in counts.values())


def test_no_position_is_taken_at_the_end_of_the_longest_sequence() -> None:
    for text in texts_of(max_seq_len=13).values():
        assert text.num_context <= 12


def test_a_row_that_lacks_positions_of_one_kind_is_left_out() -> None:
    """A mixed completion written by one of the models alone, or a completion that ends at once."""
    for changes in ({"mixed_ids": [5, 5], "by_draft": [True, True]}, {"draft_ids": [STOP]}):
        assert all(len(text.places_N) == 0 for text in texts_of(**changes).values())


def test_segments_add_up_and_differ() -> None:
    lengths = np.array([stretch_lengths(row_id, seed=0, max_new_tokens=40) for row_id in range(300)])
    assert lengths.shape == (300, NUM_STRETCHES)
    assert (lengths >= 0).all() and (lengths.sum(1) == 40).all()
    # Each of the four is as long as any other, up to rounding down the cuts.
    assert np.allclose(lengths.mean(0), 10, atol=1.7)
    assert stretch_lengths(3, seed=0, max_new_tokens=40) == lengths[3].tolist()
    assert sorted(stretch_lengths(3, seed=0, max_new_tokens=1)) == [0, 0, 0, 1]
