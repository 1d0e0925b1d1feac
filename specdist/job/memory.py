"""What memory does in a run, beside its draft model."""

from __future__ import annotations

from specdist.config.generate import GenerateConfig
from specdist.config.speculation import MEMORY_CHANCE
from specdist.drafters.source_choice import MemorySettings
from specdist.job.preflight import reproducibility
from specdist.job.topology import Topology
from specdist.policies.costs import CostModel


def memory_settings(
    config: GenerateConfig, topology: Topology, costs: CostModel | None
) -> MemorySettings | None:
    """None without memory beside a draft model. ``costs``: of the run, where it has measured any."""
    if not config.adds_memory:
        return None
    # Where the seed fixes the tokens under rejection, a block may depend on its own sequence alone.
    is_free = config.is_coupled or reproducibility(config, topology) == "distribution"
    return MemorySettings(
        max_tokens=config.memory_tokens,
        max_model_tokens=config.policy_choice.max_draft_tokens,
        least_chance=MEMORY_CHANCE,
        learns_together=is_free,
        costs=costs if is_free else None,
    )
