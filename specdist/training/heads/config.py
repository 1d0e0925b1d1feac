"""The options of ``jobs/train_head.py``. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specdist.config.arguments import option
from specdist.policies import HeadKind
from specdist.utils.errors import UserError

MAX_DEPTH = 4
# SPRINTER's thresholds of Q/P, section 4; each has its curve in the ROC plot.
MAX_RATIOS = (1.0, 1.2, 1.5)
# The papers' values: SpecDec++, section 5.1; SPRINTER, section 4, which does not name a patience.
DEFAULTS: Mapping[HeadKind, Mapping[str, float]] = {
    "acceptance": {"depth": 3, "accepted_weight": 1.0, "rejected_weight": 6.0},
    "verifier": {"max_ratio": 1.2, "patience": 5},
}
# SpecDec++, appendix D.1: 3 epochs over 40 thousand prompts, 32 per step, with a hidden size of 4,096. A
# smaller one gets a larger rate, so that a step changes a logit as much. SPRINTER does not name a rate; its
# linear layer takes ten times this one.
PAPER_RATE, PAPER_WIDTH, PAPER_EPOCHS = 5e-5, 4096, 3
VERIFIER_SPEED, VERIFIER_EPOCHS = 10, 50
# With few prompts there are more epochs.
MIN_STEPS, MAX_EPOCHS = 500, 10


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Speed and length of the training."""

    learning_rate: float
    epochs: int


@dataclass(kw_only=True)
class TrainConfig:
    """Every option of ``jobs/train_head.py``. Raises :class:`UserError` for a value out of its range."""

    # What goes in and out
    kind: HeadKind = option(help="acceptance: for --policy specdecpp; verifier: for --policy sprinter")
    data: str = option(help="output folder of jobs/collect.py, of the same kind")
    output: str = option(help="output folder for head.safetensors, head.json and the plots")
    eval_data: str | None = option(
        None, help="another such folder to evaluate on (default: held-out rows of --data)"
    )
    validation_share: float | None = option(
        None, help="share of the rows of --data held out from training (default 0.1)"
    )
    overwrite: bool = option(False, help="replace an existing head in --output")
    device: Literal["auto", "cpu", "cuda"] = option("auto", help="auto = cuda if available")

    # The head
    depth: int | None = option(
        None, help="acceptance: number of residual layers before the linear layer (D, default 3)"
    )
    max_ratio: float | None = option(
        None, help="verifier: largest Q/P at which a token counts as acceptable (lambda, default 1.2)"
    )
    features: Literal["draft", "none"] | None = option(
        None,
        help="draft = the head also reads, of the distribution that the token was drawn from, the entropy, "
        "the token's probability and the largest one (default for acceptance); none = the hidden state "
        "alone, as the papers' heads (default for verifier)",
    )

    # The training
    accepted_weight: float | None = option(
        None, help="acceptance: weight of accepted tokens in the loss (w_acc, default 1)"
    )
    rejected_weight: float | None = option(
        None, help="acceptance: weight of rejected tokens in the loss (w_rej, default 6)"
    )
    learning_rate: float | None = option(
        None,
        help="initial learning rate of Adam, with cosine decay (default: SpecDec++'s 5e-5 at a hidden size "
        "of 4,096 and inversely proportional to the hidden size; verifier: 10 times that)",
    )
    epochs: int | None = option(
        None,
        help="passes over the data (default: 3, or up to 10 with fewer than 5,000 prompts; verifier: at most "
        "50)",
    )
    patience: int | None = option(
        None, help="verifier: evaluations without improvement before training stops (default 5)"
    )
    batch_size: int = option(32, help="prompts per training step, each with all of its examples")
    seed: int = option(0, help="seed of the weights, the order and the held-out rows")

    def __post_init__(self) -> None:
        self._resolve_kind()
        if self.eval_data is not None and self.validation_share is not None:
            raise UserError(
                f"--validation_share {self.validation_share} has no effect with --eval_data: leave out one"
            )
        if self.eval_data is None and self.validation_share is None:
            self.validation_share = 0.1
        for name, holds, rule in RULES:
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise UserError(f"--{name} {value!r} {rule}")

    def _resolve_kind(self) -> None:
        """Fill in the defaults of the kind, and refuse the options of the other."""
        owned = {name for defaults in DEFAULTS.values() for name in defaults}
        for name in sorted(owned - set(DEFAULTS[self.kind])):
            if getattr(self, name) is not None:
                raise UserError(
                    f"--{name} {getattr(self, name)} has no effect with --kind {self.kind}: leave it out"
                )
        if self.features is None:
            self.features = "draft" if self.kind == "acceptance" else "none"
        for name, value in DEFAULTS[self.kind].items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    @property
    def uses_features(self) -> bool:
        return self.features == "draft"

    def pace(self, num_rows: int, hidden_size: int) -> Pace:
        """The given options, else the defaults for this number of training prompts and this hidden size."""
        rate = PAPER_RATE * PAPER_WIDTH / hidden_size
        if self.kind == "verifier":
            rate, epochs = VERIFIER_SPEED * rate, VERIFIER_EPOCHS
        else:
            num_batches = -(-num_rows // self.batch_size)
            epochs = min(MAX_EPOCHS, max(PAPER_EPOCHS, -(-MIN_STEPS // num_batches)))
        return Pace(learning_rate=self.learning_rate or rate, epochs=self.epochs or epochs)

    def training_options(self) -> dict[str, Any]:
        """The options that decide the weights, besides the data; those of the other kind are left out."""
        paths = ("kind", "data", "output", "eval_data", "overwrite", "device")
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name not in paths and value is not None
        }


def _is_positive(value: float) -> bool:
    return value > 0


RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("validation_share", lambda value: 0 < value < 1, "must be between 0 and 1"),
    ("depth", lambda value: 0 <= value <= MAX_DEPTH, f"must be 0 (linear) to {MAX_DEPTH}"),
    ("max_ratio", _is_positive, "must be positive"),
    ("accepted_weight", _is_positive, "must be positive"),
    ("rejected_weight", _is_positive, "must be positive"),
    ("learning_rate", _is_positive, "must be positive"),
    ("epochs", lambda value: value >= 1, "must be at least 1"),
    ("patience", lambda value: value >= 1, "must be at least 1"),
    ("batch_size", lambda value: value >= 1, "must be at least 1"),
    ("seed", lambda value: 0 <= value < 2**63, "must be in [0, 2**63)"),
)
