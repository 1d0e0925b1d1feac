"""The results of ``python -m tests.scale --output`` as the table in ``jobs/benchmarks/README.md``."""

from __future__ import annotations

import json
from typing import Any

from specdist.utils.table import Table, decimals
from tests.ranks import REPOSITORY
from tests.scale.simulation import PHASES

RESULTS = REPOSITORY / "jobs/benchmarks/scale.json"


def markdown() -> str:
    """All results, in the order of their measurement."""
    return Table.of(
        [_row(entry) for entry in json.loads(RESULTS.read_text())["results"]], num_names=4
    ).markdown()


def _row(entry: dict[str, Any]) -> dict[str, str | int | None]:
    row: dict[str, str | int | None] = {
        "code": entry["name"],
        "replicas": f"{entry['replicas']:,}",
        "": entry["kind"],
        "shards": f"{entry['shards']:,}",
    }
    for title, kind in (("metadata", "metadata_ops_per_replica_s"), ("reads", "reads_per_replica_s")):
        row |= {f"{title}: {phase}": decimals(entry[kind][phase]) for phase in PHASES}
    return row
