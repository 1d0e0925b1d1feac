"""A plan for programs: the JSON document, and the options of the run as a YAML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import yaml

from specdist.config.groups import DrawingOptions
from specdist.lab.plan.advise import Plan, Work
from specdist.lab.plan.model.hardware import HERE
from specdist.lab.plan.model.memory import Fit
from specdist.lab.plan.model.simulate import PREFILL_CHUNK_TOKENS
from specdist.lab.plan.options import PlanConfig
from specdist.lab.synthetic.shapes import SHAPES

ROWS_PER_SHARD = 512
SHARDS_PER_REPLICA = 4


def longest_row(plan: Plan, work: Work, max_positions: int) -> int:
    """The ``--max_seq_len`` of the run: what the models support, or else what half of the cache holds.

    ``work`` has the lengths of a typical row, and some prompts are longer. Only half of the cache, because
    its size at the start of the run is an estimate.
    """
    return min(max_positions, max(work.row_tokens, plan.most_rows * work.row_tokens // 2))


def run_options(config: PlanConfig, plan: Plan, work: Work, *, max_positions: int) -> dict[str, Any]:
    """The options of ``jobs/generate.py`` for the plan, except ``--prompts`` and ``--output``.

    ``max_positions``: the longest sequence that both models support.
    """
    settings = plan.settings
    options: dict[str, Any] = {"target": config.target}
    block = settings.num_draft_tokens + 1
    if settings.mode != "target only":
        options |= {
            # How much it drafts, and when, is left to the run, which measures and learns.
            "draft": config.draft,
            **_given(config, "draft_quantization"),
            **_given(config, "draft_window"),
        }
    if settings.mode == "colocated":
        options["draft_placement"] = "shared"
    options |= {
        **_given(config, "target_quantization"),
        "dtype": config.dtype,
        "tp_size": plan.tp_size,
        "max_num_seqs": settings.num_rows,
        "max_num_batched_tokens": max(PREFILL_CHUNK_TOKENS, 2 * settings.num_rows * block),
        **{
            item.name: getattr(config, item.name)
            for item in fields(DrawingOptions)
            if getattr(config, item.name) != item.default
        },
        "max_new_tokens": work.output_tokens,
    }
    if config.gpu == HERE and config.device != "auto":
        options["device"] = config.device
    options |= {name: True for name in ("trust_remote_code", "allow_pickle") if getattr(config, name)}
    longest = longest_row(plan, work, max_positions)
    if longest < max_positions:
        options["max_seq_len"] = longest
    if plan.num_replicas > 1:
        # A replica without a shard has nothing to do.
        num_shards = SHARDS_PER_REPLICA * plan.num_replicas
        options["rows_per_shard"] = max(1, min(ROWS_PER_SHARD, work.num_prompts // num_shards))
    return options


def _given(config: PlanConfig, name: str) -> dict[str, Any]:
    value = getattr(config, name)
    return {} if value is None else {name: value}


def shapes_note(options: dict[str, Any]) -> str | None:
    """A remark for a plan whose models are shapes; None for real models."""
    shapes = [str(options[name]) for name in ("target", "draft") if options.get(name) in SHAPES]
    if not shapes:
        return None
    return f"Replace {' and '.join(shapes)} by models: jobs/make_synthetic.py makes random ones"


def run_yaml(options: dict[str, Any], command: str, launch: Sequence[str]) -> str:
    """The content of ``--output_config``; ``launch`` has the lines that say how to start it."""
    lines = [f"Planned by: {command}", *launch]
    note = shapes_note(options)
    if note is not None:
        lines.append(note)
    header = "".join(f"# {line}\n" for line in lines)
    return header + options_yaml(options)


def options_yaml(options: dict[str, Any]) -> str:
    """One option a line."""
    return yaml.safe_dump(options, sort_keys=False)


def plan_document(plan: Plan) -> dict[str, Any]:
    """A plan for programs: bytes, seconds and counts."""
    settings, found = plan.settings, plan.prediction
    return {
        "mode": settings.mode,
        "tp_size": plan.tp_size,
        "num_gpus": plan.num_gpus,
        "num_replicas": plan.num_replicas,
        "num_prompts": plan.num_prompts,
        "num_processes": plan.num_gpus,
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
        "state_bytes_per_round": found.state_bytes_per_round,
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
