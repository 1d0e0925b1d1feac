"""What a million tokens cost, by ``--gpu_price``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

S_PER_HOUR = 3600
MILLION = 10**6


def price_per_million(gpu_price: float | None, tokens_per_s_per_gpu: float | None) -> float | None:
    """The price of a million tokens, in the currency of ``gpu_price``, which is that of a GPU for an hour;
    None where one of the two is unknown."""
    if gpu_price is None or not tokens_per_s_per_gpu:
        return None
    return MILLION / tokens_per_s_per_gpu / S_PER_HOUR * gpu_price


def price_text(gpu_price: float | None, tokens_per_s_per_gpu: float | None) -> str:
    """The same for people; empty where it is unknown."""
    price = price_per_million(gpu_price, tokens_per_s_per_gpu)
    return "" if price is None else f"price {price:.3g} per million tokens"


def gpu_price_of(config_path: Path) -> float | None:
    """The ``--gpu_price`` of the run's last start; None without one."""
    return options_of(config_path).get("gpu_price")


def options_of(config_path: Path) -> Mapping[str, Any]:
    """Options of the run's last start; none if ``config.yaml`` cannot be read."""
    try:
        values = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}
