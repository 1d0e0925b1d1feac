"""Where a draft is worth it: tokens per second per GPU used, beside plain decoding.

On the target's rank 0 a draft takes memory. With a GPU of its own and ``--overlap auto`` a replica is as fast
as one without a draft, or faster, but takes one GPU more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specdist.lab.plan.advise import WORTHWHILE, Planner, Work
from specdist.lab.plan.filling import Site
from specdist.lab.plan.model.hardware import GPUS, Gpu
from specdist.lab.plan.model.simulate import OWN_GPU
from specdist.models.files.sizes import ModelSize
from specdist.utils.table import Table

BATCH_SIZES = (1, 8, 32, 64, 128, 256)
Placement = Literal["shared", "own"]
NAMES: dict[Placement, str] = {"shared": "on rank 0", "own": "its own GPU"}


@dataclass(frozen=True)
class Worth:
    """``ratios``: by batch size, tokens per second per GPU with a draft that is placed so over those without;
    None where either does not fit."""

    gpu: str
    placement: Placement
    ratios: dict[int, float | None]

    @property
    def most_rows(self) -> int:
        """The largest batch at which it is worth it; 0 if there is none."""
        worth = [size for size, ratio in self.ratios.items() if ratio is not None and ratio >= WORTHWHILE]
        return max(worth, default=0)


def worth_per_gpu(
    target: ModelSize, draft: ModelSize, site: Site, work: Work, *, compares: bool = False
) -> list[Worth]:
    """For the site's GPU; ``compares``: then for the table's others that have the type of the numbers."""
    found = []
    for gpu in _gpus(site.gpu) if compares else [site.gpu]:
        planner = Planner(target, draft, dataclasses.replace(site, gpu=gpu), work)
        for placement in NAMES:
            ratios = {size: _ratio(planner, placement, size) for size in BATCH_SIZES}
            found.append(Worth(gpu.name, placement, ratios))
    return found


def _gpus(first: Gpu) -> Iterator[Gpu]:
    yield first
    for gpu in GPUS.values():
        if gpu.name != first.name and gpu.has_bfloat16 >= first.has_bfloat16:
            yield gpu


def _ratio(planner: Planner, placement: Placement, num_rows: int) -> float | None:
    plain = planner.most_per_gpu("target only", num_rows)
    if placement == "shared":
        drafting = [planner.most_per_gpu("colocated", num_rows)]
    else:
        # A draft that does not pay is not asked, but its GPU is there.
        idle = planner.most_per_gpu("target only", num_rows, num_idle=1)
        drafting = [idle, *(planner.most_per_gpu(mode, num_rows) for mode in OWN_GPU)]
    most = max((found for found in drafting if found is not None), default=None)
    return None if plain is None or most is None else most / plain


def worth_table(found: list[Worth]) -> str:
    """One line per GPU and placement."""
    rows = [
        {
            "GPU": item.gpu,
            "draft": NAMES[item.placement],
            **{
                f"batch {size}": None if ratio is None else f"{ratio:.2f}"
                for size, ratio in item.ratios.items()
            },
            "worth it": f"up to {item.most_rows}" if item.most_rows else "no",
        }
        for item in found
    ]
    return (
        "Tokens/s per GPU used, with a draft over plain decoding without one, by batch size:\n"
        f"{Table.of(rows, num_names=2).console()}"
    )
