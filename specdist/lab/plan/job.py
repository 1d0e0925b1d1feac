"""``jobs/plan.py`` from its options to its text and its JSON document. ``--gpu here`` is this machine's
device, measured where kernels can measure it."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig

from specdist.config.groups import MTP, SELF, DrawingOptions, values_of
from specdist.data.store.files import write_atomically
from specdist.engine.times.timeline import timed
from specdist.job.models.held_models import unquantized_experts
from specdist.job.ranks.topology import local_device
from specdist.lab.plan.advise import Planner, Site, Work, recommend, worth_per_gpu, worth_table
from specdist.lab.plan.hardware import GB, HERE, PCIE_LATENCY_S, TERA, Gpu, find_gpu
from specdist.lab.plan.memory import graphs_note
from specdist.lab.plan.options import PlanConfig
from specdist.lab.plan.report import (
    fit_document,
    launch_of,
    longest_row,
    memory_table,
    options_yaml,
    plan_document,
    plan_table,
    reason,
    run_options,
    run_yaml,
    shapes_note,
)
from specdist.lab.plan.shapes import NAMED, named_config
from specdist.models.cpu.linear import OneDnnLinears
from specdist.models.drafters.mtp_loading import head_config
from specdist.models.families.family_check import check_family
from specdist.models.files.checkpoint import CONFIG_NAME, Checkpoint, drafter_config
from specdist.models.sizes.sizes import ModelSize, size_of
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError
from specdist.utils.host import GIB, available_memory_bytes

TRACE_FILES = "stats/*.trace.arrow"
# Larger than any cache, so that every product reads its matrix from memory.
MATRIX_BYTES = {"cpu": 2**27, "cuda": 2**31}
WIDTH = 4096
NUM_PRODUCT_TOKENS = {"cpu": 256, "cuda": 4096}
NUM_WARMUPS, NUM_PASSES = 2, 7
# Links are not measured: PCIe 4 × 16 is assumed.
LINK_BYTES_PER_S = 32 * GB


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
        is_self, is_head = config.draft.startswith(SELF), config.draft == MTP
        # Without --dtype each model has its own, as in the job.
        draft, _ = open_model(
            "--draft",
            config.target if is_self or is_head else config.draft,
            config.dtype,
            quantization=config.draft.removeprefix(SELF) if is_self else config.draft_quantization,
            is_self=is_self,
            is_head=is_head,
            **trusts,
        )
    acceptance = config.acceptance if config.trace is None else acceptance_of(Path(config.trace))
    work = Work(
        prompt_tokens=config.prompt_tokens,
        output_tokens=config.output_tokens,
        num_prompts=config.num_prompts,
        acceptance=acceptance or 0.0,
        caught=config.caught,
        expert_parallel=config.expert_parallel,
        sampling=SamplingSettings(**values_of(config, DrawingOptions)),
    )
    _check_lengths(work, target, draft)
    if config.expert_parallel == "always" and not target.experts:
        raise UserError(
            f"--expert_parallel always: {config.target} has no experts to share out: leave it out"
        )
    gpu = (
        measure_here(local_device(config.device), getattr(torch, dtype))
        if config.gpu == HERE
        else find_gpu(config.gpu, dtype, config.calibration)
    )
    assert config.gpus_per_node is not None and config.nodes is not None
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
    parts += filter(None, [graphs_note(gpu)])
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
            f"--target {config.target} does not fit: {_room(target, site, work)}\n" + "\n".join(parts[1:])
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
    as_yaml = []
    if config.output_config is not None:
        _write_config(config.output_config, run_yaml(options, command, launch.lines()))
    else:
        as_yaml = [
            f"The same options as a file for --config (--output_config writes it):\n{options_yaml(options)}"
        ]
    longest = longest_row(chosen, work, max_positions)
    worth = []
    if draft is not None:
        worth = worth_per_gpu(target, draft, site, work, compares=config.compare_gpus)
    parts += [
        plan_table(plans, chosen, config.gpu_price),
        reason(plans, chosen, target, site),
        *([worth_table(worth)] if worth else []),
        f"Prompt and completion may have {longest:,} tokens together; a longer prompt becomes an error row.",
        "\n".join([*launch.lines(), *filter(None, [shapes_note(options)])]),
        *as_yaml,
    ]
    document |= {
        "plans": [plan_document(plan, config.gpu_price) for plan in plans],
        "recommended": plan_document(chosen, config.gpu_price),
        "draft_gpu": [dataclasses.asdict(found) | {"worth_up_to": found.most_rows} for found in worth],
        "options": options,
        "launch": {"commands": list(launch.commands), "num_nodes": launch.num_nodes},
    }
    return "\n\n".join(parts), document


def _room(target: ModelSize, site: Site, work: Work) -> str:
    """What makes room for a sequence of the target alone, where the same arithmetic says so."""
    remedies = ["choose a --gpu with more memory, or a smaller model"]
    for remedy, other_site, other_work in (
        ("lower --prompt_tokens and --output_tokens", site, replace(work, prompt_tokens=1, output_tokens=1)),
        ("raise --gpus_per_node", replace(site, gpus_per_node=target.num_query_heads), work),
    ):
        if any(fit.most_rows for _, _, fit in Planner(target, None, other_site, other_work).fits()):
            remedies.insert(0, remedy)
    return ", or ".join(remedies)


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
    is_self: bool = False,
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
        is_self=is_self,
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


def acceptance_of(path: Path) -> float:
    """The share of verified tokens that were accepted, in a run with ``--trace`` or one of its trace files.

    Raises :class:`UserError` if no trace can be read, or it has no verified token.
    """
    files = sorted(path.glob(TRACE_FILES)) if path.is_dir() else [path]
    if not files:
        raise UserError(
            f"--trace {path} holds no {TRACE_FILES}: name the --output of a run with --trace that has "
            "finished a shard, or one such file"
        )
    num_verified = num_accepted = 0
    for file in files:
        try:
            table = pa.ipc.open_file(file.read_bytes()).read_all().select(["is_verified", "is_accepted"])
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise UserError(f"--trace {file} is not a trace of jobs/generate.py: {error}") from error
        num_verified += pc.sum(table["is_verified"]).as_py() or 0
        num_accepted += pc.sum(table["is_accepted"]).as_py() or 0
    if not num_verified:
        raise UserError(f"--trace {path} contains no verified token: give --acceptance instead")
    return float(num_accepted / num_verified)


@torch.inference_mode()
def measure_here(device: torch.device, dtype: torch.dtype) -> Gpu:
    """Time the product of a large matrix with one token, which reads it, and with many, which multiplies.

    The rates are those of kernels, so their efficiency is 1. On a host they are those of float32 with the
    engine's library.
    """
    height = MATRIX_BYTES[device.type] // (WIDTH * dtype.itemsize)
    layer = nn.Linear(WIDTH, height, bias=False, device=device, dtype=dtype)
    nn.init.constant_(layer.weight, 1e-3)
    linears = OneDnnLinears(layer)
    num_tokens = NUM_PRODUCT_TOKENS[device.type]
    with linears.active():
        one_s, many_s = (_median_s(layer, count, device, dtype) for count in (1, num_tokens))
    flops_per_s = 2 * WIDTH * height * num_tokens / many_s
    return Gpu(
        name=HERE,
        memory_bytes=_memory_bytes(device),
        bandwidth_bytes_per_s=WIDTH * height * dtype.itemsize / one_s,
        half_flops_per_s=flops_per_s,
        float_flops_per_s=flops_per_s,
        link_bytes_per_s=LINK_BYTES_PER_S,
        link_latency_s=PCIE_LATENCY_S,
        bandwidth_efficiency=1.0,
        arithmetic_efficiency=1.0,
        reserved_bytes=0,
        is_host=device.type == "cpu",
        figures="memory and products measured on this machine; launches, waits and links assumed",
    )


def _median_s(layer: nn.Module, num_tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    tokens = torch.ones(num_tokens, WIDTH, device=device, dtype=dtype)
    seconds = [timed(device, lambda: layer(tokens))[0] for _ in range(NUM_WARMUPS + NUM_PASSES)]
    return statistics.median(seconds[NUM_WARMUPS:])


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory_bytes()
