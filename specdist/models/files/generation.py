"""The sampling settings of a model's generation_config.json: a run's defaults, if it asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdist.models.files.checkpoint import GENERATION_CONFIG_NAME, Checkpoint
from specdist.models.files.damage import reading
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object

# Options of the same names, with the value that changes nothing.
OPTIONS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "suppress_tokens": None,
}
# Options under the file's names, with the types of their values, or of a list and of what is in it.
TYPES: dict[str, tuple[str, type, type]] = {
    "temperature": ("temperature", float, int),
    "top_k": ("top_k", int, int),
    "top_p": ("top_p", float, int),
    "min_p": ("min_p", float, int),
    "repetition_penalty": ("repetition_penalty", float, int),
    "min_new_tokens": ("min_new_tokens", int, int),
    "max_new_tokens": ("max_new_tokens", int, int),
    "num_return_sequences": ("num_samples", int, int),
    "stop_strings": ("stop", list, str),
    "suppress_tokens": ("suppress_tokens", list, int),
    "do_sample": ("do_sample", bool, bool),
}
# Where an option does the same of other values.
SIMILAR = {
    "bad_words_ids": "give the words with --bad_words",
    "sequence_bias": "give biases of single tokens with --logit_bias",
}
# What transformers would do in addition, by the value that, like None, changes nothing.
OTHERS: dict[int | None, str] = {
    0: "epsilon_cutoff eta_cutoff no_repeat_ngram_size penalty_alpha min_length",
    1: "typical_p encoder_repetition_penalty guidance_scale num_beams",
    None: "top_h bad_words_ids begin_suppress_tokens sequence_bias forced_bos_token_id forced_eos_token_id "
    "exponential_decay_length_penalty",
}


def default_options(checkpoint: Checkpoint) -> dict[str, Any]:
    """The file's settings by the names of options, those of ``TYPES`` that it has. With
    ``do_sample`` false the temperature is 0.

    The end tokens are those of the file in any case. Raises :class:`UserError` if there is no such file, or a
    value of another type in it.
    """
    what = f"--generation_config model: {checkpoint.option} {checkpoint.name}"
    values = _file_values(checkpoint)
    if values is None:
        raise UserError(f"{what} has no {GENERATION_CONFIG_NAME}: leave the option out")
    found: dict[str, Any] = {}
    for name, (option, kind, other) in TYPES.items():
        value = values.get(name)
        if name == "stop_strings" and isinstance(value, str):
            value = [value]
        if value is None:
            continue
        is_right = type(value) in (kind, other)
        if kind is list:
            is_right = isinstance(value, list) and {*map(type, value)} <= {other}
        if not is_right:
            raise UserError(f"{what}: {name} is {value!r} in its {GENERATION_CONFIG_NAME}: correct the file")
        found[option] = value
    if found.pop("do_sample", True) is False:
        found["temperature"] = 0.0
    return found


def unused_settings(checkpoint: Checkpoint, used: Mapping[str, Any] | None) -> str | None:
    """A sentence on the settings of the model's file that this run does not use; None if there are none.

    Args:
        used: the run's options of ``OPTIONS``; None if the file's are its defaults.
    """
    values = _file_values(checkpoint)
    if values is None:
        return None
    wanted = {
        name: values[name]
        for name, neutral in OPTIONS.items()
        if used is not None
        and values.get(name) not in (None, [])
        and values[name] not in (neutral, used.get(name))
    }
    foreign = {
        name: values[name]
        for neutral, names in OTHERS.items()
        for name in names.split()
        if values.get(name) not in (None, neutral)
    }
    found = []
    if wanted:
        options = " ".join(f"--{name} {_typed(value)}" for name, value in wanted.items())
        found.append(
            f"does not use {_listed(wanted)}: to use them, pass {options}, or --generation_config model"
        )
    if foreign:
        similar = "; ".join(SIMILAR[name] for name in foreign if name in SIMILAR)
        found.append(
            f"cannot use {_listed(foreign)}, which specdist does not support" + (similar and f" ({similar})")
        )
    if not found:
        return None
    what = f"{checkpoint.option} {checkpoint.name} has a {GENERATION_CONFIG_NAME}"
    return f"{what}: this run {', and '.join(found)}"


def _file_values(checkpoint: Checkpoint) -> dict[str, Any] | None:
    path = checkpoint.folder / GENERATION_CONFIG_NAME
    if not path.is_file():
        return None
    with reading(f"{checkpoint.option} {checkpoint.name}: {path.name}"):
        return parse_object(path.read_bytes())


def _typed(value: object) -> str:
    """The value as on a command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _listed(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
