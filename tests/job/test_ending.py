"""The rows whose completions are expected to be the longest begin first."""

from __future__ import annotations

from specdist.job.rows.lengths import MIN_LEARNED, ExpectedLengths


def sizes(rows: list[int]) -> list[float]:
    """Long prompts at the end."""
    return [2.0**row for row in rows]


def test_rows_with_prompts_of_which_long_completions_are_known_begin_first() -> None:
    lengths = ExpectedLengths(sizes)
    rows = list(range(8))
    lengths.begin(rows)
    assert lengths.longest_first(rows) == rows
    # The middle prompts get the longest completions.
    for number in range(2 * MIN_LEARNED):
        lengths.begin([number % 8])
        lengths.observe(number % 8, 100 if number % 8 in (3, 4) else 10)
    lengths.end(rows)
    lengths.begin(rows)
    assert lengths.longest_first(rows) == [3, 4, 0, 1, 2, 5, 6, 7]


def test_finished_samples_tell_the_length_of_a_rows_others() -> None:
    lengths = ExpectedLengths(sizes)
    lengths.begin([0, 1, 2])
    lengths.observe(1, 50)
    lengths.observe(2, 70)
    assert lengths.longest_first([0, 1, 2]) == [2, 1, 0]
