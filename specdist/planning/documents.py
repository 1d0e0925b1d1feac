"""A plan for programs: one document, the options of the run as a YAML file, and how it is started."""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from specdist.planning.advise import Plan, Work
from specdist.planning.memory import Fit
from specdist.planning.options import PlanConfig
from specdist.planning.simulate import PREFILL_CHUNK_TOKENS
from specdist.synthetic import SHAPES

LAUNCH_CONFIG = "jobs/accelerate/gpu8.yaml"


def run_options(config: PlanConfig, plan: Plan, work: Work) -> dict[str, Any]:
    """The options of ``jobs/generate.py`` for the plan; ``--prompts`` and ``--output`` are the user's."""
    settings = plan.settings
    options: dict[str, Any] = {"target": config.target}
    block = settings.num_draft_tokens + 1
    if settings.mode != "target only":
        options |= {
            "draft": config.draft,
            "policy": "fixed",
            "num_draft_tokens": settings.num_draft_tokens,
            "overlap": "ahead" if settings.is_ahead else "none",
        }
    if settings.is_ahead:
        options["num_branches"] = settings.num_branches
    return options | {
        "dtype": config.dtype,
        "tp_size": plan.tp_size,
        "max_batch_rows": settings.num_rows,
        "max_batch_tokens": max(PREFILL_CHUNK_TOKENS, 2 * settings.num_rows * block),
        "max_new_tokens": work.output_tokens,
        "max_seq_len": work.row_tokens,
    }


def run_yaml(options: dict[str, Any], command: str, launch: str) -> str:
    """The file of ``--output_config``."""
    header = f"# Planned by: {command}\n# Launch: {launch}\n"
    shapes = {str(options[name]) for name in ("target", "draft") if options.get(name) in SHAPES}
    if shapes:
        names = " and ".join(sorted(shapes))
        header += f"# Put models in place of {names}: jobs/make_synthetic.py makes random ones\n"
    return header + yaml.safe_dump(options, sort_keys=False)


def launch_command(plan: Plan, config_path: str) -> str:
    """How one replica is started."""
    job = ["jobs/generate.py", "--config", config_path, "--prompts", "PROMPTS", "--output", "FOLDER"]
    if plan.num_processes == 1:
        return shlex.join(["python", *job])
    launcher = ["accelerate", "launch", "--config_file", LAUNCH_CONFIG]
    return shlex.join([*launcher, "--num_processes", str(plan.num_processes), *job])


def plan_document(plan: Plan) -> dict[str, Any]:
    """A plan for programs: bytes, seconds and counts."""
    settings, found = plan.settings, plan.prediction
    return {
        "mode": settings.mode,
        "is_runnable": plan.is_runnable,
        "tp_size": plan.tp_size,
        "num_gpus": plan.num_gpus,
        "num_replicas": plan.num_replicas,
        "num_processes": plan.num_processes,
        "num_rows": settings.num_rows,
        "most_rows": plan.most_rows,
        "num_draft_tokens": settings.num_draft_tokens,
        "num_branches": settings.num_branches,
        "tokens_per_s": plan.tokens_per_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "hours": plan.hours,
        "tokens_per_round": found.tokens_per_round,
        "round_s": found.round_s,
        "target_share": found.target_share,
        "draft_share": found.draft_share,
        "prefill_share": found.prefill_share,
        "memory": fit_document(plan.fit),
    }


def fit_document(fit: Fit) -> dict[str, Any]:
    """The memory of a plan for programs, in bytes."""
    return {
        role: None
        if share is None
        else {
            "weight_bytes": share.weight_bytes,
            "reserved_bytes": share.reserved_bytes,
            "usable_bytes": share.usable_bytes,
            "cache_bytes_per_row": share.cache_bytes_per_row + share.branch_bytes_per_row,
            "most_rows": share.most_rows,
        }
        for role, share in (("target", fit.target), ("draft", fit.draft))
    }
