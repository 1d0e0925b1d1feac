"""The options of ``jobs/distill.py``. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from specdist.config.arguments import option, parse_arguments
from specdist.config.generate import GenerateConfig
from specdist.config.groups import MTP
from specdist.config.speculation import NGRAM
from specdist.utils.errors import UserError
from specdist.utils.rules import SEED, Refusals, check_options

Teacher = Literal["target", "recorded", "tokens"]
USUAL_PROMPTS, USUAL_SEQUENCES = 2000, 8000


@dataclass(kw_only=True)
class DistillConfig:
    """Every option of ``jobs/distill.py``. Raises :class:`UserError` for a value out of its range."""

    _url_options: ClassVar[tuple[str, ...]] = ("prompts",)

    # What goes in and out
    run: str = option(
        help="folder of a run of jobs/generate.py, finished or not, whose complete shards are learned from; "
        "may stand first without --run"
    )
    new_draft: str = option(help="folder for the new draft, for --draft of the run")
    target: str | None = option(None, help="where the run's target is now (default: where it was)")
    prompts: str | None = option(None, help="where the run's prompts are now (default: where they were)")
    draft: str | None = option(None, help="model to start from (default: the run's draft)")
    device: Literal["auto", "cpu", "cuda"] = option("auto", help="auto = cuda if available")

    # What is learned
    teacher: Literal["auto", "target", "recorded", "tokens"] = option(
        "auto",
        help="what the draft learns from: target = the distributions of the target, which is loaded whole "
        "on every rank; recorded = the top log-probabilities of a run with --logprobs; tokens = the "
        "tokens alone; auto = recorded if there are any, else target",
    )
    prompt_rows: int | None = option(
        None, at_least=0,
        help="with the target as the teacher, learn too what it says at every place of so many rows' "
        "prompts, and of what the draft itself writes after them, anew in every epoch (default: "
        f"{USUAL_PROMPTS:,}, and 0 with another teacher)",
    )  # fmt: skip
    max_sequences: int = option(20_000, at_least=1, help="most completions to use, spread over the run")
    validation_share: float = option(0.1, above=0, below=1, help="share of the rows kept for evaluations")

    # The training
    learning_rate: float | None = option(
        None, above=0, help="largest learning rate of AdamW (default: 5e-5 x 2048 / hidden size of the draft)"
    )
    epochs: int | None = option(
        None, at_least=1,
        help=f"most passes over the sequences (default: as many as see about {USUAL_SEQUENCES:,} of them, "
        "2 to 20)",
    )  # fmt: skip
    patience: int = option(
        6, at_least=1, help="training stops after so many evaluations, of about 20, without more acceptance"
    )
    batch_size: int = option(8, at_least=1, help="sequences of a rank's forward pass")
    gradient_accumulation_steps: int = option(1, at_least=1, help="forward passes of a rank in each step")
    seed: int = option(0, rule=SEED, help="seed of the order, the held-out rows and the draft's own texts")

    _refusals: ClassVar[Refusals] = (
        ("new_draft", lambda o: o.new_draft in (o.draft, o.target, o.run),
         "is a folder that is read: give another one"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)

    def run_options(self) -> GenerateConfig:
        """The options of the run, with the draft to start from. Raises :class:`UserError` if there is no run,
        or no draft that can be trained."""
        path = Path(self.run) / "config.yaml"
        if not path.is_file():
            raise UserError(f"--run {self.run} holds no run: generate one with jobs/generate.py")
        found = parse_arguments(GenerateConfig, [f"--config={path}", f"--output={self.run}"])
        given = {name: getattr(self, name) for name in ("target", "prompts", "draft")}
        found = dataclasses.replace(found, **{name: value for name, value in given.items() if value})
        if found.draft in (None, NGRAM, MTP):
            raise UserError(
                f"--draft {found.draft or 'none'} cannot be trained: name the folder of a draft model"
            )
        return found

    def teacher_of(self, run: GenerateConfig) -> Teacher:
        """The teacher for this run. Raises :class:`UserError` if it does not know what is asked for."""
        if self.teacher == "recorded" and not run.logprobs:
            raise UserError(
                "--teacher recorded needs a run with the target's log-probabilities: generate with "
                "--logprobs 20, or use --teacher target"
            )
        teacher = self.teacher if self.teacher != "auto" else "recorded" if run.logprobs else "target"
        if self.prompt_rows and teacher != "target":
            raise UserError(
                f"--prompt_rows {self.prompt_rows} needs --teacher target, which knows what comes after "
                "every token of a prompt: add it, or leave this out"
            )
        return teacher
