"""What is timed before a run, told by a clock that only this test moves."""

from collections import Counter

import pytest

from specdist.job.costs.pass_times import Budget, PassTimes, context_slopes
from specdist.policies.costs import Curve

NUM_ROWS, PER_ROW = 8, 21
LARGEST = NUM_ROWS * PER_ROW


def always(ns: float) -> bool:
    """A budget without an end."""
    return True


class Device:
    """Passes of a device whose time is what this test says; ``passes``: rows, tokens and context of each."""

    def __init__(self, weights_ns: int, token_ns: int, row_context_ns: int = 0, token_context_ns: int = 0):
        self._costs = weights_ns, token_ns, row_context_ns, token_context_ns
        self.now_ns = 0
        self.passes: list[tuple[int, int, int]] = []
        self.budget = Budget(0, lambda: self.now_ns)

    def ns(self, num_rows: int, num_tokens: int, context: int) -> int:
        weights_ns, token_ns, row_context_ns, token_context_ns = self._costs
        of_context = row_context_ns * num_rows + token_context_ns * num_tokens
        return max(weights_ns, token_ns * num_tokens) + context * of_context

    def __call__(self, num_rows: int, num_tokens: int, context: int) -> int:
        self.passes.append((num_rows, num_tokens, context))
        ns = self.ns(num_rows, num_tokens, context)
        self.now_ns += ns
        return ns

    def times(self, largest: int = LARGEST) -> PassTimes:
        return PassTimes(self, num_rows=NUM_ROWS, largest=largest, num_context_tokens=7)

    @property
    def counts(self) -> Counter[int]:
        return Counter(num_tokens for _, num_tokens, _ in self.passes)


def test_without_a_budget_two_sizes_are_timed_once_and_the_line_through_them_goes_on() -> None:
    device = Device(1, 100)
    curve = device.times().timed(device.budget.until(1.0)).curve()
    assert device.passes == [(NUM_ROWS, NUM_ROWS, 7), (NUM_ROWS, 4 * NUM_ROWS, 7)]
    assert float(curve(LARGEST)) == device.ns(NUM_ROWS, LARGEST, 0)


def test_no_size_is_larger_than_the_largest() -> None:
    device = Device(1, 100)
    assert max(device.times(largest=NUM_ROWS).timed(always).curve().sizes) == NUM_ROWS


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_nothing_is_timed_that_would_end_after_the_budget(share: float) -> None:
    """Whatever the budget allows, more of it times more, and the first passes are the most telling ones."""
    counts = []
    for total_ns in range(0, 400_000, 7_000):
        device = Device(3000, 100)
        device.budget.total_ns = total_ns
        device.times().timed(device.budget.until(share))
        first_ns = sum(device.ns(*each) for each in device.passes[:2])
        assert device.now_ns <= max(first_ns, share * total_ns)
        assert device.passes[0][1] == NUM_ROWS
        counts.append(len(device.passes))
    assert counts[0] == 2 < counts[-1]


@pytest.mark.parametrize("num_rows", [1, NUM_ROWS])
def test_the_bend_of_a_mixture_of_experts_is_found(num_rows: int) -> None:
    """Steep where every token has experts of its own, and ever flatter: 8 of 128 for each token, which take
    most of a pass. A straight line from the first size to the last would be wrong by a sixth and more."""

    def experts_ns(num_tokens: int) -> float:
        return 3000 + 20_000 * (1 - (1 - 8 / 128) ** num_tokens)

    def timer(num_rows: int, num_tokens: int, context: int) -> int:
        return round(experts_ns(num_tokens))

    times = PassTimes(timer, num_rows=num_rows, largest=num_rows * PER_ROW, num_context_tokens=7)
    curve = times.timed(always).curve()
    largest = num_rows * PER_ROW
    for size in (1, 2, 3, 5, 9, *range(1, largest)):
        assert float(curve(size)) == pytest.approx(experts_ns(size), rel=0.04)
    line = experts_ns(1) + (experts_ns(largest) - experts_ns(1)) * 4 / (largest - 1)
    assert line < 0.85 * experts_ns(5)


@pytest.mark.parametrize(("context", "longest"), [(200, 4096), (200, 250), (4096, 4096)])
def test_the_cost_of_context_is_split_between_rows_and_tokens(context: int, longest: int) -> None:
    """100 ns for each row and 10 for each token of a pass, for every token of context."""
    device = Device(5000, 0, 100, 10)
    sizes = {"num_rows": 3, "num_tokens_per_row": 5, "num_context_tokens": context}
    curve = Curve([3, 12], [device.ns(3, size, context) for size in (3, 12)])
    slopes = context_slopes(device, curve, always, **sizes, max_context_tokens=longest)
    assert slopes == pytest.approx((100_000, 10_000))
    assert {num_context for *_, num_context in device.passes} == {min(max(2 * context, 1024), longest) % 4096}


def test_context_costs_nothing_where_there_is_none_or_no_time() -> None:
    device = Device(5000, 0, 100, 10)
    sizes = {"num_rows": 3, "num_tokens_per_row": 5, "num_context_tokens": 0}
    assert context_slopes(device, Curve([1], [5000]), always, **sizes, max_context_tokens=0) == (0.0, 0.0)
    device.budget.total_ns = 19_000
    slopes = context_slopes(
        device, Curve([1], [5000]), device.budget.until(1.0), **sizes, max_context_tokens=512
    )
    assert slopes == (0.0, 0.0) and not device.passes
