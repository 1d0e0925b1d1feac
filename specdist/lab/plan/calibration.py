"""What was measured on a GPU, in place of the planner's published and assumed figures: ``calibration.json``.

``python -m tests.gpu.first_day`` writes it, ``jobs/plan.py`` and ``python -m tests.lab.emulation``
read it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_fields

Filters = Literal["none", "top_k", "top_p", "top_k and top_p"]
HALVES = ("bfloat16", "float16")
# What is measured, and how.
FORMAT = 2
AGAIN = "measure that GPU again (python -m tests.gpu.first_day), or leave --calibration out"


@dataclass(frozen=True, kw_only=True)
class MeasuredSum:
    """Seconds of a sum of ``num_bytes`` over ``num_ranks`` GPUs of a node, as layers make it, in a graph."""

    num_ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class MeasuredSampling:
    """Seconds from the logits of ``num_rows`` tokens to distributions with these filters, and of a draw from
    each."""

    filters: Filters
    num_rows: int
    vocab_size: int
    process_s: float
    draw_s: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured of one GPU and, where there were several, of its links.

    Attributes:
        gpu_name: as the driver calls it. ``memory_bytes``: all of it.
        date: of the measurement, ISO 8601. ``versions``: of torch, CUDA, the driver, and so on.
        is_fake: nothing was measured; such a file is refused. ``format``: of an earlier one, too.
        read_bytes_per_s: of products of a layer's matrix with one token, which read it from memory;
            ``float8_bytes_per_s``: of those of rounded inputs.
        flops_per_s: of products with some hundred tokens, by the name of the numbers' type; float8 may lack.
        launch_s: of a kernel or copy that is launched by itself. ``graph_s``: of launching a graph;
            ``graph_node_s``: of one more small kernel in it.
        wait_s: the host waits for the device, and the device for what the host launches next.
        graph_node_bytes: memory of one more kernel in a graph; None if it was not measured.
        all_reduce: none on a single GPU.
        sampling: by filters, and by numbers of rows.
    """

    gpu_name: str
    memory_bytes: int
    date: str
    versions: dict[str, str]
    is_fake: bool
    format: int
    read_bytes_per_s: float
    flops_per_s: dict[str, float]
    launch_s: float
    graph_s: float
    graph_node_s: float
    wait_s: float
    graph_node_bytes: float | None = None
    float8_bytes_per_s: float | None = None
    all_reduce: tuple[MeasuredSum, ...] = ()
    sampling: tuple[MeasuredSampling, ...] = ()

    @staticmethod
    def read(path: Path) -> Calibration:
        """What :meth:`write` has written. Raises :class:`UserError` that names the file, and the field."""
        try:
            found = parse_fields(Calibration, path.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"--calibration {path} cannot be read: {error}: {AGAIN}") from error
        if found.format != FORMAT:
            raise UserError(
                f"--calibration {path} has format {found.format}, and this version reads {FORMAT}, with "
                f"products that are joined and of FP8: {AGAIN}"
            )
        if found.is_fake:
            raise UserError(
                f"--calibration {path}: is_fake is true: these times are of no GPU, only of the program "
                f"that measures; {AGAIN}"
            )
        for name, value in found._positives():
            if not (math.isfinite(value) and value > 0):
                raise UserError(
                    f"--calibration {path}: {name} is {value}, but must be a number above 0: {AGAIN}"
                )
        missing = ["float32"] if "float32" not in found.flops_per_s else []
        missing += [] if found.half_flops_per_s else [" or ".join(HALVES)]
        if missing:
            raise UserError(f"--calibration {path}: flops_per_s has no {' and no '.join(missing)}: {AGAIN}")
        for name, sizes in found._series().items():
            if len(sizes) == 1:
                raise UserError(
                    f"--calibration {path}: {name} was measured at one size, {sizes.pop()}, but lines "
                    f"between sizes need two: {AGAIN}"
                )
        return found

    def write(self, path: Path) -> None:
        """Write as JSON, atomically."""
        # Not needed to show the options' help.
        from specdist.data.store.files import write_json

        write_json(path, dataclasses.asdict(self))

    @property
    def half_flops_per_s(self) -> float | None:
        """Operations per second on numbers of 16 bits."""
        return next((self.flops_per_s[name] for name in HALVES if name in self.flops_per_s), None)

    def _series(self) -> dict[str, set[int]]:
        """What lines are drawn through, and the sizes of each."""
        series: dict[str, set[int]] = {}
        for sum_ in self.all_reduce:
            series.setdefault(f"all_reduce over {sum_.num_ranks} GPUs", set()).add(sum_.num_bytes)
        for one in self.sampling:
            series.setdefault(f"sampling with filters {one.filters}", set()).add(one.num_rows)
        return series

    def _positives(self) -> list[tuple[str, float]]:
        """Every number of the file by its name."""
        names = ("memory_bytes", "read_bytes_per_s", "launch_s", "graph_s", "graph_node_s", "wait_s")
        found = [(name, float(getattr(self, name))) for name in names]
        found += [(f"flops_per_s.{name}", value) for name, value in self.flops_per_s.items()]
        for name in ("graph_node_bytes", "float8_bytes_per_s"):
            if (value := getattr(self, name)) is not None:
                found.append((name, value))
        for name in ("all_reduce", "sampling"):
            for index, one in enumerate(getattr(self, name)):
                numbers = {key: value for key, value in vars(one).items() if not isinstance(value, str)}
                found += [(f"{name}.{index}.{key}", float(value)) for key, value in numbers.items()]
        return found
