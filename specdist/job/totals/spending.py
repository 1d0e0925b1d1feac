"""What tokens cost: ``--gpu_price``, and ``--gpu_watts`` or what the GPUs' counters told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

S_PER_HOUR, W_PER_KW = 3600, 1000
MILLION = 10**6


@dataclass(frozen=True)
class GpuCosts:
    """Of one GPU: its price per hour, in any currency, and the power that it takes; ``measured_kwh``: of a
    million tokens. None where unknown."""

    price: float | None = None
    watts: float | None = None
    measured_kwh: float | None = None

    @staticmethod
    def of(options: Mapping[str, Any], figures: Mapping[str, Any] | None = None) -> GpuCosts:
        """From the options of a run or a plan, and a run's figures. Watts that were given, the node's share
        among them, come before what the GPUs measured of themselves."""
        return GpuCosts(
            options.get("gpu_price"),
            options.get("gpu_watts"),
            (figures or {}).get("measured_kwh_per_million_tokens"),
        )

    def per_million(self, tokens_per_s_per_gpu: float | None) -> dict[str, float]:
        """Price and kilowatt-hours of a million tokens, as far as they are known."""
        if not tokens_per_s_per_gpu:
            return {}
        hours = MILLION / tokens_per_s_per_gpu / S_PER_HOUR
        found = {}
        if self.price is not None:
            found["price_per_million_tokens"] = hours * self.price
        if self.watts is not None:
            found["kwh_per_million_tokens"] = hours * self.watts / W_PER_KW
        elif self.measured_kwh is not None:
            found["measured_kwh_per_million_tokens"] = self.measured_kwh
        return found

    def text(self, tokens_per_s_per_gpu: float | None) -> str:
        """The same for people; empty where nothing is known."""
        found = self.per_million(tokens_per_s_per_gpu)
        parts = [
            name.format(found[key])
            for key, name in (
                ("price_per_million_tokens", "price {:.3g}"),
                ("kwh_per_million_tokens", "{:.3g} kWh"),
                ("measured_kwh_per_million_tokens", "{:.3g} kWh of its GPUs (measured)"),
            )
            if key in found
        ]
        return f"{' and '.join(parts)} per million tokens" if parts else ""


UNKNOWN = GpuCosts()


def options_of(config_path: Path) -> Mapping[str, Any]:
    """Of the run's last start; none if ``config.yaml`` cannot be read."""
    try:
        values = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}
