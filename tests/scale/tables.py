"""The results of ``python -m tests.scale --output`` as the table in ``jobs/benchmarks/README.md``."""

from __future__ import annotations

import json
from typing import Any

from specdist.utils.table import Table, decimals
from tests.ranks import REPOSITORY
from tests.scale.simulation import PHASES

METADATA, REQUESTS = "metadata_ops_per_replica_s", "requests_per_replica_s"
RESULTS = REPOSITORY / "jobs/benchmarks/scale.json"


def markdown() -> str:
    """All results on a file system, in the order of their measurement."""
    return Table.of([_row(entry) for entry in _results() if METADATA in entry], num_names=4).markdown()


def requests_markdown() -> str:
    """The results on an object store."""
    return Table.of(
        [
            {
                "replicas": f"{entry['replicas']:,}",
                "shards": f"{entry['shards']:,}",
                **{f"requests: {phase}": decimals(entry[REQUESTS][phase]) for phase in PHASES},
            }
            for entry in _results()
            if REQUESTS in entry
        ],
        num_names=2,
    ).markdown()


def _results() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text())["results"]
    return found


def _row(entry: dict[str, Any]) -> dict[str, str | int | None]:
    row: dict[str, str | int | None] = {
        "code": entry["name"],
        "replicas": f"{entry['replicas']:,}",
        "": entry["kind"] + (", with splits" if "splits" in entry else ""),
        "shards": f"{entry['shards']:,}",
    }
    for title, kind in (("metadata", "metadata_ops_per_replica_s"), ("reads", "reads_per_replica_s")):
        row |= {f"{title}: {phase}": decimals(entry[kind][phase]) for phase in PHASES}
    return row
