"""Heads find what is in the data, the same every time, and say what they have found, by brute force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdist.cli import train_head
from specdist.models.heads.head import load_head
from specdist.models.heads.info import HeadInfo, read_head_info
from specdist.training.heads.config import TrainConfig
from specdist.training.heads.data import open_examples, split_rows
from specdist.training.heads.run import (
    Objective,
    area_under_curve,
    binary_kl,
    estimate,
    run_training,
    sigmoid,
)
from specdist.utils.errors import UserError
from tests.forked import fork
from tests.training.heads.synthetic import DIRECTION, DRAFT, write_collection

FAST = {"learning_rate": 2e-2, "epochs": 12, "depth": 1, "rejected_weight": 1.0, "batch_size": 8}
TIMEOUT_S = 100
FILES = ("head.safetensors", "head.json")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_collection(tmp_path_factory.mktemp("acceptance") / "data", num_rows=120)


@pytest.fixture(scope="module")
def verifier_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_collection(tmp_path_factory.mktemp("verifier") / "data", "verifier", num_rows=120)


def trained(data: Path, output: Path, kind: str = "acceptance", **options: Any) -> HeadInfo:
    options = (FAST if kind == "acceptance" else {}) | options
    return run_training(
        TrainConfig(kind=kind, data=str(data), output=str(output), device="cpu", **options)  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def head(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("head") / "head"
    trained(data, output)
    return output


def test_an_acceptance_head_finds_the_true_probabilities(head: Path) -> None:
    """The logit is linear in the state: next to nothing is left to find, and the features know nothing."""
    metrics = read_head_info(head).metrics
    assert metrics["kl"] < 0.01
    # With acceptances that are known, not drawn, the best possible is that of the acceptances themselves.
    assert metrics["auc"] > 0.86
    assert all(0.4 < value < 0.6 for value in metrics["baseline_auc"].values())
    assert metrics["num_examples"] + metrics["num_training_examples"] > 2000


def test_it_is_the_same_bit_for_bit_in_another_process(head: Path, data: Path, tmp_path: Path) -> None:
    words = {"kind": "acceptance", "data": data, "output": tmp_path / "head", "device": "cpu", **FAST}
    process = fork(train_head, [f"--{name}={value}" for name, value in words.items()])
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0
    for name in FILES:
        assert (tmp_path / "head" / name).read_bytes() == (head / name).read_bytes(), name


def test_rejections_that_weigh_more_lower_the_estimate(data: Path, tmp_path: Path) -> None:
    """The loss is least at p / (p + 6 (1 - p)): the paper's heads are meant to be this shy."""
    info = trained(data, tmp_path / "head", rejected_weight=6.0, depth=0, epochs=30, learning_rate=0.1,
                   features="none")  # fmt: skip
    loaded = load_head(tmp_path / "head", kind="acceptance", draft=DRAFT)
    bias = float(loaded.output.bias)
    assert bias == pytest.approx(-np.log(6), abs=0.1)
    np.testing.assert_allclose(loaded.output.weight[0].numpy(), DIRECTION, atol=0.1)
    assert info.metrics["kl"] > 0.1 and info.metrics["auc"] > 0.86


def test_a_verifier_finds_which_ratios_are_small(verifier_data: Path, tmp_path: Path) -> None:
    """Q/P = 1 + e**-z is at most 1.5 where z >= log 2: a linear layer separates these perfectly."""
    info = trained(verifier_data, tmp_path / "head", "verifier", max_ratio=1.5, validation_share=0.3)
    assert (info.depth, info.max_ratio) == (0, 1.5)
    assert info.metrics["auc"] > 0.98
    assert info.metrics["kl"] < 0.5
    examples = open_examples(str(verifier_data), "verifier")
    assert info.metrics["mean_label"] == pytest.approx((examples.column("ratio") <= 1.5).mean(), abs=0.1)


def test_a_verifier_stops_early_and_keeps_its_best(verifier_data: Path, tmp_path: Path) -> None:
    """With a rate far too large the loss goes up and down; the weights are those of its lowest."""
    info = trained(verifier_data, tmp_path / "head", "verifier", max_ratio=1.5, learning_rate=3.0, patience=2)
    history = info.metrics["history"]
    assert len(history["evaluation"]) < 50
    best = int(np.argmin(history["evaluation"]))
    assert best == len(history["evaluation"]) - 3
    assert info.metrics["loss"] == pytest.approx(history["evaluation"][best], rel=1e-6)


