"""A plan as text, and for programs: tables, the reason for the recommendation, the JSON document, the options
of the run as a YAML file, and the commands that start it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, get_args

import yaml

from specdist.config.groups import DrawingOptions, values_of
from specdist.data.run.manifest import ROWS_PER_SHARD, fewest_rows_per_shard
from specdist.job.totals.spending import price_per_million
from specdist.lab.plan.advise import WORTHWHILE, Plan, Planner, Site, Work
from specdist.lab.plan.hardware import MEASURED_RATES, PUBLISHED, Gpu
from specdist.lab.plan.memory import Fit
from specdist.lab.plan.options import PlanConfig
from specdist.lab.plan.shapes import EAGLE3, SHAPES
from specdist.lab.plan.simulate import OWN_GPU, PREFILL_CHUNK_TOKENS, Mode
from specdist.models.sizes.sizes import ModelSize
from specdist.utils.host import GIB, MIB
from specdist.utils.table import Table

NAMES: dict[Mode, str] = {
    "target only": "target only",
    "colocated": "draft on rank 0",
    "synchronous": "draft GPU, synchronous",
    "asynchronous": "draft GPU, asynchronous",
    "branches": "draft GPU, branches",
    "n-grams": "n-gram lookup",
}
COLUMNS = """tp: GPUs of the target; GPUs: of a replica, with the draft's own; replicas: side by side
batch: sequences at a time in a replica; K: draft tokens; tokens/s: of all replicas; per GPU: of those in use
time: of the run; price: of all GPUs of used nodes; tokens/round: of a sequence by a pass; busy: its share"""
PARTS = ("weights", "buffers", "driver")
SHARDS_PER_REPLICA = 4
GPU_LAUNCH = "jobs/accelerate/gpu8.yaml"
PROMPTS, OUTPUT = "PROMPTS", "OUTPUT"
# How a figure is known.
Basis = Literal[
    "measured",
    "fitted to published figures",
    "assumed, near published figures",
    "assumed, confirmed by nobody",
]
BASES = MEASURED, FITTED, NEAR, ASSUMED = get_args(Basis)
# Forwards on an H200, or figures of other engines, are near those of the assumed shares of these GPUs' peaks.
CONFIRMED = ("b200", "h200", "h100-sxm", "a100-80")


def memory_table(fits: Sequence[tuple[Mode, int, Fit]], work: Work, gpu: Gpu) -> str:
    """The memory of every GPU in GiB, and how many sequences of the full length fit. The parts add up to all
    of it as they are shown."""
    rows: list[dict[str, str | int | None]] = []
    for mode, tp_size, fit in fits:
        for role, share in (("target", fit.target), ("draft", fit.draft)):
            if share is None:
                continue
            first = role == "target"
            taken = (share.weight_bytes, share.reserved_bytes, gpu.reserved_bytes)
            gib = dict(zip(PARTS, (round(num / GIB, 1) for num in taken), strict=True))
            left = round(gpu.memory_bytes / GIB, 1) - sum(gib.values())
            lacking = (share.weight_bytes + share.cache_bytes_per_row - share.usable_bytes) / GIB
            rows.append(
                {
                    "mode": NAMES[mode].removesuffix(", asynchronous") if first else "",
                    "tp": tp_size if first else "",
                    "GPU of": "both" if mode == "colocated" else role,
                    **{name: f"{num:.1f}" for name, num in gib.items()},
                    "cache": f"{left:.1f}" if share.most_rows else None,
                    "of a sequence": f"{share.cache_bytes_per_row / GIB:.4f}",
                    "max sequences": share.most_rows or None,
                    "": "fits" if share.most_rows else f"lacks {max(0.1, lacking):.1f} GiB",
                }
            )
    table = Table.of(rows, num_names=2)
    return (
        f"GiB per GPU, for sequences of {work.row_tokens} tokens: {gpu.memory_bytes / GIB:.1f} = weights + "
        "buffers (of passes with so many sequences, CUDA graphs, NCCL, and what fragments) + driver + cache\n"
        + table.console()
    )


def plan_table(planner: Planner, chosen: Plan, gpu_price: float | None = None) -> str:
    """A line for each mode, of the recommended plan's, which is marked, for each number of ranks, and words
    for those that do not fit; and what the columns are."""
    plans: list[Plan] = []
    for plan in planner.best_plans():
        plans += planner.by_ranks(plan.settings.mode) if plan is chosen else [plan]
    missing = [mode for mode in planner.modes if planner.best(mode) is None]
    has_states = any(plan.prediction.state_bytes_per_round for plan in plans)
    rows: list[dict[str, str | int | None]] = [
        {
            "": "=>" if plan is chosen else "",
            "mode": NAMES[plan.settings.mode],
            "tp": plan.tp_size,
            "GPUs": plan.num_gpus,
            "replicas": plan.num_replicas,
            "batch": plan.settings.num_rows,
            "K": plan.settings.num_draft_tokens or None,
            "tokens/s": f"{plan.tokens_per_s:,.0f}",
            "per GPU": f"{plan.tokens_per_s_per_gpu:,.0f}",
            "time": _time(plan.hours),
            **({} if price is None else {"price per M": f"{price:.3g}"}),
            "tokens/round": f"{found.tokens_per_round:.2f}",
            "round ms": f"{found.round_s * 1e3:.1f}",
            "target busy": f"{found.target_share:.0%}",
            "draft busy": f"{found.draft_share:.0%}" if found.draft_share else None,
            **({"states MiB/round": f"{states:.2f}" if states else None} if has_states else {}),
        }
        for plan in plans
        for found, states in [(plan.prediction, plan.prediction.state_bytes_per_round / MIB)]
        for price in [price_per_million(gpu_price, plan.tokens_per_s / plan.num_paid)]
    ]
    words = ({"": "", "mode": f"{NAMES[mode]}: {planner.why_missing(mode)}"} for mode in missing)
    rows += [dict.fromkeys(rows[0]) | each for each in words]
    return f"{Table.of(rows, num_names=2).console()}\n{COLUMNS}"


def reason(plans: Sequence[Plan], chosen: Plan, planner: Planner) -> str:
    """Why this plan, in sentences."""
    target, gpu = planner.target, planner.site.gpu
    width = target.bytes_per_number
    free_tokens = gpu.sustained_flops_per_s(width) * width / (2 * gpu.sustained_bytes_per_s)
    if (rates := gpu.products.get(target.product or "")) is not None:
        narrow_width = target.quantized_bytes / target.num_quantized
        free_tokens *= rates.computes / rates.reads * narrow_width / width
    reads = [(target.streamed_bytes(1) + target.expert_bytes(1, count)) / GIB for count in (1, 8, 64)]
    limit = (
        "A target pass reads the experts that any of its tokens chooses: of the weights {:.1f} GiB for a "
        "token, {:.1f} for 8 and up to {:.1f} for 64".format(*reads)
        if target.experts
        else f"A target pass takes the time of reading the weights for up to about {free_tokens:.0f} tokens; "
        "beyond that, its time grows with the number of tokens"
    )
    limit += f"; its passes have {chosen.prediction.tokens_per_pass:.0f}."
    # It fits where anything does.
    plain = plans[0]
    if chosen is plain:
        if len(plans) == 1:
            why = "no --draft is given" if len(planner.modes) == 1 else "with the draft nothing fits"
            return f"Target only: {why}. {limit}"
        best = max(plans[1:], key=lambda plan: plan.tokens_per_s)
        return (
            f"Do not speculate: plain decoding with {setting(plain)} gives {plain.tokens_per_s:,.0f} "
            f"tokens/s, and {NAMES[best.settings.mode]} {best.tokens_per_s / plain.tokens_per_s:.2f} times "
            f"that (worthwhile from {WORTHWHILE:g} on). {limit}"
        )
    name = NAMES[chosen.settings.mode]
    per_gpu = chosen.tokens_per_s_per_gpu / plain.tokens_per_s_per_gpu
    text = (
        f"{name[0].upper()}{name[1:]} with {setting(chosen)}: {chosen.tokens_per_s / plain.tokens_per_s:.2f} "
        f"times the tokens/s of plain decoding on the same nodes ({per_gpu:.2f} times per GPU used). {limit}"
    )
    if chosen.settings.mode == "branches":
        text += (
            f" It takes {chosen.settings.num_branches} branches per sequence that catch "
            f"{chosen.settings.caught:.0%} of the misses, an assumption (--caught)."
        )
    return text


def setting(plan: Plan) -> str:
    """In words."""
    length, num_rows = plan.settings.num_draft_tokens, plan.settings.num_rows
    drafts = f" and {length} draft tokens" if length else ""
    ranks = f"tp_size {plan.tp_size}{' with whole experts' * plan.has_whole_experts}"
    return f"{ranks}, {num_rows} sequence{'s' * (num_rows > 1)}{drafts}"


def _time(hours: float) -> str:
    if hours < 1 / 30:
        return f"{hours * 3600:.2g} s"
    return f"{hours * 60:.0f} min" if hours < 2 else f"{hours:,.3g} h"


def longest_row(plan: Plan, work: Work, max_positions: int) -> int:
    """The ``--max_seq_len`` of the run: what the models support, or else what half of the cache holds.

    ``work`` has the lengths of a typical row, and some prompts are longer. Only half of the cache, because
    its size at the start of the run is an estimate.
    """
    return min(max_positions, max(work.row_tokens, plan.fit.most_rows * work.row_tokens // 2))


def run_options(config: PlanConfig, plan: Plan, work: Work, *, max_positions: int) -> dict[str, Any]:
    """The options of ``jobs/generate.py`` for the plan, except ``--prompts`` and ``--output``.

    ``max_positions``: the longest sequence that both models support.
    """
    settings, longest = plan.settings, longest_row(plan, work, max_positions)
    drawing = values_of(config, DrawingOptions)
    drafts, block = settings.mode != "target only", settings.num_draft_tokens + 1
    options: dict[str, Any] = {
        "target": config.target,
        # How much it drafts, and when, is left to the run, which measures and learns.
        "draft": config.draft if drafts else None,
        "draft_quantization": config.draft_quantization if drafts else None,
        "draft_placement": "shared" if settings.mode == "colocated" else None,
        "target_quantization": config.target_quantization,
        "cache_dtype": config.cache_dtype,
        "dtype": config.dtype,
        "tp_size": plan.tp_size,
        "expert_parallel": "always" if plan.has_whole_experts else None,
        "max_num_seqs": settings.num_rows,
        "max_num_batched_tokens": max(PREFILL_CHUNK_TOKENS, 2 * settings.num_rows * block),
        **{name: value for name, value in drawing.items() if value != getattr(DrawingOptions, name)},
        "max_new_tokens": work.output_tokens,
        "gpu_price": config.gpu_price,
        "trust_remote_code": config.trust_remote_code or None,
        "max_seq_len": longest if longest < max_positions else None,
    }
    if plan.num_replicas > 1:
        # A replica without a shard has nothing to do.
        num_shards = SHARDS_PER_REPLICA * plan.num_replicas
        wanted = min(ROWS_PER_SHARD, work.num_prompts // num_shards)
        options["rows_per_shard"] = max(1, wanted, fewest_rows_per_shard(work.num_prompts))
    return {name: value for name, value in options.items() if value is not None}


def shapes_note(options: dict[str, Any]) -> str | None:
    """A remark for a plan whose models are shapes; None for real models."""
    shapes = [str(options[name]) for name in ("target", "draft") if options.get(name) in (*SHAPES, EAGLE3)]
    return f"Replace {' and '.join(shapes)} by models of your own" if shapes else None


def run_yaml(options: dict[str, Any], command: str, launch: Sequence[str]) -> str:
    """The content of ``--output_config``; ``launch`` has the lines that say how to start it."""
    lines = [f"Planned by: {command}", *launch, *filter(None, [shapes_note(options)])]
    header = "".join(f"# {line}\n" for line in lines)
    return header + yaml.safe_dump(options, sort_keys=False)


def plan_document(plan: Plan, gpu_price: float | None = None) -> dict[str, Any]:
    """A plan for programs: bytes, seconds and counts."""
    names = (
        "tp_size", "num_gpus", "num_paid", "num_replicas", "has_whole_experts",
        "tokens_per_s", "tokens_per_s_per_gpu", "hours",
    )  # fmt: skip
    price = price_per_million(gpu_price, plan.tokens_per_s / plan.num_paid)
    return {
        **asdict(plan.settings),
        "num_branches": plan.settings.num_branches,
        **asdict(plan.prediction),
        **{name: getattr(plan, name) for name in names},
        "num_processes": plan.num_gpus,
        "num_prompts": plan.work.num_prompts,
        "most_rows": plan.fit.most_rows,
        **({} if price is None else {"price_per_million_tokens": price}),
        "memory": asdict(plan.fit),
    }


def launch_commands(plan: Plan, site: Site, options: Mapping[str, Any], config_path: str | None) -> list[str]:
    """One for each replica on a node, with words in place of paths. ``options`` are in the file
    ``config_path``, or else on the command line."""
    per_node = min(site.gpus_per_node // plan.num_gpus, plan.num_replicas)
    given = {"config": config_path} if config_path is not None else options
    words = ["jobs/generate.py"]
    for name, value in {**given, "prompts": PROMPTS, "output": OUTPUT}.items():
        words += [f"--{name}", str(value)]
    several = ["accelerate", "launch", "--config_file", GPU_LAUNCH, "--num_processes", str(plan.num_gpus)]
    words = [*(several if plan.num_gpus > 1 else ["python"]), *words]
    commands = []
    for replica in range(per_node):
        first = replica * plan.num_gpus
        gpus = ",".join(map(str, range(first, first + plan.num_gpus)))
        # A single replica takes the first visible GPUs.
        prefix = f"CUDA_VISIBLE_DEVICES={gpus} " if per_node > 1 else ""
        commands.append(prefix + shlex.join(words))
    return commands


def launch_lines(commands: Sequence[str], num_nodes: int) -> list[str]:
    """The text: a heading and the commands of a node."""
    title = "Launch"
    if len(commands) > 1:
        title += f" {len(commands)} replicas side by side"
    if num_nodes > 1:
        title += f", on each of {num_nodes} nodes"
    if len(commands) * num_nodes > 1:
        title += "; they share the prompts through the output folder"
    return [f"{title} (with your paths in place of {PROMPTS} and {OUTPUT}):", *commands]


def bases(plan: Plan, target: ModelSize, draft: ModelSize | None, site: Site) -> dict[Basis, list[str]]:
    """What the plan rests on, by how it is known. ``draft``: None of one without."""
    found: dict[Basis, list[str]] = {basis: [] for basis in BASES}
    for basis, what in _found(plan, target, None if plan.settings.mode == "target only" else draft, site):
        found[basis].append(what)
    return found


def bases_lines(found: dict[Basis, list[str]]) -> str:
    """The same as text."""
    lines = [f"- {basis}: {'; '.join(whats)}" for basis, whats in found.items() if whats]
    return "\n".join(["The plan rests on figures that are", *lines])


def _found(plan: Plan, target: ModelSize, draft: ModelSize | None, site: Site) -> Iterator[tuple[Basis, str]]:
    gpu, is_calibrated = site.gpu, site.gpu.figures != PUBLISHED
    models = [target] if draft is None else [target, draft]
    shares = "what kernels reach of the GPU's peaks, and a kernel's, a launch's and a wait's times"
    if is_calibrated:
        yield MEASURED, "the GPU's memory, products, launches and waits"
    elif gpu.name in CONFIRMED:
        yield NEAR, shares
    else:
        yield ASSUMED, shares
    yield ASSUMED, "products of few tokens as fast as cuBLAS's (the project's kernel was never timed)"
    yield MEASURED, "kernels and waits of a pass (counted); attention's rate (one H200)"
    yield FITTED, "rates of reading the cache, and a sequence's host time"
    yield ASSUMED, "0.5 ms of the host's in a round (1.0 to 2.6 on one H200)"
    for kind in dict.fromkeys(model.product for model in models if model.num_quantized):
        if kind in gpu.products:
            elsewhere = "" if gpu.name == "h200" else f", taken for the {gpu.name}"
            if gpu.products[kind] == MEASURED_RATES[kind]:  # else among the GPU's own
                yield MEASURED, f"{kind} products (one matrix on one H200{elsewhere})"
            elif not is_calibrated:
                yield ASSUMED, f"{kind} products at the {gpu.name}'s published rate"
        else:
            yield ASSUMED, "quantised layers are written in 16 bits and read again"
    if any(model.experts for model in models):
        yield FITTED, "experts (TensorRT-LLM's: this engine's were never timed)"
        yield ASSUMED, "tokens choose experts uniformly"
    if plan.tp_size > 1 and not any(one.num_ranks == plan.tp_size for one in gpu.sums):
        yield ASSUMED, f"sums over {plan.tp_size} GPUs"
    if plan.settings.mode in OWN_GPU:
        yield ASSUMED, "0.2 ms for messages to the draft's GPU and back"
    if (mode := plan.settings.mode) == "n-grams":
        yield MEASURED, "the lookup's time (a host's core)"
    if mode != "target only":
        match = ", and a match in every round" * (mode == "n-grams")
        yield ASSUMED, f"an acceptance of {plan.settings.acceptance:g} for every token (--acceptance){match}"
