"""A job's configuration in force, as its folder keeps it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import yaml

from specdist.config.arguments import groups_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def resolved_yaml(config: DataclassInstance) -> str:
    """The configuration in force, as the run folder's ``config.yaml``: feeding it back continues the run."""
    values = dataclasses.asdict(config) | {"overwrite": False}
    names = [item.name for group in groups_of(type(config)) for item in dataclasses.fields(group)]
    return yaml.safe_dump({name: values[name] for name in names}, sort_keys=False)
