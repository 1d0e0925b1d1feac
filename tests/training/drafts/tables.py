"""What ``tests.training.drafts.trials`` wrote, for ``python -m tests.readme``."""

from __future__ import annotations

import json

from specdist.utils.markdown import table
from tests.ranks import REPOSITORY

TRIALS = REPOSITORY / "jobs/benchmarks/distill-trials-cpu.json"
# Rows of the result, and those that options may be chosen by.
JUDGED = ("others", "validation")
HEADING = ["rows generated", "temperature, samples", "sequences", "tokens", "prompts",
           "the draft's own tokens", "their temperature", "learning rate", "loss", "steps",
           "accepted greedily", "at temperature 1", "greedily, rows for choices",
           "at temperature 1"]  # fmt: skip


def markdown() -> str:
    """A line for every trial: what it learned from, how, and the draft on other rows, after a line for the
    draft as it was."""
    found = json.loads(TRIALS.read_text())
    last = found["trials"][-1]["judged_before"]
    accepted = [cell for name in JUDGED for cell in _accepted(last[name])]
    lines = [["none", *[""] * 9, *accepted], *map(_line, found["trials"])]
    commands = [trial["command"].partition(" --trial ") for trial in found["trials"]]
    trials = ", ".join(f"`{trial}`" for _, _, trial in commands)
    return f"{table(HEADING, lines)}\n\n`{commands[0][0]} --trial` and, line by line, {trials}"


def _line(trial: dict) -> list[str]:
    options = trial["options"]
    judged, before = trial["judged"], trial["judged_before"]
    accepted = [_accepted(judged[name], before[name]) if name in judged else ["", ""] for name in JUDGED]
    return [
        f"{trial['share']:.0%}",
        f"{trial['temperature']:g}, {trial['num_samples']}",
        f"{trial['num_training_sequences']:,}",
        f"{trial['num_training_tokens']:,}",
        f"{trial['num_prompts']:,}",
        # Earlier trials had none.
        f"{trial.get('num_own_tokens', 0):,}",
        "" if options.get("own_temperature") is None else f"{options['own_temperature']:g}",
        f"{options['learning_rate']:g}",
        options["loss"],
        f"{trial['steps']:,}",
        *(cell for cells in accepted for cell in cells),
    ]


def _accepted(found: dict, before: dict | None = None) -> list[str]:
    """By temperature, with the gain."""
    cells = []
    for temperature, each in found.items():
        gain = before and f" ({each['acceptance'] - before[temperature]['acceptance']:+.3f})"
        cells.append(f"{each['acceptance']:.3f}{gain or ''}")
    return cells
