"""The options of a run's last start: those that were chosen, and what a million tokens cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from specdist.config.generate import GenerateConfig
from specdist.policies.registry import resolve_policy_options

NOT_COMPARED = ("output", "overwrite")
S_PER_HOUR = 3600
MILLION = 10**6


def price_per_million(gpu_price: float | None, tokens_per_s_per_gpu: float | None) -> float | None:
    """The price of a million tokens, in the currency of ``gpu_price``, which is that of a GPU for an hour;
    None where one of the two is unknown."""
    if gpu_price is None or not tokens_per_s_per_gpu:
        return None
    return MILLION / tokens_per_s_per_gpu / S_PER_HOUR * gpu_price


def price_text(options: Mapping[str, Any], tokens_per_s_per_gpu: float | None) -> str:
    """The same for people, by the run's options; empty where it is unknown."""
    price = price_per_million(options.get("gpu_price"), tokens_per_s_per_gpu)
    return "" if price is None else f"price {price:.3g} per million tokens"


def options_of(config_path: Path) -> Mapping[str, Any]:
    """Options of the run's last start; none if ``config.yaml`` cannot be read."""
    try:
        values = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def chosen_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of resolved options that are not what they would be by default, with this draft and policy."""
    default = vars(GenerateConfig(prompts=[""], target="", output="-", draft=options.get("draft")))
    default = default | resolve_policy_options(options.get("policy", "none"), {})
    return {
        name: value
        for name, value in options.items()
        if name not in NOT_COMPARED and value not in (None, [], default.get(name))
    }
