"""Prompts in; shards, part logs and the run folder out. Imports no torch."""

from specdist.data.lock import FolderLock
from specdist.data.manifest import Manifest, ShardPlan, check_same
from specdist.data.parts import PartLog
from specdist.data.prompts import Prompts, RowError, open_prompts
from specdist.data.rows import RowResult, output_schema, shard_table
from specdist.data.run_folder import RunFolder
from specdist.data.traces import TracedToken, trace_table

__all__ = [
    "FolderLock",
    "Manifest",
    "PartLog",
    "Prompts",
    "RowError",
    "RowResult",
    "RunFolder",
    "ShardPlan",
    "TracedToken",
    "check_same",
    "open_prompts",
    "output_schema",
    "shard_table",
    "trace_table",
]
