"""Policies that choose the length of a block by the acceptance of the row's previous ones."""

import pytest

from specdist.policies import FixedLength
from specdist.policies.lengths.counted import GammaTune, GammaTunePlus, HfHeuristic
from tests.policies.rows import after, asked, begun, length


def test_fixed_is_fixed() -> None:
    policy = FixedLength(3)
    rows = begun(policy, 2)
    assert [asked(policy, rows, depth) for depth in range(5)] == [[True] * 2] * 3 + [[False] * 2] * 2
    assert length(policy, after(policy, rows, [(3, 3), (3, 0)])) == 3
    assert length(FixedLength(0), begun(FixedLength(0))) == 0


def test_hf_heuristic_by_hand() -> None:
    """transformers: ``num_assistant_tokens`` += 2 if all matched, else max(1, ... - 1)."""
    policy = HfHeuristic(num_draft_tokens=5, max_draft_tokens=8)
    rows = begun(policy, 3)
    assert [length(policy, rows, row) for row in range(3)] == [5, 5, 5]
    # Row 0: all of 5, then all of 7, then all of 8 with the cap at 8. Row 1: 4 of 5, 0 of 4, 1 of 3.
    # Row 2: all of 5; 6 of 7; a block of 4 that the row's end cut short, accepted whole.
    found = []
    for block in ([(5, 5), (5, 4), (5, 5)], [(7, 7), (4, 0), (7, 6)], [(8, 8), (3, 1), (4, 4)]):
        rows = after(policy, rows, block)
        found.append([length(policy, rows, row) for row in range(3)])
    assert found == [[7, 4, 7], [8, 3, 6], [8, 2, 8]]
    # Down to one and no further; from the cap it goes down at once.
    rows = after(policy, rows, *[[(8, 0), (2, 0), (8, 7)]] * 3)
    assert [length(policy, rows, row) for row in range(3)] == [5, 1, 5]


def gammatune(**options: float) -> GammaTune:
    defaults = {"num_draft_tokens": 5, "max_draft_tokens": 20, "length_rate": 0.5}
    return GammaTune(**{**defaults, **options})  # type: ignore[arg-type]


def test_gammatune_by_hand() -> None:
    """Algorithm 1 of the paper with η = 0.5 and δ = 2."""
    policy = gammatune()
    rows = begun(policy, 2)
    windows, lengths = [], []
    # Row 0: 2 of 5: w = 2.5 + 1 = 3.5, γ = 4. All of 4: A = 6, w = 1.75 + 3 = 4.75, γ = 5.
    #        All of 5: A = 7, w = 2.375 + 3.5 = 5.875, γ = 6. 0 of 6: w = 2.9375, γ = 3.
    # Row 1: 0 of 5: 2.5, 3. 0 of 3: 1.25, 2. 0 of 2: 0.625, below γ_min: 1, 1. 1 of 1: A = 3, w = 2, γ = 2.
    for block in ([(5, 2), (5, 0)], [(4, 4), (3, 0)], [(5, 5), (2, 0)], [(6, 0), (1, 1)]):
        rows = after(policy, rows, block)
        windows.append(rows[:, 0].tolist())
        lengths.append([length(policy, rows, row) for row in range(2)])
    assert windows == [[3.5, 2.5], [4.75, 1.25], [5.875, 1.0], [2.9375, 2.0]]
    assert lengths == [[4, 3], [5, 2], [6, 1], [3, 2]]


def test_gammatune_stays_within_its_limits() -> None:
    policy = gammatune(max_draft_tokens=6, length_rate=1.0)
    # A = 5 + 2 = 7, and 0: both clipped.
    assert after(policy, begun(policy, 2), [(5, 5), (5, 0)])[:, 0].tolist() == [6.0, 1.0]


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.7, 0.9])
def test_a_window_at_its_fixed_point_stays_there(rate: float) -> None:
    """(1 - η) w + η A is not w in floating point, and the ceiling would make one token more of it."""
    policy = gammatune(num_draft_tokens=7, length_rate=rate)
    rows = begun(policy)
    for _ in range(50):
        rows = after(policy, rows, [(9, 7)])
    assert rows.tolist() == [[7.0]] and length(policy, rows) == 7


def test_gammatune_plus_also_stops_at_an_unlikely_top_token() -> None:
    policy = GammaTunePlus(num_draft_tokens=3, max_draft_tokens=20, length_rate=0.5, stop_probability=0.4)
    rows = begun(policy, 4)
    assert asked(policy, rows, 0) == [True] * 4
    # Strictly below the threshold; the drawn token's own probability does not matter.
    tops = [0.39, 0.4, 0.41, 1.0]
    assert asked(policy, rows, 1, top_chances=tops, chances=[0.0] * 4) == [False, True, True, True]
    assert asked(policy, rows, 3, top_chances=tops) == [False] * 4
    # A block that was stopped after its first token and accepted: A = 1 + 2, the window stays at 3.
    # The same without the acceptance: w = 1.5, γ = 2.
    rows = after(policy, rows[:2], [(1, 1), (1, 0)])
    assert rows[:, 0].tolist() == [3.0, 1.5]
    assert [length(policy, rows, row) for row in range(2)] == [3, 2]
