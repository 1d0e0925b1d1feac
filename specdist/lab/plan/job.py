"""``jobs/plan.py`` from its options to its text and its JSON document."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from specdist.config.groups import MTP, DrawingOptions, values_of
from specdist.data.store.files import write_atomically
from specdist.job.models.model_plan import unquantized_experts
from specdist.lab.plan.advise import Planner, Site, Work, recommend
from specdist.lab.plan.basis import bases, bases_lines
from specdist.lab.plan.hardware import GB, TERA, Gpu, find_gpu
from specdist.lab.plan.options import PlanConfig
from specdist.lab.plan.report import (
    launch_commands,
    launch_lines,
    longest_row,
    memory_table,
    plan_document,
    plan_table,
    reason,
    run_options,
    run_yaml,
    shapes_note,
)
from specdist.lab.plan.shapes import NAMED, named_config
from specdist.models.drafters.files import head_config
from specdist.models.families.family_check import check_family
from specdist.models.files.checkpoint import CONFIG_NAME, Checkpoint, drafter_config
from specdist.models.sizes.sizes import ModelSize, size_of
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError
from specdist.utils.host import GIB


def run_plan(config: PlanConfig, command: str) -> tuple[str, dict[str, Any]]:
    """The text to print, and the document. Raises :class:`UserError`."""
    trusts = {
        "trust_remote_code": config.trust_remote_code,
        "has_float8_cache": config.cache_dtype is not None,
    }
    target, dtype = open_model(
        "--target", config.target, config.dtype, quantization=config.target_quantization, **trusts
    )
    draft = None
    if config.draft is not None:
        is_head = config.draft == MTP
        # Without --dtype each model has its own, as in the job.
        draft, _ = open_model(
            "--draft",
            config.target if is_head else config.draft,
            config.dtype,
            quantization=config.draft_quantization,
            is_head=is_head,
            **trusts,
        )
    work = Work(
        prompt_tokens=config.prompt_tokens,
        output_tokens=config.output_tokens,
        num_prompts=config.num_prompts,
        acceptance=config.acceptance or 0.0,
        caught=config.caught,
        expert_parallel=config.expert_parallel,
        sampling=SamplingSettings(**values_of(config, DrawingOptions)),
    )
    _check_lengths(work, target, draft)
    if config.expert_parallel == "always" and not target.experts:
        raise UserError(
            f"--expert_parallel always: {config.target} has no experts to share out: leave it out"
        )
    gpu = find_gpu(config.gpu, dtype, config.calibration)
    site = Site(
        gpu=gpu,
        gpus_per_node=config.gpus_per_node,
        num_nodes=config.nodes,
        max_num_seqs=config.max_num_seqs,
    )
    planner = Planner(target, draft, site, work)
    fits = planner.fits()
    parts = [_describe(target, draft, dtype, gpu, site), memory_table(fits, work)]
    notes = filter(None, map(unquantized_experts, (target, draft)))
    parts += [f"{note}. With it a checkpoint that stores them one by one is refused." for note in notes]
    document: dict[str, Any] = {
        "gpu": dataclasses.asdict(gpu),
        "num_parameters": {
            "target": target.num_parameters,
            "draft": None if draft is None else draft.num_parameters,
        },
        "num_active": {
            "target": target.num_active,
            "draft": None if draft is None else draft.num_active,
        },
        "acceptance": config.acceptance,
        "memory": [
            {"mode": mode, "tp_size": tp_size, "fits": fit.most_rows > 0, **dataclasses.asdict(fit)}
            for mode, tp_size, fit in fits
        ],
    }
    plans = planner.best_plans()
    chosen = recommend(plans)
    if chosen is None:
        raise UserError(
            f"--target {config.target} does not fit: raise --gpus_per_node, choose a --gpu with more memory "
            "or a smaller model, or lower --prompt_tokens and --output_tokens\n" + "\n".join(parts[1:])
        )
    max_positions = min(model.max_positions for model in (target, draft) if model is not None)
    options = run_options(config, chosen, work, max_positions=max_positions)
    commands = launch_commands(chosen, site, options, config.output_config)
    num_nodes = -(-chosen.num_replicas // len(commands))
    launch = launch_lines(commands, num_nodes)
    if config.output_config is not None:
        _write_config(config.output_config, run_yaml(options, command, launch))
    longest = longest_row(chosen, work, max_positions)
    rests_on = bases(chosen, target, draft, site)
    parts += [
        plan_table(plans, chosen, config.gpu_price),
        reason(plans, chosen, target, site),
        bases_lines(rests_on),
        f"Prompt and completion may have {longest:,} tokens together; a longer prompt becomes an error row.",
        "\n".join([*launch, *filter(None, [shapes_note(options)])]),
    ]
    document |= {
        "plans": [plan_document(plan, config.gpu_price) for plan in plans],
        "recommended": plan_document(chosen, config.gpu_price),
        "rests_on": rests_on,
        "options": options,
        "launch": {"commands": commands, "num_nodes": num_nodes},
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
        f"{model.name} ({model.num_parameters / 1e9:.2f}B"
        + (f", {model.num_active / 1e9:.2f}B of them active)" if model.experts else ")")
        for model in (target, draft)
        if model is not None
    )
    rate = gpu.sustained_flops_per_s(target.bytes_per_number) / TERA
    return (
        f"{models} in {dtype} on {site.num_nodes} x {site.gpus_per_node} {gpu.name}: "
        f"{gpu.memory_bytes / GIB:.1f} GiB, {gpu.sustained_bytes_per_s / GB:,.0f} GB/s and "
        f"{rate:,.2f} TFLOP/s\n"
        f"Figures of the GPU: {gpu.figures}"
    )


def open_model(
    option: str,
    name: str,
    dtype: str,
    *,
    trust_remote_code: bool = False,
    quantization: str | None = None,
    is_head: bool = False,
    has_float8_cache: bool = False,
) -> tuple[ModelSize, str]:
    """The sizes of a model, or of its multi-token prediction head (``is_head``), and the type of its numbers,
    by its name or from its configuration alone.

    Raises :class:`UserError` if it cannot be read, or its family is not supported.
    """
    if name in NAMED and not Path(name).exists():
        config = named_config(name)
    elif (found := _published(option, name)) is not None:
        config = found
    else:
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, StrictDataclassError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"{option} {name} has no readable configuration ({reason}): name a folder with a "
                f"config.json, a hub model that you can access, or one of ({', '.join(NAMED)})"
            ) from error
    model = Checkpoint(
        option=option,
        name=name,
        folder=Path(name),
        config=config,
        weight_files=(),
        trusts_code=trust_remote_code,
        quantization=quantization,
        has_float8_cache=has_float8_cache,
    )
    check_family(model, 1)
    if is_head:
        model = dataclasses.replace(model, config=head_config(config, MTP, name))
    torch_dtype = model.torch_dtype(dtype)
    return size_of(model, torch_dtype.itemsize), str(torch_dtype).removeprefix("torch.")


def _published(option: str, name: str) -> Any:
    """The configuration of a published drafter in a folder here."""
    return drafter_config(option, name, Path(name)) if (Path(name) / CONFIG_NAME).is_file() else None
