"""``jobs/plan.py`` from its options to its text and its JSON document."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from specdist.config.groups import MTP, DrawingOptions, values_of
from specdist.config.speculation import NGRAM
from specdist.data.store.files import write_atomically
from specdist.job.models.model_plan import unquantized_experts
from specdist.lab.plan import report
from specdist.lab.plan.advise import Planner, Site, Work, recommend
from specdist.lab.plan.basis import bases, bases_lines
from specdist.lab.plan.hardware import GB, TERA, find_gpu
from specdist.lab.plan.options import PlanConfig
from specdist.lab.plan.remedies import find_remedies
from specdist.lab.plan.shapes import EAGLE3, NAMED, eagle3_config, named_config
from specdist.models.drafters.files import head_config
from specdist.models.families.family_check import check_family
from specdist.models.files.checkpoint import CONFIG_NAME, Checkpoint, drafter_config
from specdist.models.sizes.sizes import ModelSize, size_of
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError
from specdist.utils.host import GIB


def planner_of(config: PlanConfig) -> Planner:
    """The models, the site and the work. Raises :class:`UserError`."""
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
    rests_on = bases(chosen, target, draft, site)
    parts += [
        report.plan_table(planner, chosen, config.gpu_price),
        report.reason(plans, chosen, planner),
        *(["\n".join([no_more, *helping])] if binds else []),
        bases_lines(rests_on),
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
