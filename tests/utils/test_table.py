"""The one table of text that all reports use."""

from __future__ import annotations

from specdist.utils.table import Table, decimals

TABLE = Table.of(
    [
        {"name": "a", "way": "x", "count": 12, "rate": decimals(0.125)},
        {"name": "longer", "way": "yy", "count": 3, "rate": decimals(None)},
    ],
    num_names=2,
)


def test_names_are_flush_left_and_figures_flush_right() -> None:
    assert TABLE.console().splitlines() == [
        "name    way  count  rate",
        "a       x       12  0.12",
        "longer  yy       3     -",
    ]


def test_markdown_aligns_the_same_columns() -> None:
    assert TABLE.markdown().splitlines() == [
        "| name | way | count | rate |",
        "| --- | --- | ---: | ---: |",
        "| a | x | 12 | 0.12 |",
        "| longer | yy | 3 | - |",
    ]


def test_no_space_is_left_at_the_end_of_a_line() -> None:
    assert Table(["a", "b"], [["1", ""]], num_names=2).console() == "a  b\n1"


def test_a_table_without_rows_is_empty() -> None:
    assert Table.of([]).rows == [] and Table.of([]).console() == ""
