"""The options of ``jobs/distill.py``: those of the run that the draft is for, and of the training.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from specdist.config.arguments import option
from specdist.config.generate import GenerateConfig
from specdist.config.groups import MTP, is_own
from specdist.config.speculation import NGRAM
from specdist.utils.errors import UserError
from specdist.utils.rules import Refusals

Teacher = Literal["target", "recorded", "tokens"]
Loss = Literal["kl", "reverse_kl", "tvd"]
# The rate of fine-tuning a model of this width; one of another width gets a rate in inverse proportion.
USUAL_RATE, USUAL_WIDTH = 5e-5, 2048
# Of --prompt_rows; and the sequences that a training sees by default, in so many epochs.
USUAL_PROMPTS = 2000
MOST_OWN_TOKENS = 256
# Greedy texts of a small model repeat themselves: it learns less from them, for a greedy run, too.
LEAST_OWN_TEMPERATURE = 0.5
USUAL_SEQUENCES, FEWEST_EPOCHS, MOST_EPOCHS = 8000, 2, 20


@dataclass(kw_only=True)
class DistillConfig(GenerateConfig):
    """Every option of ``jobs/distill.py``. Raises :class:`UserError` for a value out of its range."""

    _argument_group_name = "Distillation"

    new_draft: str = option(help="folder for the new draft, for --draft of the run")
    first: float | None = option(
        None, above=0, below=1,
        help="generate this share of the run's rows first, in whole shards, and train on them (default: "
        "train on the finished rows in --output)",
    )  # fmt: skip
    go_on: bool = option(False, help="afterwards generate the run's other rows, with the new draft")
    layers: int | None = option(
        None, above=0,
        help="start from the target's embedding, its first N layers and its output head, instead of --draft",
    )  # fmt: skip
    teacher: Literal["auto", "target", "recorded", "tokens"] = option(
        "auto",
        help="what the draft learns from: target = the distributions of the target, which is loaded whole "
        "on every rank; recorded = the top log-probabilities of a run with --logprobs; tokens = the "
        "tokens alone; auto = recorded if there are any, else target",
    )
    loss: Loss | None = option(
        None,
        help="of the draft's distribution against the teacher's: kl = Kullback-Leibler divergence "
        "(default), reverse_kl, or tvd = TVD++; no option with --teacher tokens, whose loss is the "
        "cross entropy",
    )
    learning_rate: float | None = option(
        None, above=0, help="largest learning rate of AdamW (default: 5e-5 x 2048 / hidden size of the draft)"
    )
    prompt_rows: int | None = option(
        None, at_least=0,
        help="with the target as the teacher, learn too what it says at every place of so many rows' "
        "prompts, spread over the run, for which nothing needs to be generated; 0 = completions alone "
        f"(default: {USUAL_PROMPTS:,}, and 0 with another teacher)",
    )  # fmt: skip
    own_tokens: int | None = option(
        None, at_least=0,
        help="let the draft itself go on with these prompts for up to so many tokens, anew after every "
        "evaluation, and learn what the target says at every place of that, for which the target "
        "generates nothing, either; 0 = prompts alone (default: --max_new_tokens, at most "
        f"{MOST_OWN_TOKENS})",
    )  # fmt: skip
    own_temperature: float | None = option(
        None, at_least=0,
        help="temperature of these texts of the draft (default: --temperature, at least "
        f"{LEAST_OWN_TEMPERATURE}: greedy texts of a small model repeat themselves)",
    )  # fmt: skip
    epochs: int | None = option(
        None, at_least=1,
        help=f"most passes over the training rows (default: as many as see about {USUAL_SEQUENCES:,} "
        f"sequences, {FEWEST_EPOCHS} to {MOST_EPOCHS})",
    )  # fmt: skip
    patience: int = option(
        6, at_least=1, help="training stops after so many evaluations without a higher predicted speed-up"
    )
    batch_size: int = option(8, at_least=1, help="sequences of a training step, over all ranks")
    tokens_per_pass: int = option(
        4096, at_least=1, help="most tokens of a rank's forward pass, which bounds its memory"
    )
    max_sequences: int = option(
        20_000, at_least=1, help="most sequences to train on, spread over the finished rows"
    )
    validation_share: float = option(0.1, above=0, below=1, help="share of the rows kept for evaluations")
    precision: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        help="of passes in training: auto = bfloat16 on a GPU that has it, else float32; weights and "
        "optimizer are float32 in any case",
    )
    cost_ratio: float | None = option(
        None, above=0,
        help="time of a draft step over that of a target pass, for the predicted speed-up (default: what "
        "the run has measured, else the ratio of the sizes)",
    )  # fmt: skip

    _refusals: ClassVar[Refusals] = (
        ("prompt_rows", lambda o: o.prompt_rows and not o.can_learn_prompts,
         "needs --teacher target, which knows what comes after every token of a prompt: add it, or leave "
         "this out"),
        ("own_tokens", lambda o: o.own_tokens and not o.num_prompt_rows,
         "go on with the prompts of --prompt_rows, of which there are none: give --teacher target, and no "
         "--prompt_rows 0, or leave it out"),
        ("own_temperature", lambda o: not o.num_own_tokens,
         "is of the texts of --own_tokens, of which there are none: give --teacher target, and neither "
         "--prompt_rows 0 nor --own_tokens 0, or leave it out"),
        ("loss", lambda o: o.teacher == "tokens",
         "has no effect with --teacher tokens, whose loss is the cross entropy: leave it out"),
        ("teacher", lambda o: o.teacher == "recorded" and not o.logprobs,
         "needs a run with the target's log-probabilities: generate with --logprobs 20, or use --teacher "
         "target"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is None and (self.draft in (None, NGRAM, MTP) or is_own(self.draft)):
            raise UserError(
                f"--draft {self.draft or 'none'} cannot be trained: name the folder of a draft model, or "
                "use --layers N to start from the target's first layers"
            )
        if Path(self.new_draft).resolve() in {
            Path(name).resolve() for name in (self.target, self.draft or "-")
        }:
            raise UserError(
                f"--new_draft {self.new_draft} is the folder of a model of this run: give another folder"
            )

    @property
    def resolved_teacher(self) -> Teacher:
        if self.teacher == "auto":
            return "recorded" if self.logprobs else "target"
        return self.teacher

    @property
    def resolved_loss(self) -> Loss | Literal["cross_entropy"]:
        return "cross_entropy" if self.resolved_teacher == "tokens" else self.loss or "kl"

    @property
    def can_learn_prompts(self) -> bool:
        """Whether the teacher says what comes after every token of a prompt."""
        return self.resolved_teacher == "target"

    @property
    def num_prompt_rows(self) -> int:
        """Most rows whose prompts are learned from."""
        usual = USUAL_PROMPTS if self.can_learn_prompts else 0
        return usual if self.prompt_rows is None else self.prompt_rows

    @property
    def num_own_tokens(self) -> int:
        """Most tokens that the draft goes on with each of these prompts."""
        if not self.num_prompt_rows:
            return 0
        return min(self.max_new_tokens, MOST_OWN_TOKENS) if self.own_tokens is None else self.own_tokens

    @property
    def temperature_of_own(self) -> float:
        """Of the texts that the draft writes."""
        if self.own_temperature is not None:
            return self.own_temperature
        return max(LEAST_OWN_TEMPERATURE, self.temperature)

    def num_epochs(self, num_sequences: int) -> int:
        """Most passes over so many sequences."""
        usual = round(USUAL_SEQUENCES / num_sequences)
        return self.epochs or min(MOST_EPOCHS, max(FEWEST_EPOCHS, usual))

    def rate(self, hidden_size: int) -> float:
        """The learning rate for a draft of this hidden size."""
        return self.learning_rate or USUAL_RATE * USUAL_WIDTH / hidden_size

    def run_config(self, **changes: Any) -> GenerateConfig:
        """The run's options alone."""
        names = [item.name for item in dataclasses.fields(GenerateConfig)]
        return GenerateConfig(**{name: getattr(self, name) for name in names} | changes)

    def training_options(self) -> dict[str, Any]:
        """The options that decide the weights, besides the data and the models."""
        names = ["layers", "learning_rate", "epochs", "patience", "batch_size", "tokens_per_pass",
                 "max_sequences", "prompt_rows", "validation_share", "precision", "seed"]  # fmt: skip
        found = {name: getattr(self, name) for name in names}
        return found | {
            "own_tokens": self.num_own_tokens,
            "own_temperature": self.temperature_of_own if self.num_own_tokens else None,
            "teacher": self.resolved_teacher,
            "loss": self.resolved_loss,
        }
