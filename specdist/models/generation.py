"""The sampling settings of a model's own generation_config.json, which a job does not take by itself."""

from __future__ import annotations

from collections.abc import Mapping

from specdist.models.checkpoint import GENERATION_CONFIG_NAME, Checkpoint
from specdist.models.damage import reading
from specdist.utils.json_values import parse_object

# Options of the same names, with the value that changes nothing.
OPTIONS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
# What transformers would do beside, with the values that change nothing.
OTHERS: dict[str, tuple[float | None, ...]] = {
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "repetition_penalty": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "min_new_tokens": (None, 0),
}


def unused_settings(checkpoint: Checkpoint, used: Mapping[str, float]) -> str | None:
    """A sentence on the settings of the model's file that this run does not use; None if there are none.

    Args:
        used: the run's ``temperature``, ``top_k`` and ``top_p``.
    """
    path = checkpoint.folder / GENERATION_CONFIG_NAME
    if not path.is_file():
        return None
    with reading(f"{checkpoint.option} {checkpoint.name}: {path.name}"):
        values = parse_object(path.read_bytes())
    wanted = {
        name: values[name]
        for name, neutral in OPTIONS.items()
        if values.get(name) is not None and values[name] != neutral and values[name] != used[name]
    }
    foreign = {name: values[name] for name, neutral in OTHERS.items() if values.get(name) not in neutral}
    found = []
    if wanted:
        options = " ".join(f"--{name} {value}" for name, value in wanted.items())
        found.append(f"{_listed(wanted)}: to use them, pass {options}")
    if foreign:
        found.append(f"{_listed(foreign)}, which specdist does not have")
    if not found:
        return None
    return (
        f"{checkpoint.option} {checkpoint.name}: its {path.name} is read for its end tokens alone; this run "
        f"does not use {'; nor '.join(found)}"
    )


def _listed(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
