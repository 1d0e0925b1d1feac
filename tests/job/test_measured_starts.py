"""A draft on a rank of its own starts with every option, and with costs that the run measures itself."""

import pytest

from tests.job.pair import Pair
from tests.ranks import run_ranks


@pytest.mark.ranks
def test_every_option_starts_with_measured_costs(pair: Pair) -> None:
    run_ranks("tests.job.measured_starts", 2, str(pair.target), str(pair.draft))
