"""A plan as text, and for programs: tables, the reason for the recommendation, the JSON document, the options
of the run as a YAML file, and the commands that start it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import yaml

from specdist.config.groups import DrawingOptions
from specdist.data.run.manifest import ROWS_PER_SHARD, fewest_rows_per_shard
from specdist.job.totals.spending import price_per_million
from specdist.lab.plan.advise import WORTHWHILE, Plan, Site, Work
from specdist.lab.plan.memory import Fit
from specdist.lab.plan.options import PlanConfig
from specdist.lab.plan.shapes import SHAPES
from specdist.lab.plan.simulate import PREFILL_CHUNK_TOKENS, Mode
from specdist.models.sizes.sizes import ModelSize
from specdist.utils.host import GIB, MIB
from specdist.utils.table import Table

NAMES: dict[Mode, str] = {
    "target only": "target only",
    "colocated": "draft on rank 0",
    "synchronous": "draft GPU, synchronous",
    "asynchronous": "draft GPU, asynchronous",
    "branches": "draft GPU, branches",
}
SHARDS_PER_REPLICA = 4
GPU_LAUNCH = "jobs/accelerate/gpu8.yaml"
PROMPTS, OUTPUT = "PROMPTS", "OUTPUT"


def memory_table(fits: Sequence[tuple[Mode, int, Fit]], work: Work) -> str:
    """The memory of every GPU in GiB, and how many sequences of the full length fit."""
    rows: list[dict[str, str | int | None]] = []
    for mode, tp_size, fit in fits:
        for role, share in (("target", fit.target), ("draft", fit.draft)):
            if share is None:
                continue
            first = role == "target"
            rows.append(
                {
                    "mode": NAMES[mode].removesuffix(", asynchronous") if first else "",
                    "tp": tp_size if first else "",
                    "GPU of": "both" if mode == "colocated" else role,
                    "weights": _gib(share.weight_bytes),
                    "reserved": _gib(share.reserved_bytes),
                    "usable": _gib(share.usable_bytes),
                    "cache per sequence": _gib(share.cache_bytes_per_row, digits=4),
                    "max sequences": share.most_rows,
                    "": ("fits" if fit.most_rows else "does not fit") if first else "",
                }
            )
    table = Table.of(rows, num_names=2)
    return f"GiB per GPU, for sequences of {work.row_tokens} tokens:\n{table.console()}"


def plan_table(plans: Sequence[Plan], chosen: Plan | None, gpu_price: float | None = None) -> str:
    """One line per plan; the recommended one is marked."""
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
            "hours": f"{plan.hours:.3g}",
            **({} if price is None else {"price per M": f"{price:.3g}"}),
            "tokens/round": f"{found.tokens_per_round:.2f}",
            "round ms": f"{found.round_s * 1e3:.1f}",
            "target busy": f"{found.target_share:.0%}",
            "draft busy": f"{found.draft_share:.0%}" if found.draft_share else None,
            **({"states MiB/round": _mib(found.state_bytes_per_round)} if has_states else {}),
        }
        for plan in plans
        for found in [plan.prediction]
        for price in [price_per_million(gpu_price, plan.tokens_per_s_per_gpu)]
    ]
    return Table.of(rows, num_names=2).console()


def reason(plans: Sequence[Plan], chosen: Plan, target: ModelSize, site: Site) -> str:
    """Why this plan, in sentences."""
    gpu, width = site.gpu, target.bytes_per_number
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
    plain = next((plan for plan in plans if plan.settings.mode == "target only"), None)
    best = max(plans, key=lambda plan: plan.tokens_per_s)
    if chosen is plain:
        if len(plans) == 1:
            return f"Target only: there is no draft, or none fits. {limit}"
        return (
            f"Do not speculate: plain decoding with {_setting(plain)} gives {plain.tokens_per_s:,.0f} "
            f"tokens/s, and {NAMES[best.settings.mode]} {best.tokens_per_s / plain.tokens_per_s:.2f} times "
            f"that (worthwhile from {WORTHWHILE:g} on). {limit}"
        )
    name = NAMES[chosen.settings.mode]
    gain = "plain decoding does not fit"
    if plain is not None:
        per_gpu = chosen.tokens_per_s_per_gpu / plain.tokens_per_s_per_gpu
        gain = (
            f"{chosen.tokens_per_s / plain.tokens_per_s:.2f} times the tokens/s of plain decoding on the "
            f"same nodes ({per_gpu:.2f} times per GPU used)"
        )
    text = f"{name[0].upper()}{name[1:]} with {_setting(chosen)}: {gain}. {limit}"
    if chosen.settings.mode == "branches":
        text += (
            f" It takes {chosen.settings.num_branches} branches per sequence that catch "
            f"{chosen.settings.caught:.0%} of the misses, an assumption (--caught)."
        )
    return text


def _setting(plan: Plan) -> str:
    length = plan.settings.num_draft_tokens
    drafts = f" and {length} draft tokens" if length else ""
    ranks = f"tp_size {plan.tp_size}{' with whole experts' * plan.has_whole_experts}"
    return f"{ranks}, {plan.settings.num_rows} sequences{drafts}"


def _mib(num_bytes: float) -> str | None:
    return f"{num_bytes / MIB:.2f}" if num_bytes else None


def _gib(num_bytes: int, digits: int = 1) -> str:
    return f"{num_bytes / GIB:.{digits}f}"


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
        }
    if settings.mode == "colocated":
        options["draft_placement"] = "shared"
    options |= {
        **_given(config, "target_quantization"),
        **_given(config, "cache_dtype"),
        "dtype": config.dtype,
        "tp_size": plan.tp_size,
        **({"expert_parallel": "always"} if plan.has_whole_experts else {}),
        "max_num_seqs": settings.num_rows,
        "max_num_batched_tokens": max(PREFILL_CHUNK_TOKENS, 2 * settings.num_rows * block),
        **{
            item.name: getattr(config, item.name)
            for item in fields(DrawingOptions)
            if getattr(config, item.name) != item.default
        },
        "max_new_tokens": work.output_tokens,
        **_given(config, "gpu_price"),
    }
    options |= {"trust_remote_code": True} if config.trust_remote_code else {}
    longest = longest_row(plan, work, max_positions)
    if longest < max_positions:
        options["max_seq_len"] = longest
    if plan.num_replicas > 1:
        # A replica without a shard has nothing to do.
        num_shards = SHARDS_PER_REPLICA * plan.num_replicas
        wanted = min(ROWS_PER_SHARD, work.num_prompts // num_shards)
        options["rows_per_shard"] = max(1, wanted, fewest_rows_per_shard(work.num_prompts))
    return options


def _given(config: PlanConfig, name: str) -> dict[str, Any]:
    value = getattr(config, name)
    return {} if value is None else {name: value}


def shapes_note(options: dict[str, Any]) -> str | None:
    """A remark for a plan whose models are shapes; None for real models."""
    shapes = [str(options[name]) for name in ("target", "draft") if options.get(name) in SHAPES]
    if not shapes:
        return None
    return f"Replace {' and '.join(shapes)} by models of your own"


def run_yaml(options: dict[str, Any], command: str, launch: Sequence[str]) -> str:
    """The content of ``--output_config``; ``launch`` has the lines that say how to start it."""
    lines = [f"Planned by: {command}", *launch]
    note = shapes_note(options)
    if note is not None:
        lines.append(note)
    header = "".join(f"# {line}\n" for line in lines)
    return header + yaml.safe_dump(options, sort_keys=False)


def plan_document(plan: Plan, gpu_price: float | None = None) -> dict[str, Any]:
    """A plan for programs: bytes, seconds and counts."""
    names = (
        "tp_size", "num_gpus", "num_replicas", "num_prompts", "has_whole_experts", "most_rows",
        "tokens_per_s", "tokens_per_s_per_gpu", "hours",
    )  # fmt: skip
    price = price_per_million(gpu_price, plan.tokens_per_s_per_gpu)
    return {
        **asdict(plan.settings),
        "num_branches": plan.settings.num_branches,
        **asdict(plan.prediction),
        **{name: getattr(plan, name) for name in names},
        "num_processes": plan.num_gpus,
        **({} if price is None else {"price_per_million_tokens": price}),
        "memory": asdict(plan.fit),
    }


def launch_commands(plan: Plan, site: Site, options: Mapping[str, Any], config_path: str | None) -> list[str]:
    """One for each replica on a node, with words in place of paths. ``options`` are in the file
    ``config_path``, or else on the command line."""
    per_node = min(site.gpus_per_node // plan.num_gpus, plan.num_replicas)
    job = ["jobs/generate.py"]
    if config_path is not None:
        job += ["--config", config_path]
    else:
        job += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    job += ["--prompts", PROMPTS, "--output", OUTPUT]
    if plan.num_gpus == 1:
        words = ["python", *job]
    else:
        words = ["accelerate", "launch", "--config_file", GPU_LAUNCH]
        words += ["--num_processes", str(plan.num_gpus), *job]
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
