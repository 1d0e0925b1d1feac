"""Options of the synthetic pair: what is refused, and how the message names it."""

from __future__ import annotations

import pytest

from specdist.lab.synthetic.config import SyntheticConfig
from specdist.utils.errors import UserError


def test_the_dial_is_set_in_one_of_two_ways() -> None:
    assert SyntheticConfig(output="o", shape="70b", epsilon=0.1).dtype == "float32"
    for both in ({}, {"acceptance": 0.5, "epsilon": 0.5}):
        with pytest.raises(UserError, match="--shape 70b takes either --acceptance or --epsilon"):
            SyntheticConfig(output="o", shape="70b", **both)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shape": "6m"}, "--shape '6m' is not a shape: choose one of 5m, 20m"),
        ({"epsilon": -0.1}, "--epsilon -0.1 must be 0 or above"),
        ({"epsilon": None, "acceptance": 1.5}, r"--acceptance 1.5 must be in \(0, 1\]"),
        ({"seed": -1}, r"--seed -1 must be in \[0, 2\*\*31\)"),
    ],
)
def test_a_value_out_of_range_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SyntheticConfig(**({"output": "o", "shape": "5m", "epsilon": 0.1} | values))  # type: ignore[arg-type]
