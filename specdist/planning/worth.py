"""Where a GPU for the draft is worth it: tokens per second per GPU used, beside plain decoding.

With ``--overlap auto`` a replica with a GPU for the draft is as fast as one without it, or faster, but
takes one GPU more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from specdist.models.sizes import ModelSize
from specdist.planning.advise import OWN_GPU, WORTHWHILE, Planner, Site, Work
from specdist.planning.hardware import GPUS, Gpu
from specdist.utils.table import Table

BATCH_SIZES = (1, 8, 32, 64, 128, 256)


@dataclass(frozen=True)
class Worth:
    """``ratios``: by batch size, tokens per second per GPU with a GPU for the draft over those without; None
    where either does not fit."""

    gpu: str
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
    return [
        Worth(gpu.name, {size: _ratio(Planner(target, draft, dataclasses.replace(site, gpu=gpu), work), size)
                         for size in BATCH_SIZES})
        for gpu in (_gpus(site.gpu) if compares else [site.gpu])
    ]  # fmt: skip


def _gpus(first: Gpu) -> Iterator[Gpu]:
    yield first
    for gpu in GPUS.values():
        if gpu.name != first.name and gpu.has_bfloat16 >= first.has_bfloat16:
            yield gpu


def _ratio(planner: Planner, num_rows: int) -> float | None:
    plain = planner.most_per_gpu("target only", num_rows)
    # A draft that does not pay is not asked, but its GPU is there.
    idle = planner.most_per_gpu("target only", num_rows, num_idle=1)
    drafting = [planner.most_per_gpu(mode, num_rows) for mode in OWN_GPU]
    most = max((found for found in (idle, *drafting) if found is not None), default=None)
    return None if plain is None or most is None else most / plain


def worth_table(found: list[Worth]) -> str:
    """One line per GPU."""
    rows = [
        {
            "GPU": item.gpu,
            **{
                f"batch {size}": None if ratio is None else f"{ratio:.2f}"
                for size, ratio in item.ratios.items()
            },
            "worth it": f"up to {item.most_rows}" if item.most_rows else "no",
        }
        for item in found
    ]
    return (
        "Tokens/s per GPU used, with a GPU for the draft over plain decoding without it, by batch size:\n"
        f"{Table.of(rows, num_names=1).console()}"
    )
