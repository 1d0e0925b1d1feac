"""Policies that stop after a drawn token, by what the draft knows of it or a trained head says of it."""

import math

import pytest

from specdist.policies import LengthPolicy
from specdist.policies.lengths import thresholds
from specdist.policies.lengths.thresholds import (
    AdaEdl,
    ConfidenceThreshold,
    DraftVerify,
    SpecDecPlusPlus,
    Sprinter,
    Svip,
)
from tests.policies.rows import after, asked, begun


def adaedl(*, target_acceptance: float = 0.9) -> AdaEdl:
    return AdaEdl(
        max_draft_tokens=20, stop_bound=0.4, entropy_factor=0.2, target_acceptance=target_acceptance
    )


THRESHOLDS = [
    ConfidenceThreshold(max_draft_tokens=20, stop_probability=0.4),
    Svip(max_draft_tokens=20, stop_root_entropy=0.3),
    adaedl(),
]


@pytest.mark.parametrize("policy", THRESHOLDS, ids=lambda policy: type(policy).__name__)
def test_one_token_is_always_drafted_and_never_more_than_the_cap(policy: LengthPolicy) -> None:
    """Algorithm 1 of SVIP draws before it looks; without a cap a sure draft would go on for ever."""
    rows = begun(policy, 2)
    assert asked(policy, rows, 0) == [True, True]
    sure = {"entropies": [0.0, 0.0], "chances": [1.0, 1.0]}
    unsure = {"entropies": [5.0, 0.0], "chances": [0.01, 1.0]}
    assert asked(policy, rows, 19, **sure) == [True, True]
    assert asked(policy, rows, 20, **sure) == [False, False]
    assert asked(policy, rows, 1, **unsure) == [False, True]


def test_confidence_by_hand() -> None:
    """transformers stops if p < threshold: at 0.4 it goes on. The likeliest token does not matter."""
    policy = ConfidenceThreshold(max_draft_tokens=20, stop_probability=0.4)
    rows = begun(policy, 4)
    found = asked(policy, rows, 1, chances=[0.39, 0.4, 0.41, 0.1], top_chances=[1.0, 0.4, 0.41, 0.9])
    assert found == [False, True, True, False]


def test_svip_by_hand() -> None:
    """sqrt(H) > h stops. H of (1/2, 1/2) is 0.693 nats, sqrt 0.833; of (0.99, 0.01) 0.056, sqrt 0.237;
    of (0.98, 0.02) 0.098, sqrt 0.313. The last row stands at the threshold itself."""
    policy = Svip(max_draft_tokens=40, stop_root_entropy=0.3)
    entropies = [
        -sum(p * math.log(p) for p in distribution)
        for distribution in ((0.5, 0.5), (0.99, 0.01), (0.98, 0.02))
    ]
    assert asked(policy, begun(policy, 3), 7, entropies=entropies) == [False, True, False]
    at_threshold = Svip(max_draft_tokens=40, stop_root_entropy=0.5)
    assert asked(at_threshold, begun(at_threshold, 2), 1, entropies=[0.25, 0.2501]) == [True, False]


def test_adaedl_stops_by_its_bound() -> None:
    """1 - sqrt(0.2 H) for H = 1.25, 1.8, 1.79, 5 is 0.5, 0.4, 0.4017, 0; the threshold is 0.45, 0.41, 0.4,
    0.4, one for each row."""
    policy = adaedl()
    rows = begun(policy, 4)
    rows[:, 1] = [0.45, 0.41, 0.4, 0.4]
    assert asked(policy, rows, 1, entropies=[1.25, 1.8, 1.79, 5.0]) == [True, False, True, False]


def test_adaedl_threshold_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large steps, so that the movement can be followed: β1 0.5, β2 0.5, ε 0.1, α 0.6."""
    monkeypatch.setattr(thresholds, "STEP", 0.1)
    monkeypatch.setattr(thresholds, "MOMENTUM", 0.5)
    policy = adaedl(target_acceptance=0.6)
    rows = begun(policy, 2)
    found = []
    # Row 0: 4 of 4: A = 0.5 <= 0.6: λ' = 0.5, λ = 0.45. 2 of 2: A = 0.75: λ' = 0.35, λ = 0.4.
    #        0 of 5: A = 0.375: λ' = 0.5, λ = 0.45.
    # Row 1: 1 of 5: A = 0.1: 0.45. 2 of 4: A = 0.3: 0.5. 3 of 4: A = 0.525: 0.55.
    for block in ([(4, 4), (5, 1)], [(2, 2), (4, 2)], [(5, 0), (4, 3)]):
        rows = after(policy, rows, block)
        found.append(rows.tolist())
    assert found[0] == [pytest.approx([0.5, 0.45]), pytest.approx([0.1, 0.45])]
    assert found[1] == [pytest.approx([0.75, 0.4]), pytest.approx([0.3, 0.5])]
    assert found[2] == [pytest.approx([0.375, 0.45]), pytest.approx([0.525, 0.55])]


def test_adaedl_as_published_moves_by_a_thousandth() -> None:
    """0.9 λ + 0.1 (λ + 0.01). From A = 0 it takes four whole blocks to pass 0.9: 0.5, 0.75, 0.875, 0.9375."""
    policy = adaedl()
    rows = begun(policy)
    thresholds = []
    for _ in range(5):
        rows = after(policy, rows, [(3, 3)])
        thresholds.append(rows[0, 1])
    assert thresholds == pytest.approx([0.401, 0.402, 0.403, 0.402, 0.401])


def test_draft_verify_by_hand() -> None:
    """Zhang et al. 2023: stop below γ; γ up by a tenth of ε while the acceptance rate is at most α."""
    policy = DraftVerify(stop_probability=0.6)
    rows = begun(policy, 2)
    assert asked(policy, rows, 1, chances=[0.59, 0.6]) == [False, True]
    # A = 0.5 x 0 + 0.5 x (3 of 4 accepted) = 0.375 and (0 of 4) = 0: both below 0.9, so both thresholds rise.
    histories = after(policy, rows, [(4, 3), (4, 0)])
    assert histories[:, 0].tolist() == [0.375, 0.0]
    assert histories[:, 1].tolist() == pytest.approx([0.601, 0.601])


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
