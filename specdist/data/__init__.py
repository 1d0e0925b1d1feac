"""Prompts in; shards, part logs and the run folder out. Imports no torch."""

from specdist.data.claims import Claim
from specdist.data.manifest import Manifest, ShardPlan, check_same
from specdist.data.membership import Membership
from specdist.data.parts import PartLog
from specdist.data.prompts import Prompts, RowError, open_prompts
from specdist.data.rows import RowResult, output_schema, shard_table
from specdist.data.run_folder import RunFolder
from specdist.data.shard_queue import ShardQueue
from specdist.data.traces import TracedToken, trace_table

__all__ = [
    "Claim",
    "Manifest",
    "Membership",
    "PartLog",
    "Prompts",
    "RowError",
    "RowResult",
    "RunFolder",
    "ShardPlan",
    "ShardQueue",
    "TracedToken",
    "check_same",
    "open_prompts",
    "output_schema",
    "shard_table",
    "trace_table",
]
