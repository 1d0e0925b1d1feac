"""Costs of passes that this machine keeps for the next start with the same models and options.

They are files in ``specdist/costs`` of the user's cache folder; ``SPECDIST_COSTS`` names another folder, or
is ``off``. Nothing is kept that is doubtful. A file that cannot be read or written only
means that the times are measured.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from pathlib import Path
from typing import Any

import torch

from specdist.config.generate import GenerateConfig
from specdist.data.leases.heartbeat import now_utc
from specdist.data.store.files import json_bytes, sealed, unsealed, write_json
from specdist.job.models.model_plan import ModelPlan
from specdist.job.ranks.topology import Topology
from specdist.job.run.workload import Workload
from specdist.kernels.cpu_library import processor
from specdist.models.files.checkpoint import Checkpoint
from specdist.policies.costs import CostModel
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object
from specdist.utils.packages import version_of

FOLDER_VARIABLE, OFF = "SPECDIST_COSTS", "off"
# Options that decide what is generated, where it goes, and how a run is started, but not what a pass takes.
# Of models their configuration counts, not the folder.
UNRELATED_OPTIONS = frozenset((
    "target", "draft", "target_adapter", "draft_adapter", "prompts", "output", "prompt_column",
    "messages_column", "turns_column", "length_column", "system_prompt", "chat_template_kwargs",
    "continue_final_message", "split_special_tokens", "limit", "rows_per_shard", "overwrite", "seed",
    "stop", "num_samples", "max_new_tokens", "generation_config", "push_to_hub", "leases", "cache_dir",
    "trust_remote_code", "allow_pickle", "rank_timeout", "lease_timeout",
    "tensorboard",
))  # fmt: skip
LIBRARIES = ("specdist", "torch", "transformers", "deepspeed")

logger = logging.getLogger(__name__)


class KeptCosts:
    """The file of one set of costs. ``key``: all that decides them, as JSON."""

    def __init__(self, key: dict[str, Any], folder: Path | None = None) -> None:
        """``folder``: by default that of the environment."""
        self._key: dict[str, Any] = json.loads(json_bytes(key))
        folder = _folder() if folder is None else folder
        digest = hashlib.sha256(json_bytes(self._key)).hexdigest()[:32]
        self._path = None if folder is None else folder / f"{digest}.json"

    def read(self) -> CostModel | None:
        """None where nothing usable was kept."""
        if self._path is None:
            return None
        try:
            found = unsealed(parse_object(self._path.read_bytes()))
            costs = CostModel.from_json(found["costs"]) if found["key"] == self._key else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError) as error:
            logger.info("%s is of no use (%s): what passes take is measured anew", self._path, error)
            return None
        if costs is not None:
            logger.info(
                "what passes take is known from %s (%s; %s=off measures anew)",
                *(self._path, found.get("measured_at"), FOLDER_VARIABLE),
            )
        return costs

    def write(self, costs: CostModel) -> None:
        """Unless they are doubtful."""
        if self._path is None or costs.doubt:
            return
        values = {"measured_at": now_utc(), "key": self._key, "costs": costs.to_json()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, sealed(values))
        except (OSError, UserError) as error:
            logger.info("what passes take is not kept for the next start: %s", error)


def costs_key(
    config: GenerateConfig, models: ModelPlan, topology: Topology, workload: Workload, *, num_slots: int
) -> dict[str, Any]:
    """What decides times: the machine, versions, models, placement, options, how full batches are, and of
    models with experts the text that they were measured with."""
    device = topology.device
    options = {name: value for name, value in vars(config).items() if name not in UNRELATED_OPTIONS}
    package = Path(__file__).parents[2]
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processor": [*processor(), len(os.sched_getaffinity(0)), torch.get_num_threads()],
        "versions": [platform.python_version(), *map(version_of, LIBRARIES)],
        # Where the package is worked on.
        "changed_ns": max(path.stat().st_mtime_ns for path in package.rglob("*.[pc]*")),
        "target": _model(models.target),
        "draft": None if models.draft is None else _model(models.draft),
        "head": None if models.head is None else models.head.description(),
        "num_vocab_ids": models.vocab_size,
        "options": options,
        "ranks": [topology.world_size, topology.draft_placement, os.environ.get("LOCAL_WORLD_SIZE", "1")],
        "num_slots": num_slots,
        "num_rows": workload.rows_at_a_time(num_slots),
        # Contexts of about the same length: the difference between them is known.
        "context_bits": workload.num_context_tokens.bit_length(),
        **({"text": hashlib.sha256(json_bytes(workload.text_ids)).hexdigest()} if workload.text_ids else {}),
    }


def _model(checkpoint: Checkpoint) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(checkpoint.config.to_json_string(use_diff=False))
    return {name: value for name, value in values.items() if name != "_name_or_path"}


def _folder() -> Path | None:
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return None if chosen == OFF else Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "specdist", "costs")
    except RuntimeError:  # a user without a home
        return None
