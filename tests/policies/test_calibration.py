"""The acceptance model learns what it is shown, and starts from something sane."""

import numpy as np
import pytest

from specdist.policies.calibration import (
    PRIOR_WEIGHTS,
    PRIOR_WEIGHTS_OF_PLACES,
    AcceptanceModel,
    place_features,
    token_features,
)


def some_tokens(num: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    top = generator.uniform(0.02, 0.99, num)
    drawn = np.where(generator.random(num) < top, top, (1 - top) * generator.random(num))
    entropies = (1 - top) * generator.uniform(2, 8, num)
    return token_features(entropies, drawn, top, generator.integers(0, 6, num))


@pytest.mark.parametrize("is_coupled", [True, False])
def test_the_prior_believes_a_decided_draft_more(is_coupled: bool) -> None:
    top = np.array([0.05, 0.3, 0.6, 0.95])
    features = token_features(3 * (1 - top), top, top, np.zeros(4))
    chances = AcceptanceModel(PRIOR_WEIGHTS[is_coupled]).predict(features)
    assert (np.diff(chances) > 0).all() and chances[0] > 0.1 and chances[-1] > 0.9


def test_it_becomes_calibrated_round_by_round() -> None:
    """A distribution that is far from the prior: after two thousand tokens predictions are right in every
    tenth."""
    truth = np.array([-0.7, 0.4, -0.3, 0.5, -0.4])
    features = some_tokens(12_000, seed=1)
    chances = 1 / (1 + np.exp(-features @ truth))
    outcomes = np.random.default_rng(2).random(len(chances)) < chances
    model = AcceptanceModel(PRIOR_WEIGHTS[True])
    before = np.abs(model.predict(features) - chances).mean()
    for begin in range(0, 2_000, 16):
        model.observe(features[begin : begin + 16], outcomes[begin : begin + 16])
    predicted = model.predict(features[2_000:])
    assert np.abs(predicted - chances[2_000:]).mean() < 0.04 < before
    order = np.argsort(predicted)
    for part in np.array_split(order, 10):
        # Three standard errors of a mean of 1000 outcomes, and what is still to be learned.
        assert outcomes[2_000:][part].mean() == pytest.approx(predicted[part].mean(), abs=0.05 + 0.03)


def test_a_few_surprises_do_not_overturn_the_prior() -> None:
    features = some_tokens(4, seed=3)
    model = AcceptanceModel(PRIOR_WEIGHTS[True])
    before = model.predict(features)
    model.observe(features, np.zeros(4))
    after = model.predict(features)
    assert (after < before).all() and (after > before / 5).all()


def test_slope_and_offset_of_places_are_learned() -> None:
    rng, model = np.random.default_rng(0), AcceptanceModel(PRIOR_WEIGHTS_OF_PLACES)
    for _ in range(200):
        confidences = rng.uniform(0.01, 0.99, 20)
        chances = 1 / (1 + np.exp(-(0.4 + 1.1 * np.log(confidences / (1 - confidences)))))
        model.observe(place_features(confidences), rng.random(20) < chances)
    found = model.predict(place_features(np.array([0.1, 0.5, 0.9])))
    assert found == pytest.approx([0.117, 0.599, 0.944], abs=0.05)
