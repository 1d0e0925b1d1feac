"""``jobs/plan.py`` from its options to its text and its JSON document; and the plan of a call from Python."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from specdist.config.generate import GenerateConfig
from specdist.config.groups import MTP, DrawingOptions, values_of
from specdist.config.speculation import NGRAM
from specdist.data.store.files import write_atomically
from specdist.job.models.model_plan import unquantized_experts
from specdist.lab.plan import report
from specdist.lab.plan.advise import MOST_GPUS, WORTHWHILE, Plan, Planner, Site, Work, recommend
from specdist.lab.plan.hardware import GB, GPUS, TERA, find_gpu
from specdist.lab.plan.options import PlanConfig
from specdist.lab.plan.shapes import EAGLE3, NAMED, eagle3_config, named_config
from specdist.lab.plan.simulate import OWN_GPU
from specdist.models.drafters.files import head_config
from specdist.models.families.family_check import check_family
from specdist.models.files.checkpoint import CONFIG_NAME, MOST_POSITIONS, Checkpoint, drafter_config
from specdist.models.sizes.sizes import ModelSize, size_of
from specdist.policies.registry import AUTO
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError
from specdist.utils.host import GIB

# What a call does not say: which share of drafted tokens is accepted, and how many bytes a token has.
TYPICAL_ACCEPTANCE, TOKEN_BYTES = 0.7, 4

logger = logging.getLogger(__name__)


def planner_of(config: PlanConfig, memory_bytes: Mapping[str, int] | None = None) -> Planner:
    """The models, the site and the work. ``memory_bytes``: of GPUs by name, in place of the table's. Raises
    :class:`UserError`."""
    common = {"trust_remote_code": config.trust_remote_code, "has_float8_cache": bool(config.cache_dtype)}
    target, dtype = open_model(
        "--target", config.target, config.dtype, quantization=config.target_quantization, **common
    )
    draft = None
    if config.draft not in (None, NGRAM):
        of_target = config.draft == MTP or (config.draft == EAGLE3 and not Path(EAGLE3).exists())
        # Without --dtype each model has its own, as in the job.
        name, drafter = (config.target, config.draft) if of_target else (config.draft, None)
        draft, _ = open_model(
            "--draft", name, config.dtype, quantization=config.draft_quantization, drafter=drafter, **common
        )
        if draft.num_read_numbers and config.draft_quantization is not None:
            raise UserError(
                f"--draft_quantization {config.draft_quantization} is for a draft model of its own, and "
                f"--draft {config.draft} reads the target's states: leave it out"
            )
    work = Work(
        prompt_tokens=config.prompt_tokens,
        output_tokens=config.output_tokens,
        num_prompts=config.num_prompts,
        acceptance=config.acceptance or 0.0,
        caught=config.caught,
        expert_parallel=config.expert_parallel,
        uses_ngrams=config.draft == NGRAM,
        sampling=SamplingSettings(**values_of(config, DrawingOptions)),
    )
    for model in filter(None, (target, draft)):
        if work.row_tokens > model.max_positions:
            raise UserError(
                f"--prompt_tokens {work.prompt_tokens} and --output_tokens {work.output_tokens} make "
                f"{work.row_tokens} tokens, but {model.name} supports {model.max_positions}: lower one"
            )
    if config.expert_parallel == "always" and not target.experts:
        raise UserError(
            f"--expert_parallel always: {config.target} has no experts to share out: leave it out"
        )
    gpu = find_gpu(config.gpu, dtype, config.calibration)
    gpu = dataclasses.replace(gpu, memory_bytes=(memory_bytes or {}).get(gpu.name, gpu.memory_bytes))
    site = Site(gpu, config.gpus_per_node, config.nodes, max_num_seqs=config.max_num_seqs, dtype=dtype)
    return Planner(target, draft, site, work)


def run_plan(config: PlanConfig, command: str) -> tuple[str, dict[str, Any]]:
    """The text to print, and the document. Raises :class:`UserError`."""
    planner = planner_of(config)
    target, draft, site, work = planner.target, planner.draft, planner.site, planner.work
    fits = planner.fits()
    parts = [_describe(target, draft, site), report.memory_table(fits, work, site.gpu)]
    notes = filter(None, map(unquantized_experts, (target, draft)))
    parts += [f"{note}. With it a checkpoint that stores them one by one is refused." for note in notes]
    models = {"target": target, "draft": draft}
    document: dict[str, Any] = {
        "gpu": dataclasses.asdict(site.gpu),
        "num_parameters": {role: model and model.num_parameters for role, model in models.items()},
        "num_active": {role: model and model.num_active for role, model in models.items()},
        "acceptance": config.acceptance,
        "memory": [
            {"mode": mode, "tp_size": tp_size, "fits": fit.most_rows > 0, **dataclasses.asdict(fit)}
            for mode, tp_size, fit in fits
        ],
    }
    plans = planner.best_plans()
    chosen = recommend(plans)
    binds = chosen is None or chosen.settings.num_rows == chosen.fit.most_rows
    helping = [*find_remedies(config, planner, chosen, planner_of)] if binds else []
    if chosen is None:
        alone = "What does, each option alone, for the target without a draft:"
        raise UserError(
            f"--target {config.target} does not fit {site.gpus_per_node} x {site.gpu.name}. "
            f"{alone if helping else 'Choose a smaller model.'}\n" + "\n".join([*helping, *parts[1:]])
        )
    more = "Each of these options alone gives more (with 8 bits the output follows the target that has them):"
    no_more = (
        f"Memory allows no more sequences. {more if helping else 'No option gives clearly more per GPU.'}"
    )
    max_positions = min(model.max_positions for model in (target, draft) if model is not None)
    options = report.run_options(config, chosen, work, max_positions=max_positions)
    commands = report.launch_commands(chosen, site, options, config.output_config)
    num_nodes = -(-chosen.num_replicas // len(commands))
    launch = report.launch_lines(commands, num_nodes)
    if config.output_config is not None:
        _write_config(config.output_config, report.run_yaml(options, command, launch))
    longest = options.get("max_seq_len", max_positions)
    rests_on = report.bases(chosen, target, draft, site)
    parts += [
        report.plan_table(planner, chosen, config.gpu_price),
        report.reason(plans, chosen, planner),
        *(["\n".join([no_more, *helping])] if binds else []),
        report.bases_lines(rests_on),
        f"Prompt and completion need {work.row_tokens:,} tokens together, and may have {longest:,} "
        "(--max_seq_len); a longer prompt becomes an error row.",
        "\n".join([*launch, *filter(None, [report.shapes_note(options)])]),
    ]
    document |= {
        "plans": [report.plan_document(plan, config.gpu_price) for plan in plans],
        "recommended": report.plan_document(chosen, config.gpu_price),
        "rests_on": rests_on,
        "options": options,
        "launch": {"commands": commands, "num_nodes": num_nodes},
    }
    return "\n\n".join(parts), document


def plan_call(config: GenerateConfig, gpus: Sequence[int], num_rows: int, num_bytes: int) -> Plan | None:
    """The plan of a run over ``num_rows`` prompts, of ``num_bytes`` in all, on these of torch's GPUs: all are
    taken to be like the one with the least memory, and that to be the nearest of the table.

    None if there is none for these models or lengths; the log says why. Raises :class:`UserError` if nothing
    fits, with what would.
    """
    least = min(map(torch.cuda.get_device_properties, gpus), key=lambda found: found.total_memory)
    nearest = sorted(GPUS.values(), key=lambda gpu: abs(gpu.memory_bytes - least.total_memory))
    gpu = min(nearest, key=lambda gpu: not gpu.is_named(least.name)).name
    here = functools.partial(planner_of, memory_bytes={gpu: least.total_memory})
    known = {item.name for item in dataclasses.fields(PlanConfig)}
    asked = {name: value for name, value in vars(config).items() if name in known}
    asked |= {"gpu": gpu, "gpus_per_node": len(gpus), "max_num_seqs": config.most_seqs("cuda")}
    asked |= {"num_prompts": num_rows * config.num_samples, "output_tokens": config.max_new_tokens}
    asked["prompt_tokens"] = max(1, num_bytes // max(1, num_rows) // TOKEN_BYTES)
    asked |= {"acceptance": TYPICAL_ACCEPTANCE} if config.uses_draft else {"draft": None, "acceptance": None}
    try:
        options = PlanConfig(**asked)
        planner = here(options)
    except UserError as error:
        logger.info("a replica has the default number of GPUs, since there is no plan: %s", error)
        return None
    modes = [mode for mode in planner.modes if (mode != "target only") == config.uses_draft]
    if config.overlap != AUTO:
        modes = [mode for mode in modes if (mode in OWN_GPU[1:]) == config.is_asynchronous]
    plans = [plan for mode in modes for plan in planner.by_ranks(mode)]
    positions = [model.max_positions for model in (planner.target, planner.draft) if model is not None]
    longest = min(config.max_seq_len or MOST_POSITIONS, *positions)
    # The job makes sure to have room for one such sequence.
    roomy = [plan for plan in plans if plan.fit.most_rows * planner.work.row_tokens >= longest]
    best = {plan.settings.mode: plan for plan in sorted(roomy or plans, key=lambda plan: plan.tokens_per_s)}
    chosen = recommend([best[mode] for mode in modes if mode in best])
    where = f"{len(gpus)} x {least.name}"
    if chosen is None:
        if config.uses_draft and planner.best("target only") is not None:
            raise UserError(f"the target fits {where}, but not beside draft {config.draft}: leave it out")
        helping = [*find_remedies(options, planner, None, here)] or ["- a smaller model"]
        does = f"{where}. What does, each option of jobs/plan.py alone, for the target without a draft:"
        raise UserError("\n".join([f"--target {config.target} does not fit {does}", *helping]))
    placed = f"{chosen.num_replicas} x ({report.NAMES[chosen.settings.mode]}, {report.setting(chosen)})"
    logger.info("%s, the most tokens/s of %d plans for %s (%s)", placed, len(plans), where, gpu)
    return chosen


def find_remedies(
    config: PlanConfig, planner: Planner, chosen: Plan | None, plan_with: Callable[[PlanConfig], Planner]
) -> Iterator[str]:
    """What helps where memory binds, each planned with, as lines with an option to type and what it gives: of
    each option the first value with which the target fits, where nothing does (``chosen`` is None), or with
    which a GPU has clearly more tokens per second. ``plan_with``: of other options; it may refuse them."""
    for name, values in _options_that_may_help(config, planner, does_fit=chosen is not None):
        for value in values:
            try:
                other = plan_with(dataclasses.replace(config, **{name: value}))
            except UserError:
                continue
            plan = other.best("target only" if chosen is None else chosen.settings.mode)
            gain = plan and (plan.tokens_per_s_per_gpu / (chosen or plan).tokens_per_s_per_gpu)
            if plan and gain and (chosen is None or gain >= WORTHWHILE):
                times = f", {gain:.2f} times per GPU" if chosen else ""
                rate = f"{plan.tokens_per_s:,.0f} tokens/s{times}"
                yield f"- --{name} {value}: {rate} ({plan.num_replicas} x {report.setting(plan)})"
                break


def _options_that_may_help(
    config: PlanConfig, planner: Planner, *, does_fit: bool
) -> Iterator[tuple[str, list[Any]]]:
    yield "cache_dtype", ["float8"]
    # Experts are not quantised while they are loaded, and a checkpoint may be refused.
    yield "target_quantization", [] if planner.target.experts else ["float8", "int8"]
    yield "draft_quantization", ["int8"] if planner.draft and does_fit else []
    yield "gpus_per_node", [num for num in (2, 4, MOST_GPUS) if num > config.gpus_per_node]
    if not does_fit:
        gpus = sorted(GPUS.values(), key=lambda gpu: gpu.memory_bytes)
        yield "gpu", [gpu.name for gpu in gpus if gpu.memory_bytes > planner.site.gpu.memory_bytes]
        yield "prompt_tokens", [config.prompt_tokens >> halved for halved in range(1, 9)]


def _write_config(path: str, content: str) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(path), lambda file: file.write(content.encode()))
    except OSError as error:
        raise UserError(f"--output_config {path} cannot be written: {error}") from error


def _describe(target: ModelSize, draft: ModelSize | None, site: Site) -> str:
    gpu = site.gpu
    models = " and ".join(
        f"{model.name} ({model.num_parameters / 1e9:.2f}B"
        + (f", {model.num_active / 1e9:.2f}B of them active)" if model.experts else ")")
        for model in (target, draft)
        if model is not None
    )
    rate = gpu.sustained_flops_per_s(target.bytes_per_number) / TERA
    return (
        f"{models} in {site.dtype} on {site.num_nodes} x {site.gpus_per_node} {gpu.name}: "
        f"{gpu.memory_bytes / GIB:.1f} GiB, {gpu.sustained_bytes_per_s / GB:,.0f} GB/s and "
        f"{rate:,.2f} TFLOP/s\n"
        f"Figures of the GPU: {gpu.figures}"
    )


@functools.cache
def open_model(
    option: str,
    name: str,
    dtype: str,
    *,
    trust_remote_code: bool = False,
    quantization: str | None = None,
    drafter: str | None = None,
    has_float8_cache: bool = False,
) -> tuple[ModelSize, str]:
    """The sizes of a model, and the type of its numbers, by its name or from its configuration alone; with
    ``drafter`` those of its own head, or of a draft of its shape.

    Raises :class:`UserError` if it cannot be read, or its family is not supported.
    """
    if name in NAMED and not Path(name).exists():
        config = named_config(name)
    elif (Path(name) / CONFIG_NAME).is_file():
        config = drafter_config(option, name, Path(name))
    else:
        config = None
    if config is None:
        try:
            if re.fullmatch(r"[\d.]+[bm]", name.lower()):
                raise ValueError("there is no such shape")
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
    if drafter is not None:
        own = head_config(config, MTP, name) if drafter == MTP else eagle3_config(config)
        model = dataclasses.replace(model, name=drafter, config=own)
    torch_dtype = model.torch_dtype(dtype)
    return size_of(model, torch_dtype.itemsize), str(torch_dtype).removeprefix("torch.")
