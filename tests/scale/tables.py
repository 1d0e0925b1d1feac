"""The results of ``python -m tests.scale --output`` as the table in ``jobs/benchmarks/tables``."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from specdist.utils.table import Table, decimals
from tests.ranks import REPOSITORY
from tests.scale.simulation import PHASES

METADATA, REQUESTS = "metadata_ops_per_replica_s", "requests_per_replica_s"
READERS = ("status", "load_run", "statistics", "report", "merge", "copy")
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


def readers_markdown() -> str:
    """Seconds that the readers of a run take, and what memory."""
    return Table.of(
        [
            {
                "code": entry["name"],
                "shards": f"{entry['shards']:,}",
                "unfinished, with sub-shards": f"{entry['unfinished']:,}",
                **{reader: decimals(entry["seconds"].get(reader)) for reader in READERS},
                "report, MB": decimals(entry.get("peak_mb", {}).get("report"), 0),
            }
            for entry in _results()
            if entry["kind"] == "readers"
        ],
        num_names=3,
    ).markdown()


def tried() -> str:
    """The most replicas and shards that have been real, and simulated with sub-shards."""
    counted = [entry for entry in _results() if METADATA in entry]
    real = max((entry for entry in counted if entry["kind"] == "real"), key=_num_replicas)
    # The latest of each size.
    shared = {entry["replicas"]: entry for entry in counted if "sub_shards" in entry}
    simulated = "; ".join(
        f"{entry['replicas']:,} replicas that shared {entry['shards']:,} shards of {entry['rows_per_shard']} "
        f"rows in {entry['sub_shards']:,} sub-shards"
        + (
            f", the last of which was published after {entry['published_s']} s"
            if "published_s" in entry
            else ""
        )
        for entry in sorted(shared.values(), key=_num_replicas)[-2:]
    )
    text = (
        f"Real processes on one machine: {real['replicas']:,} replicas and {real['shards']:,} shards. "
        "Simulated, with the project's own leases, recorder and publishing on a virtual clock: "
        f"{simulated}. Every shard was published once."
    )
    return textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False)


def _num_replicas(entry: dict[str, Any]) -> int:
    return int(entry["replicas"])


def _results() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text())["results"]
    return found


def _row(entry: dict[str, Any]) -> dict[str, str | int | None]:
    row: dict[str, str | int | None] = {
        "code": entry["name"],
        "replicas": f"{entry['replicas']:,}",
        "": entry["kind"] + (", with sub-shards" if "sub_shards" in entry else ""),
        "shards": f"{entry['shards']:,}",
    }
    for title, kind in (("metadata", "metadata_ops_per_replica_s"), ("reads", "reads_per_replica_s")):
        # There is no middle where a replica waits within the first minute.
        row |= {f"{title}: {phase}": decimals(entry[kind][phase] or None) for phase in PHASES}
    return row
