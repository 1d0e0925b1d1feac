"""``jobs/plan.py``: from its options to the text and the document that it prints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from specdist.data.files import write_atomically
from specdist.job.topology import local_device
from specdist.models.sizes import ModelSize
from specdist.planning.advise import Planner, Site, Work, recommend
from specdist.planning.documents import (
    fit_document,
    longest_row,
    plan_document,
    run_options,
    run_yaml,
    shapes_note,
)
from specdist.planning.hardware import GB, GIB, HERE, TERA, Gpu, find_gpu
from specdist.planning.launch import launch_of
from specdist.planning.measuring import measure_here
from specdist.planning.models import open_model
from specdist.planning.options import PlanConfig
from specdist.planning.report import memory_table, plan_table, reason, validation_table
from specdist.planning.traces import acceptance_of
from specdist.planning.validate import validate
from specdist.utils.errors import UserError

WITHIN = 0.15


def run_plan(config: PlanConfig, command: str) -> tuple[str, dict[str, Any]]:
    """What to print, and the document. Raises :class:`UserError`."""
    if config.validate:
        validations = validate(config, local_device(config.device))
        num_close = sum(abs(found.error) <= WITHIN for found in validations)
        text = f"{validation_table(validations)}\n{num_close} of {len(validations)} within {WITHIN:.0%}"
        return text, {
            "comparisons": [{**dataclasses.asdict(found), "error": found.error} for found in validations]
        }
    target, dtype = open_model(
        "--target", config.target, config.dtype, trust_remote_code=config.trust_remote_code
    )
    draft = None
    if config.draft is not None:
        # Without --dtype each model has its own, as in the job.
        draft, _ = open_model(
            "--draft", config.draft, config.dtype, trust_remote_code=config.trust_remote_code
        )
    acceptance = config.acceptance if config.trace is None else acceptance_of(Path(config.trace))
    work = Work(
        prompt_tokens=config.prompt_tokens,
        output_tokens=config.output_tokens,
        num_prompts=config.num_prompts,
        acceptance=acceptance or 0.0,
        caught=config.caught,
    )
    _check_lengths(work, target, draft)
    gpu = (
        measure_here(local_device(config.device), getattr(torch, dtype))
        if config.gpu == HERE
        else find_gpu(config.gpu, dtype)
    )
    site = Site(
        gpu=gpu,
        gpus_per_node=config.gpus_per_node,
        num_nodes=config.nodes,
        max_num_seqs=config.max_num_seqs,
    )
    planner = Planner(target, draft, site, work)
    fits = planner.fits()
    parts = [_describe(target, draft, dtype, gpu, site), memory_table(fits, work)]
    document: dict[str, Any] = {
        "gpu": dataclasses.asdict(gpu),
        "num_parameters": {
            "target": target.num_parameters,
            "draft": None if draft is None else draft.num_parameters,
        },
        "acceptance": acceptance,
        "memory": [
            {"mode": mode, "tp_size": tp_size, "fits": fit.most_rows > 0, **fit_document(fit)}
            for mode, tp_size, fit in fits
        ],
    }
    if config.memory:
        return "\n\n".join(parts), document
    plans = planner.best_plans()
    chosen = recommend(plans)
    if chosen is None:
        raise UserError(
            f"--target {config.target} does not fit: raise --gpus_per_node, choose a --gpu with more memory, "
            f"or lower --prompt_tokens and --output_tokens\n{parts[1]}"
        )
    max_positions = min(model.max_positions for model in (target, draft) if model is not None)
    options = run_options(config, chosen, work, max_positions=max_positions)
    launch = launch_of(
        chosen,
        site,
        options,
        config_path=config.output_config,
        prompts=config.prompts,
        output=config.output,
        on_cpu=config.gpu == HERE and local_device(config.device).type == "cpu",
    )
    if config.output_config is not None:
        _write_config(config.output_config, run_yaml(options, command, launch.lines()))
    longest = longest_row(chosen, work, max_positions)
    parts += [
        plan_table(plans, chosen),
        reason(plans, chosen, target, site),
        f"Prompt and completion may have {longest:,} tokens together; a longer prompt becomes an error row.",
        "\n".join([*launch.lines(), *filter(None, [shapes_note(options)])]),
    ]
    document |= {
        "plans": [plan_document(plan) for plan in plans],
        "recommended": plan_document(chosen),
        "options": options,
        "launch": {"commands": list(launch.commands), "num_nodes": launch.num_nodes},
    }
    return "\n\n".join(parts), document


def _write_config(path: str, content: str) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(path), lambda file: file.write(content.encode()))
    except OSError as error:
        raise UserError(f"--output_config {path} cannot be written: {error}") from error


def _check_lengths(work: Work, target: ModelSize, draft: ModelSize | None) -> None:
    for model in (target, draft):
        if model is not None and work.row_tokens > model.max_positions:
            raise UserError(
                f"--prompt_tokens {work.prompt_tokens} and --output_tokens {work.output_tokens} make "
                f"{work.row_tokens} tokens, but {model.name} supports {model.max_positions}: lower one"
            )


def _describe(target: ModelSize, draft: ModelSize | None, dtype: str, gpu: Gpu, site: Site) -> str:
    models = " and ".join(
        f"{model.name} ({model.num_parameters / 1e9:.2f}B)" for model in (target, draft) if model is not None
    )
    rate = gpu.sustained_flops_per_s(target.bytes_per_number) / TERA
    source = "measured" if gpu.name == HERE else "assumed for kernels"
    return (
        f"{models} in {dtype} on {site.num_nodes} x {site.gpus_per_node} {gpu.name}: "
        f"{gpu.memory_bytes / GIB:.1f} GiB, {gpu.sustained_bytes_per_s / GB:,.0f} GB/s and "
        f"{rate:,.2f} TFLOP/s ({source})"
    )
