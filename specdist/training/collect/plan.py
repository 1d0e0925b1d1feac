"""Planning a collection: all checks and messages that need no model."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

from specdist.config.arguments import resolved_yaml
from specdist.data.leases.membership import Membership
from specdist.data.run.manifest import Manifest, ShardPlan
from specdist.data.run.run_folder import RunFolder
from specdist.job.models.model_plan import ModelPlan
from specdist.job.ranks.topology import Topology
from specdist.job.run.manifest import run_manifest
from specdist.job.run.opening import open_run_prompts
from specdist.job.run.preflight import RunPlan, open_joined, plan_run
from specdist.models.heads.examples import PREFIX_KINDS, bytes_per_example
from specdist.models.heads.head import identify_draft
from specdist.training.collect.config import CollectConfig
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
