"""The trace of a shard: every drafted token, in the order of the rows."""

from specdist.data.stats.rows import RowResult
from specdist.data.stats.traces import TracedToken, trace_table
from tests.data.samples import row_result

VERIFIED = TracedToken(1, 0, 1, 9, 0.1, 0.7, 0.7, 1.0, True, True)
DROPPED = TracedToken(2, 0, 3, 8, 1.5, 0.25, 0.5, None, False, False)


def test_the_trace_of_a_row_is_kept_with_its_result():
    result = row_result(trace=(VERIFIED, DROPPED))
    found = RowResult.from_json(result.to_json())
    assert found == result
    assert isinstance(found.trace[0], TracedToken)


def test_a_table_has_the_tokens_in_the_order_of_the_rows():
    table = trace_table([(2, 0, (VERIFIED,)), (0, 1, ()), (0, 0, (VERIFIED, DROPPED))])
    assert table["row_id"].to_pylist() == [0, 0, 2]
    assert table["round"].to_pylist() == [1, 2, 1]
    assert table["acceptance_probability"].to_pylist() == [1.0, None, 1.0]
    assert table["entropy"].null_count == 0
