"""The collecting job: from prompts to training examples of a head.

First the target's responses are generated, by an ordinary run in a folder of its own, which keeps all
finished rows. Then each shard of responses becomes a shard of examples: a crash costs at most the work on one
shard, which is a few passes over its texts.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import tqdm

from specdist.config.arguments import resolved_yaml
from specdist.data.leases.membership import Membership
from specdist.data.run.manifest import Manifest, ShardPlan
from specdist.data.run.reading import open_shard
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.regression import NS_PER_S
from specdist.job.generate import generate_rows
from specdist.job.models.model_plan import ModelPlan, check_goes_back, plan_models
from specdist.job.ranks.activity import Activity
from specdist.job.ranks.entry import log_to_file, on_rank0, rank0_first, run_rank
from specdist.job.ranks.signals import EXIT_STOPPED, StopRequest
from specdist.job.ranks.topology import Topology, broadcast_from_rank0
from specdist.job.replica.plan import ReplicaPlan
from specdist.job.replica.replica import Replica, build_replica
from specdist.job.rows.row_requests import prompt_encoder
from specdist.job.run.manifest import run_manifest
from specdist.job.run.opening import open_run_prompts
from specdist.job.run.preflight import RunPlan, open_joined, plan_run
from specdist.models.heads.examples import PREFIX_KINDS, bytes_per_example, example_table
from specdist.models.heads.head import identify_draft
from specdist.training.collect.config import CollectConfig
from specdist.training.collect.draft_side import DraftSide
from specdist.training.collect.ranks import Conductor, follow_conductor
from specdist.training.collect.texts import Text, response_text
from specdist.training.collect.writers import TextWriter
from specdist.utils.documents import print_document
from specdist.utils.errors import UserError

GB = 10**9

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CollectPlan:
    """What only rank 0 knows: the folder of the examples, and the run of the responses in it."""

    folder: RunFolder
    membership: Membership
    responses: RunPlan

    @property
    def shards(self) -> ShardPlan:
        return self.responses.shards

    @property
    def pending_shards(self) -> list[int]:
        """The shards without a completion record."""
        return self.folder.unrecorded_shards(self.shards.num_shards)

    def release(self) -> None:
        self.responses.membership.leave()
        self.membership.leave()


def plan_collection(config: CollectConfig, models: ModelPlan, topology: Topology) -> CollectPlan:
    """Open the prompts and both folders, new or resumed. Raises :class:`UserError`."""
    assert models.draft is not None
    run_config = config.run_config()
    prompts = open_run_prompts(run_config)
    prompts.check_no_batch("collecting")
    run = run_manifest(run_config, models, prompts, topology)
    manifest = Manifest(
        fingerprint={**run.fingerprint, **config.fingerprint()},
        info={**run.info, "draft_identity": dataclasses.asdict(identify_draft(models.draft))},
    )
    membership = Membership(Path(config.output), silent_after_s=run_config.lease_timeout)
    folder = open_joined(
        membership, manifest, resolved_yaml(config), overwrite=config.overwrite, is_shared=False
    )
    try:
        responses = plan_run(run_config, models, topology)
    except UserError:
        membership.leave()
        raise
    plan = CollectPlan(folder=folder, membership=membership, responses=responses)
    _say_sizes(config, models, plan)
    return plan


def _say_sizes(config: CollectConfig, models: ModelPlan, plan: CollectPlan) -> None:
    """Log the maximum size of the examples."""
    num_bytes = bytes_per_example(draft_hidden_size(models), config.hidden_dtype)
    num_rows = sum(end - first for first, end in map(plan.shards.bounds, plan.pending_shards))
    share = len(PREFIX_KINDS) if config.token_mixing is None else 1 - config.token_mixing
    most_gb = num_rows * config.max_new_tokens * share * num_bytes / GB
    logger.info("an example takes %d bytes: all of %d rows at most %.2f GB", num_bytes, num_rows, most_gb)


def draft_hidden_size(models: ModelPlan) -> int:
    """The hidden size of the draft."""
    assert models.draft is not None
    return int(models.draft.config.get_text_config().hidden_size)


def run_collection(config: CollectConfig) -> int:
    """Run one rank of the job; returns its exit code. Rank 0's last line on stdout is a JSON document."""
    return run_rank(config, config.run_config(), _run)


