"""Names of the files and folders of a run, by which it is recognised."""

from __future__ import annotations

import re
from pathlib import Path

SHARD_FOLDERS = ("shards", "stats", "parts")
SHARD_FILE = re.compile(
    r"shard-(\d{5,})(?:\.arrow|\.trace\.arrow|\.json|(?:(?:\.subshard-(\d{5,}))?\.(\d{5,}))?\.jsonl)"
    r"(?:(?:\.[\w-]+)?\.tmp)?"
)
# Completion records and statistics have the same names, in different folders.
RECORD_FILE = re.compile(r"shard-(\d{5,})\.json")
RUN_TAG = "run_tag"
# Begins the names of objects with which a replica tries out a store; one that is killed leaves its own.
PROBE = "specdist-probe"
# The folder of leases and heartbeats, if it is not in the run's own (``--leases``); and in it, by the run's
# tag, which data was chosen for each shard.
LEASES, LEASES_FOLDER, DECISIONS = "leases", "leases", "chosen"
# Globs of all shards' data and traces, relative to the run's folder.
DATA_PATTERN, TRACE_PATTERN = "shards/shard-*.arrow", "stats/shard-*.trace.arrow"


def leases_in(output: Path) -> Path:
    """The folder of leases and heartbeats in an output's own."""
    return output / LEASES_FOLDER
