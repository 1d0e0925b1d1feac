"""The collecting job: from prompts to training examples of a head.

First the target's responses are generated, by an ordinary run in a folder of its own, which keeps all
finished rows. Then each shard of responses becomes a shard of examples: a crash costs at most the work on one
shard, which is a few passes over its texts.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import tqdm

from specdist.data.run.reading import open_shard
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
from specdist.models.heads.examples import example_table
from specdist.training.collect.config import CollectConfig
from specdist.training.collect.draft_side import DraftSide
from specdist.training.collect.plan import CollectPlan, draft_hidden_size, plan_collection
from specdist.training.collect.ranks import Conductor, follow_conductor
from specdist.training.collect.texts import Text, response_text
from specdist.training.collect.writers import TextWriter
from specdist.utils.documents import print_document

logger = logging.getLogger(__name__)


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
    replica_plan = ReplicaPlan(
        config=config.run_config(),
        models=models,
        topology=topology,
        may_give_back=False,
    )
    replica = build_replica(replica_plan, activity=activity)
    activity.begin("collecting", has_progress=True)
    draft = None
    if topology.holds_draft:
        draft = DraftSide(
            replica,
            settings=replica.settings,
            vocab_size=models.vocab_size,
            stop_token_ids=models.target.stop_token_ids(),
            token_mixing=config.token_mixing,
            hidden_dtype=config.hidden_dtype,
        )
    if plan is None:
        follow_conductor(replica, topology, draft, stop)
        return
    conductor = Conductor(replica, topology, draft)
    if plan.responses.pending_shards:
        conductor.begin_run()
        generate_rows(config.run_config(), models, plan.responses, replica, topology, stop)
    stop.defer_signals()
    collection = Collection(config, models, plan, replica, conductor)
    for shard in tqdm.tqdm(plan.pending_shards, "shards of examples", disable=None):
        if stop.is_made:
            break
        collection.collect(shard)
    conductor.end()


class Collection:
    """Turns finished shards of responses into shards of examples, on rank 0."""

    def __init__(
        self,
        config: CollectConfig,
        models: ModelPlan,
        plan: CollectPlan,
        replica: Replica,
        conductor: Conductor,
    ) -> None:
        self._config = config
        self._models = models
        self._plan = plan
        self._conductor = conductor
        encoder = prompt_encoder(config.run_config(), models, plan.responses.folder)
        self._writer = TextWriter(config, models, plan.responses.prompts, replica, conductor, encoder)

    def collect(self, shard: int) -> None:
        """Draw tokens after the shard's prefixes, get the target's probabilities, and write the examples."""
        begin = time.perf_counter_ns()
        texts = self._texts(shard)
        drafted = self._conductor.draw(texts)
        target = self._conductor.begin_passes()
        target_probabilities = target.probabilities(texts, drafted) if texts else []
        target.close()
        table = example_table(
            drafted,
            target_probabilities,
            hidden_size=draft_hidden_size(self._models),
            hidden_dtype=self._config.hidden_dtype,
        )
        self._plan.folder.finish_shard(shard, table, self._stats(shard, table, begin))

    def _texts(self, shard: int) -> list[Text]:
        responses = _read_responses(open_shard(self._plan.responses.folder.paths(shard), verify=False))
        config = self._config
        if config.kind == "acceptance":
            return [
                response_text(row_id, self._writer.prompt_ids(row_id), response_ids, seed=config.seed)
                for row_id, response_ids in responses.items()
            ]
        return self._writer.texts(responses)

    def _stats(self, shard: int, table: pa.Table, begin_ns: int) -> dict[str, Any]:
        first, end = self._plan.shards.bounds(shard)
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