def _run(config: CollectConfig, topology: Topology, stop: StopRequest, activity: Activity) -> int:
    models = rank0_first(topology, lambda: plan_models(config.run_config()))
    if config.kind == "acceptance":
        check_goes_back(models.draft, "--kind acceptance runs other tokens at the places of a text's own")
    plan = on_rank0(topology, lambda: plan_collection(config, models, topology))
    try:
        log_to_file(Path(config.output), topology, None if plan is None else plan.membership, activity)
        if broadcast_from_rank0(topology, plan is not None and bool(plan.pending_shards)):
            _collect(config, topology, models, plan, stop, activity)
        elif plan is not None:
            logger.info("%s is complete: nothing to do", config.output)
        if plan is not None:
            _print_totals(config, plan)
    finally:
        if plan is not None:
            plan.release()
    is_complete = broadcast_from_rank0(topology, plan is None or not plan.pending_shards)
    return 0 if is_complete else EXIT_STOPPED


def _collect(
    config: CollectConfig,
    topology: Topology,
    models: ModelPlan,
    plan: CollectPlan | None,
    stop: StopRequest,
    activity: Activity,
) -> None:
    """``plan`` is None on all ranks except rank 0."""
    of_run = config.run_config()
    replica_plan = ReplicaPlan(config=of_run, models=models, topology=topology, may_give_back=False)
    replica = build_replica(replica_plan, activity=activity)
    activity.begin("collecting", has_progress=True)
    draft = DraftSide(config, models, replica) if topology.holds_draft else None
    if plan is None:
        follow_conductor(replica, topology, draft, stop)
        return
    conductor = Conductor(replica, topology, draft)
    if plan.responses.pending_shards:
        conductor.begin_run()
        generate_rows(of_run, models, plan.responses, replica, topology, stop)
    stop.defer_signals()
    collection = Collection(config, models, plan, replica, conductor)
    for shard in tqdm.tqdm(plan.pending_shards, "shards of examples", disable=None):
        if stop.is_made:
            break
        collection.collect(shard)
    conductor.end()


@dataclass(frozen=True)
class Collection:
    """Turns finished shards of responses into shards of examples, on rank 0."""

    config: CollectConfig
    models: ModelPlan
    plan: CollectPlan
    replica: Replica
    conductor: Conductor

    @cached_property
    def _writer(self) -> TextWriter:
        run, config = self.plan.responses, self.config
        encoder = prompt_encoder(config.run_config(), self.models, run.folder)
        return TextWriter(config, self.models, run.prompts, self.replica, self.conductor, encoder)

    def collect(self, shard: int) -> None:
        """Draw tokens after the shard's prefixes, get the target's probabilities, and write the examples."""
        begin = time.perf_counter_ns()
        texts = self._texts(shard)
        drafted = self.conductor.draw(texts)
        target = self.conductor.begin_passes()
        target_probabilities = target.probabilities(texts, drafted) if texts else []
        target.close()
        table = example_table(
            drafted,
            target_probabilities,
            hidden_size=draft_hidden_size(self.models),
            hidden_dtype=self.config.hidden_dtype,
        )
        self.plan.folder.finish_shard(shard, table, self._stats(shard, table, begin))

    def _texts(self, shard: int) -> list[Text]:
        responses = _read_responses(open_shard(self.plan.responses.folder.paths(shard), verify=False))
        config = self.config
        if config.kind == "acceptance":
            return [
                response_text(row_id, self._writer.prompt_ids(row_id), response_ids, seed=config.seed)
                for row_id, response_ids in responses.items()
            ]
        return self._writer.texts(responses)

    def _stats(self, shard: int, table: pa.Table, begin_ns: int) -> dict[str, Any]:
        first, end = self.plan.shards.bounds(shard)
        kinds = Counter(table["prefix_kind"].to_pylist())
        return {
            "num_rows": end - first,
            "num_examples": table.num_rows,
            "num_examples_per_prefix_kind": dict(sorted(kinds.items())),
            "acceptance_sum": float(table["acceptance"].to_numpy().sum(dtype=float)),
            "wall_ns": time.perf_counter_ns() - begin_ns,
        }


def _read_responses(table: pa.Table) -> dict[int, list[int]]:
    """Token ids by row, without rows that have an error."""
    return {
        row["row_id"]: row["completion_ids"]
        for row in table.select(["row_id", "completion_ids", "finish_reason"]).to_pylist()
        if row["finish_reason"] != "error"
    }


def _print_totals(config: CollectConfig, plan: CollectPlan) -> None:
    shards = plan.folder.shard_stats()
    num_examples = sum(stats["num_examples"] for stats in shards)
    complete = set(range(plan.shards.num_shards)) - set(plan.pending_shards)
    paths = [plan.folder.data_path(shard) for shard in complete]
    document = {
        "output": config.output,
        "kind": config.kind,
        "num_rows": sum(stats["num_rows"] for stats in shards),
        "num_examples": num_examples,
        "mean_acceptance": sum(stats["acceptance_sum"] for stats in shards) / max(1, num_examples),
        "num_bytes": sum(path.stat().st_size for path in paths),
        "wall_s": sum(stats["wall_ns"] for stats in shards) / NS_PER_S,
    }
    print_document(document)