def test_features_are_read_where_they_are_asked_for(tmp_path: Path) -> None:
    """The acceptance is the token's probability here, and the hidden states say nothing."""
    data = write_collection(tmp_path / "data", follows_features=True)
    blind = trained(data, tmp_path / "blind", epochs=4, features="none")
    info = trained(data, tmp_path / "head", epochs=25)
    assert blind.metrics["auc"] < 0.6 and not blind.uses_features
    # The best possible is the probability's own, 0.83.
    assert info.uses_features and info.metrics["auc"] > info.metrics["baseline_auc"]["probability"] - 0.03
    head = load_head(tmp_path / "head", kind="acceptance", draft=DRAFT)
    assert head.uses_features
    _, kept_out = split_rows(open_examples(str(data), "acceptance"), 0.1, seed=0)
    auc = area_under_curve(estimate(head, kept_out), kept_out.column("acceptance"))
    assert auc == info.metrics["auc"]


def test_a_head_is_not_replaced_unasked(head: Path, data: Path) -> None:
    with pytest.raises(UserError, match="already contains a head: use another folder, or --overwrite"):
        trained(data, head)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("verifier", {"depth": 2}, "--depth 2 has no effect with --kind verifier"),
        ("acceptance", {"max_ratio": 1.2}, "--max_ratio 1.2 has no effect with --kind acceptance"),
    ],
)
def test_options_that_mean_nothing_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainConfig(kind=kind, data="data", output="head", **options)


def test_the_defaults_are_the_papers_at_its_size() -> None:
    """36 thousand of 40 thousand prompts and Llama 2's width; smaller ones get more epochs, larger rates."""
    config = TrainConfig(kind="acceptance", data="data", output="head")
    assert config.pace(36_000, 4096) == (5e-5, 3) and config.batch_size == 32
    assert (config.depth, config.accepted_weight, config.rejected_weight) == (3, 1, 6)
    assert config.pace(300, 128) == (pytest.approx(1.6e-3), 10)
    given = TrainConfig(kind="verifier", data="data", output="head", learning_rate=0.5, epochs=2)
    assert given.pace(300, 128) == (0.5, 2)


def brute_force_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Every pair, each as often as it is positive and negative; ties count half."""
    wins = (scores[:, None] > scores) + 0.5 * (scores[:, None] == scores)
    weights = labels[:, None] * (1 - labels)
    return float((wins * weights).sum() / weights.sum())


@pytest.mark.parametrize("is_soft", [False, True])
@pytest.mark.parametrize("has_ties", [False, True])
def test_the_auc_is_that_of_all_pairs(is_soft: bool, has_ties: bool) -> None:
    generator = np.random.default_rng(0)
    scores = generator.normal(size=200)
    if has_ties:
        scores = scores.round(0)
    labels = sigmoid(scores + generator.normal(size=200))
    if not is_soft:
        labels = (labels > 0.5).astype(float)
    assert area_under_curve(scores, labels) == pytest.approx(brute_force_auc(scores, labels), abs=1e-12)
    assert area_under_curve(scores, np.ones(200)) is None


def test_the_divergence_is_its_formula_and_0_where_both_agree() -> None:
    labels, logits = np.array([0.2, 0.9, 0.0, 1.0]), np.array([0.3, -1.0, -2.0, 5.0])
    p, q = labels, 1 / (1 + np.exp(-logits))
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.nan_to_num(p * np.log(p / q)) + np.nan_to_num((1 - p) * np.log((1 - p) / (1 - q)))
    assert binary_kl(logits, labels) == pytest.approx(terms.mean())
    inner = np.array([0.2, 0.9, 0.5])
    assert binary_kl(np.log(inner / (1 - inner)), inner) == pytest.approx(0, abs=1e-12)


def test_losses_do_not_overflow() -> None:
    objective = Objective(labels=lambda examples: examples.column("acceptance"), rejected_weight=6)
    assert objective.mean_loss(np.array([1000.0, -1000.0]), np.array([0.0, 1.0])) == (6000 + 1000) / 2
    assert sigmoid(np.array([-1000.0, 1000.0])).tolist() == [0, 1]
