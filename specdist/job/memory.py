"""What memory does in a run with ``--draft memory``."""

from __future__ import annotations

from specdist.config.generate import GenerateConfig
from specdist.job.ranks.topology import Topology
from specdist.job.replica.model_plan import ModelPlan
from specdist.job.texts.memory_texts import MemoryTexts, finished_rows
from specdist.job.totals.reproducibility import reproducibility
from specdist.policies.costs import CostModel
from specdist.policies.ngrams.block_lengths import MemorySettings
from specdist.policies.ngrams.text_store import TextSettings

# Of a token to be proposed where measured costs decide whether it is verified.
LEAST_CHANCE = 0.02


def text_settings(config: GenerateConfig, texts: MemoryTexts | None) -> TextSettings:
    """What memory looks through besides a sequence's own text."""
    if texts is None and not config.memory_rows:
        return TextSettings()
    said = finished_rows(config.output, config.memory_size) if config.memory_rows else []
    return TextSettings(
        num_tokens=config.memory_size,
        given=[*(texts.token_ids if texts else ()), *said],
        adds_sequences=config.memory_rows,
    )


def learns_together(config: GenerateConfig, topology: Topology) -> bool:
    """Where the seed fixes the tokens under rejection, a block may depend on its own sequence alone."""
    return config.is_coupled or reproducibility(config, topology) == "distribution"


def memory_settings(
    config: GenerateConfig, topology: Topology, costs: CostModel | None, models: ModelPlan
) -> MemorySettings | None:
    """None without memory. ``costs``: of the run, if it has measured any."""
    if not config.uses_memory:
        return None
    return MemorySettings(
        max_tokens=config.block_tokens - 1,
        least_chance=LEAST_CHANCE if costs else config.policy_options.get("stop_probability", 0.0),
        learns_together=learns_together(config, topology),
        costs=costs,
        texts=text_settings(config, models.memory_texts),
    )
