"""What ``tests.distillation.trials`` and ``.measured`` wrote, for ``python -m tests.readme``."""

from __future__ import annotations

import json

from specdist.utils.markdown import table
from tests.ranks import REPOSITORY

TRIALS = REPOSITORY / "jobs/benchmarks/distill-trials-cpu.json"
EAGLE = REPOSITORY / "jobs/benchmarks/eagle-small-pair-cpu.json"
HEADING = ["rows generated", "temperature, samples", "sequences", "tokens", "prompts",
           "the draft's own tokens", "learning rate", "loss", "steps", "accepted greedily",
           "at temperature 1"]  # fmt: skip


def markdown() -> str:
    """A line for every trial: what it learned from, how, and the draft on other rows, after a line for the
    draft as it was."""
    found = json.loads(TRIALS.read_text())
    before = ["none", *[""] * 8, *_accepted(found["before"], found["before"])]
    lines = [before, *(_line(trial, found["before"]) for trial in found["trials"])]
    commands = [trial["command"].partition(" --trial ") for trial in found["trials"]]
    trials = ", ".join(f"`{trial}`" for _, _, trial in commands)
    return f"{table(HEADING, lines)}\n\n`{commands[0][0]} --trial` and, line by line, {trials}"


def _line(trial: dict, before: dict) -> list[str]:
    options = trial["options"]
    return [
        f"{trial['share']:.0%}",
        f"{trial['temperature']:g}, {trial['num_samples']}",
        f"{trial['num_training_sequences']:,}",
        f"{trial['num_training_tokens']:,}",
        f"{trial['num_prompts']:,}",
        # Earlier trials had none.
        f"{trial.get('num_own_tokens', 0):,}",
        f"{options['learning_rate']:g}",
        options["loss"],
        f"{trial['steps']:,}",
        *_accepted(trial["others"], before),
    ]


def _accepted(found: dict, before: dict) -> list[str]:
    shares = {name: each["acceptance"] for name, each in found.items()}
    gains = {name: f" ({share - before[name]['acceptance']:+.3f})" for name, share in shares.items()}
    return [f"{share:.3f}{gains[name] if found is not before else ''}" for name, share in shares.items()]


def drafts() -> str:
    """Tokens per target pass of each draft, and how often a token in each place of a block is accepted, with
    all before it."""
    found = json.loads(EAGLE.read_text())
    lines = [
        [
            run["prompts"],
            f"{run['temperature']:g}",
            f"`{run['draft']}`",
            f"{run['tokens_per_pass']:.2f}",
            " ".join(f"{share:.2f}" for share in run["acceptance_per_pos"]),
        ]
        for run in found["runs"]
    ]
    heading = ["prompts", "temperature", "draft", "tokens per target pass", "accepted by place"]
    return f"{table(heading, lines)}\n\n`{found['command']}`"
