"""The plan of a run before its models are loaded: prompts, folder and manifest, each checked."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from specdist.config.arguments import resolved_yaml
from specdist.config.generate import GenerateConfig
from specdist.data.formats.inputs import shown
from specdist.data.formats.prompts import Prompts
from specdist.data.leases.membership import Membership
from specdist.data.leases.opening import open_run_folder
from specdist.data.run.manifest import COSTS, EARLIER_COSTS, Manifest, ShardPlan
from specdist.data.run.run_folder import RunFolder
from specdist.data.store.access import check_output
from specdist.data.store.storage import storage_path
from specdist.job.models.model_plan import ModelPlan, batch_limits
from specdist.job.ranks.restart import former_lone_row, former_replica, num_restarts
from specdist.job.ranks.topology import Topology
from specdist.job.rows.output_columns import check_column_names, check_writable
from specdist.job.rows.row_options import RowOptionReader
from specdist.job.rows.row_requests import chat_warnings, check_any_usable, prompt_encoder
from specdist.job.run.manifest import run_manifest
from specdist.job.run.opening import open_run_prompts
from specdist.job.texts.tokens import check_chat_template
from specdist.job.totals.hub import check_hub
from specdist.job.totals.report import all_costs, check_results, frozen_costs
from specdist.policies.costs import CostModel
from specdist.utils.errors import UserError

# Fields of the manifest for restarts with less memory (specdist.job.ranks.restart): how the batch was made
# smaller.
NUM_HALVINGS, ROWS_TOO_LARGE = "num_batch_halvings", "rows_too_large"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunRows:
    """The rows, as only rank 0 must know them; a preview has no folder."""

    prompts: Prompts
    shards: ShardPlan
    row_options: RowOptionReader
    folder: RunFolder | None = None

    @property
    def pending_shards(self) -> list[int]:
        """The shards without a completion record."""
        num_shards = self.shards.num_shards
        return [*range(num_shards)] if self.folder is None else self.folder.unrecorded_shards(num_shards)


@dataclass(frozen=True, kw_only=True)
class RunPlan(RunRows):
    """The rows with their folder."""

    folder: RunFolder
    manifest: Manifest
    membership: Membership


def check_rows(config: GenerateConfig, models: ModelPlan) -> RunRows:
    """Open the prompts. Raises :class:`UserError`."""
    prompts = open_run_prompts(config)
    check_chat_template(models.target, f"--prompts {shown(config.prompts)}" if prompts.is_chat else None)
    row_options = RowOptionReader(config, prompts)
    row_options.check()
    models.constraints.check_column(prompts)
    check_column_names(config, prompts)
    check_writable(prompts)
    encoder = prompt_encoder(config, models)
    for warning in chat_warnings(config, prompts, encoder):
        logger.warning(warning)
    check_any_usable(prompts, encoder, models.constraints)
    return RunRows(prompts=prompts, shards=row_options.shards(config.rows_per_shard), row_options=row_options)


def plan_run(config: GenerateConfig, models: ModelPlan, topology: Topology) -> RunPlan:
    """Open the prompts and the run folder, new or resumed. Raises :class:`UserError`."""
    output = storage_path(config.output, option="--output ", cache_dir=config.cache_dir)
    check_output(output)
    if config.push_to_hub is not None:
        check_hub(config.push_to_hub)
    rows = check_rows(config, models)
    manifest = run_manifest(config, models, rows.prompts, topology, rows.shards)
    _check_overwrite(config)
    membership = Membership(output, silent_after_s=config.lease_timeout, name=former_replica())
    overwrite = config.overwrite and not num_restarts()
    folder = open_joined(membership, manifest, resolved_yaml(config), overwrite=overwrite)
    try:
        check_results(folder)
    except UserError:
        membership.leave()
        raise
    if num_restarts():
        with membership.setup():
            _make_smaller(config, models, folder, topology.device.type)
    return RunPlan(**vars(rows) | {"folder": folder}, manifest=manifest, membership=membership)


def _make_smaller(config: GenerateConfig, models: ModelPlan, folder: RunFolder, device_type: str) -> None:
    """Halve the batch of all replicas that start from now on; or, if one sequence ran alone, record its row
    as too large and go back to the whole batch."""
    info = folder.manifest.info
    num_halvings = info.get(NUM_HALVINGS, 0)
    row = former_lone_row()
    if row is not None:
        folder.freeze(ROWS_TOO_LARGE, [*info.get(ROWS_TOO_LARGE, []), list(row)])
        num_halvings = 0
    else:
        num_halvings += 1
    folder.freeze(NUM_HALVINGS, num_halvings)
    limits = batch_limits(config, models, device_type, num_halvings=num_halvings)
    logger.warning(
        "out of memory%s: continuing with at most %d %s and %d tokens at a time",
        "" if row is None else f" while row {row[0]} ran alone, which is recorded as an error",
        limits.num_slots,
        "sequence" if limits.num_slots == 1 else "sequences",
        limits.max_num_batched_tokens,
    )


def open_joined(
    membership: Membership, manifest: Manifest, config_yaml: str, *, overwrite: bool, is_shared: bool = True
) -> RunFolder:
    """Join the folder's replicas, and open it, new or resumed. Raises :class:`UserError`, also if another
    replica is at work and the folder is not shared."""
    membership.join()
    try:
        with membership.setup():
            if not is_shared and (other := membership.find_another()) is not None:
                raise UserError(
                    f"--output {membership.output} is being written by {other}: wait until that process has "
                    "ended, or end it"
                )
            folder = open_run_folder(
                membership.output,
                manifest,
                config_yaml,
                overwrite,
                membership.find_another,
                is_tidied=membership.another_has_tidied(),
            )
            membership.tidy()
    except UserError:
        membership.withdraw()
        raise
    return folder


def _check_overwrite(config: GenerateConfig) -> None:
    """Slurm repeats a command line for a requeued job and for the tasks of an array: with ``--overwrite`` a
    later one would delete the results of the first."""
    is_repeated = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
    is_one_of_many = "SLURM_ARRAY_TASK_ID" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) > 1
    if config.overwrite and (is_repeated or is_one_of_many):
        raise UserError(
            "--overwrite in a job that Slurm has requeued, or that starts several replicas, would delete "
            "what has been generated meanwhile: delete the run's folder yourself, and leave --overwrite out"
        )


def freeze_costs(run: RunPlan, costs: CostModel, *, instead_of: CostModel | None = None) -> CostModel:
    """The costs that all replicas and restarts of a run use: those of the first that measured them, or has
    found others ``instead_of`` what was used. Those that are replaced are kept for shards that are begun."""
    folder = run.folder
    with run.membership.setup():
        # Another may have been faster.
        frozen = frozen_costs(folder)
        if frozen is not None:
            if frozen != instead_of:
                return frozen
            folder.freeze(EARLIER_COSTS, [each.to_json() for each in all_costs(folder)])
        folder.freeze(COSTS, costs.to_json())
    return costs
