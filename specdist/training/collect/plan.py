"""Planning a collection: all checks and messages that need no model."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from specdist.config.arguments import resolved_yaml
from specdist.data.formats.columns import is_text
from specdist.data.formats.prompts import Prompts
from specdist.data.leases.membership import Membership
from specdist.data.run.manifest import Manifest, ShardPlan
from specdist.data.run.run_folder import RunFolder
from specdist.job.models.model_plan import ModelPlan
from specdist.job.ranks.topology import Topology
from specdist.job.run.manifest import run_manifest
from specdist.job.run.preflight import RunPlan, open_joined, open_run_prompts, plan_run
from specdist.models.heads.examples import PREFIX_KINDS, bytes_per_example
from specdist.models.heads.head import identify_draft
from specdist.training.collect.config import CollectConfig
from specdist.utils.errors import UserError

MILLION = 10**6
GB, MB = 10**9, 10**6

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
    _check_reference(config, prompts)
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


def _check_reference(config: CollectConfig, prompts: Prompts) -> None:
    name = config.reference_column
    if name is None:
        return
    schema: pa.Schema = prompts.schema
    if name not in schema.names or not is_text(schema.field(name).type):
        raise UserError(
            f"--reference_column {name} is not a column of text in --prompts {config.prompts}, which has "
            f"{', '.join(schema.names)}: name another, or leave it out"
        )


def _say_sizes(config: CollectConfig, models: ModelPlan, plan: CollectPlan) -> None:
    """Log the maximum size of the examples, and warn if the disk is too small."""
    assert models.draft is not None
    num_bytes = bytes_per_example(draft_hidden_size(models), config.hidden_dtype)
    num_rows = sum(end - first for first, end in map(plan.shards.bounds, plan.pending_shards))
    num_examples = num_rows * config.max_new_tokens * _share_of_tokens(config)
    logger.info(
        "an example takes %s bytes (a million of them %.2f GB); at most about %s examples from %s rows: %.1f "
        "MB; a shard of %s rows in memory: %.1f MB",
        f"{num_bytes:,}",
        num_bytes * MILLION / GB,
        f"{num_examples:,.0f}",
        f"{num_rows:,}",
        num_examples * num_bytes / MB,
        f"{min(config.rows_per_shard, num_rows):,}",
        num_examples / max(1, num_rows) * min(config.rows_per_shard, num_rows) * num_bytes / MB,
    )
    free = shutil.disk_usage(plan.folder.path).free
    if num_examples * num_bytes > free:
        logger.warning(
            "--output %s has %.2f GB free, which is not enough if all responses reach --max_new_tokens %s: "
            "lower that, or --limit",
            config.output,
            free / GB,
            config.max_new_tokens,
        )


def draft_hidden_size(models: ModelPlan) -> int:
    """The hidden size of the draft."""
    assert models.draft is not None
    return int(models.draft.config.get_text_config().hidden_size)


def _share_of_tokens(config: CollectConfig) -> float:
    """Maximum number of examples per token of a response."""
    if config.kind == "verifier":
        return len(PREFIX_KINDS)
    assert config.token_mixing is not None
    return 1.0 if config.runs_branches else 1 - config.token_mixing
