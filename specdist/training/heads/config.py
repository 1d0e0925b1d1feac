"""The options of ``jobs/train_head.py``. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from specdist.config.arguments import option
from specdist.policies import HeadKind
from specdist.utils.rules import SEED, Refusals, check_options, within

MAX_DEPTH = 4
# The papers' values: SpecDec++, section 5.1; SPRINTER, section 4, which does not name a patience.
DEFAULTS: Mapping[HeadKind, Mapping[str, float]] = {
    "acceptance": {"depth": 3, "accepted_weight": 1.0, "rejected_weight": 6.0},
    "verifier": {"max_ratio": 1.2, "patience": 5},
}
OF_THE_OTHER = "has no effect with --kind {o.kind}: leave it out"
# SpecDec++, appendix D.1: 3 epochs over 40 thousand prompts, 32 per step, with a hidden size of 4,096. A
# smaller one gets a larger rate, so that a step changes a logit as much. SPRINTER does not name a rate; its
# linear layer takes ten times this one.
PAPER_RATE, PAPER_WIDTH, PAPER_EPOCHS = 5e-5, 4096, 3
VERIFIER_SPEED, VERIFIER_EPOCHS = 10, 50
# With few prompts there are more epochs.
MIN_STEPS, MAX_EPOCHS = 500, 10


@dataclass(kw_only=True)
class TrainConfig:
    """Every option of ``jobs/train_head.py``. Raises :class:`UserError` for a value out of its range."""

    # What goes in and out
    kind: HeadKind = option(help="acceptance: for --policy specdecpp; verifier: for --policy sprinter")
    data: str = option(help="output folder of jobs/collect.py, of the same kind")
    output: str = option(help="output folder for head.safetensors and head.json")
    validation_share: float = option(
        0.1, above=0, below=1, help="share of the rows of --data held out from training"
    )
    overwrite: bool = option(False, help="replace an existing head in --output")
    device: Literal["auto", "cpu", "cuda"] = option("auto", help="auto = cuda if available")

    # The head
    depth: int | None = option(
        None, rule=within(at_least=0, at_most=MAX_DEPTH, text=f"must be 0 (linear) to {MAX_DEPTH}"),
        help="acceptance: number of residual layers before the linear layer (D, default 3)",
    )  # fmt: skip
    max_ratio: float | None = option(
        None, above=0,
        help="verifier: largest Q/P at which a token counts as acceptable (lambda, default 1.2)",
    )  # fmt: skip
    features: Literal["draft", "none"] | None = option(
        None,
        help="draft = the head also reads, of the distribution that the token was drawn from, the entropy, "
        "the token's probability and the largest one (default for acceptance); none = the hidden state "
        "alone, as the papers' heads (default for verifier)",
    )

    # The training
    accepted_weight: float | None = option(
        None, above=0, help="acceptance: weight of accepted tokens in the loss (w_acc, default 1)"
    )
    rejected_weight: float | None = option(
        None, above=0, help="acceptance: weight of rejected tokens in the loss (w_rej, default 6)"
    )
    learning_rate: float | None = option(
        None, above=0,
        help="initial learning rate of Adam, with cosine decay (default: SpecDec++'s 5e-5 at a hidden size "
        "of 4,096 and inversely proportional to the hidden size; verifier: 10 times that)",
    )  # fmt: skip
    epochs: int | None = option(
        None, at_least=1,
        help="passes over the data (default: 3, or up to 10 with fewer than 5,000 prompts; verifier: at "
        "most 50)",
    )  # fmt: skip
    patience: int | None = option(
        None, at_least=1, help="verifier: evaluations without improvement before training stops (default 5)"
    )
    batch_size: int = option(32, at_least=1, help="prompts per training step, each with all of its examples")
    seed: int = option(0, rule=SEED, help="seed of the weights, the order and the held-out rows")

    _refusals: ClassVar[Refusals] = (
        (" ".join(DEFAULTS["verifier"]), lambda o: o.kind != "verifier",
         OF_THE_OTHER),
        (" ".join(DEFAULTS["acceptance"]), lambda o: o.kind != "acceptance",
         OF_THE_OTHER),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        if self.features is None:
            self.features = "draft" if self.kind == "acceptance" else "none"
        for name, value in DEFAULTS[self.kind].items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    @property
    def uses_features(self) -> bool:
        return self.features == "draft"

    def pace(self, num_rows: int, hidden_size: int) -> tuple[float, int]:
        """Learning rate and epochs: those given, else the defaults for this number of training prompts and
        this hidden size."""
        rate = PAPER_RATE * PAPER_WIDTH / hidden_size
        if self.kind == "verifier":
            rate, epochs = VERIFIER_SPEED * rate, VERIFIER_EPOCHS
        else:
            num_batches = -(-num_rows // self.batch_size)
            epochs = min(MAX_EPOCHS, max(PAPER_EPOCHS, -(-MIN_STEPS // num_batches)))
        return self.learning_rate or rate, self.epochs or epochs

    def training_options(self) -> dict[str, Any]:
        """The options that decide the weights, besides the data; those of the other kind are left out."""
        paths = ("kind", "data", "output", "overwrite", "device")
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name not in paths and value is not None
        }
