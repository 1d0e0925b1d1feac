"""Policies that are told a trained head's estimates."""

from specdist.policies import SpecDecPlusPlus, Sprinter
from tests.policies.rows import asked, begun


def test_specdecpp_stops_once_some_token_is_likely_to_be_rejected() -> None:
    policy = SpecDecPlusPlus(max_draft_tokens=5, stop_threshold=0.5)
    histories = begun(policy, 2)
    # 1 - 0.9, then 1 - 0.9 x 0.7 = 0.37, then 1 - 0.9 x 0.7 x 0.7 = 0.559.
    assert asked(policy, histories, 0) == [True, True]
    # Of the first token nothing is known when the second is drawn: it is kept whatever comes of it.
    assert asked(policy, histories, 1) == [True, True]
    assert asked(policy, histories, 2, earlier=[0.9, 0.4]) == [True, False]
    assert asked(policy, histories[:1], 3, earlier=[0.7]) == [True]
    assert asked(policy, histories[:1], 4, earlier=[0.7]) == [False]
    # A new block knows nothing of the one before; a branch has a line of its own.
    assert asked(policy, histories, 0, chains=[0, 7]) == [True, True]
    assert asked(policy, histories, 1, chains=[0, 7]) == [True, True]
    assert asked(policy, histories, 2, chains=[0, 7], earlier=[0.6, 0.6]) == [True, True]
    assert asked(policy, histories, 3, chains=[0, 7], earlier=[0.9, 0.6]) == [True, False]
    assert asked(policy, histories[:1], 4, chains=[0], earlier=[1.0]) == [True]
    assert asked(policy, histories[:1], 5, chains=[0], earlier=[1.0]) == [False]


def test_sprinter_stops_where_its_verifier_doubts() -> None:
    policy = Sprinter(max_draft_tokens=3, verifier_threshold=0.5)
    histories = begun(policy, 3)
    assert asked(policy, histories, 0) == [True] * 3
    assert asked(policy, histories, 1, estimates=[0.6, 0.5, 0.4]) == [True, True, False]
    assert asked(policy, histories, 2, estimates=[0.6, 0.9, 0.4]) == [True, True, False]
    assert asked(policy, histories, 3, estimates=[1.0, 1.0, 1.0]) == [False] * 3
