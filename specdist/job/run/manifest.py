"""What the manifest of a run says: what decides its rows (a relaunch with another fingerprint is another
run), and what is to be known of it besides.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from typing import Any

from specdist.config.generate import GenerateConfig
from specdist.config.processing import ProcessingOptions
from specdist.data.file_names import RUN_TAG
from specdist.data.formats.messages import TOOLS
from specdist.data.formats.prompts import Prompts
from specdist.data.run.manifest import COMPLETIONS_PER_SHARD, UP_TO_ROUNDING, Manifest, ShardPlan
from specdist.data.store.files import unique_tag
from specdist.data.store.storage import is_url
from specdist.job.models.model_plan import ModelPlan
from specdist.job.ranks.topology import Topology
from specdist.job.rollouts.pool import check_function
from specdist.job.texts.template_clock import clock_info
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.heads.head import DraftHead
from specdist.models.passes.all_reduce import SUMS
from specdist.models.passes.products import PRODUCTS
from specdist.models.quantized.quantized import quantization_of
from specdist.policies.registry import AUTO
from specdist.utils.packages import version_of

# Stands for a draft's fingerprint: its rule decides where blocks end, and so the tokens of a seed.
NGRAMS_OF_OWN_TOKENS = "prompt lookup in a sequence's own tokens"
# The field of ``info`` that tells whether ranks of the target have whole experts.
EXPERT_PARALLEL = "expert_parallel"
LIBRARIES = ("torch", "transformers", "deepspeed", "accelerate", "datasets", "pyarrow")


def run_manifest(
    config: GenerateConfig,
    models: ModelPlan,
    prompts: Prompts,
    topology: Topology,
    shards: ShardPlan | None = None,
) -> Manifest:
    """The fingerprint, which decides a run's rows, and further information on the run."""
    shards = shards or ShardPlan.of(prompts.num_rows, config.rows_per_shard)
    sums = shards.completions_per_shard
    info = {
        **({} if sums is None else {COMPLETIONS_PER_SHARD: sums}),
        **_info(config, models, topology),
        **({RUN_TAG: unique_tag()} if is_url(config.output) else {}),
        **(clock_info() if prompts.is_chat else {}),
    }
    fingerprint = run_fingerprint(
        config, prompts, shards, models.target, models.draft, models.head, max_seq_len=models.max_seq_len
    )
    if config.rollout is not None:
        fingerprint["rollout_sha256"] = check_function(config.rollout)
    return Manifest(fingerprint=fingerprint | models.constraints.fingerprint, info=info)


def frozen_models(config: GenerateConfig, models: ModelPlan, info: Mapping[str, Any]) -> ModelPlan:
    """The models with experts shared out as in a run that has begun, if it has as many ranks and the option
    says nothing else, and with its sums over them and its products."""
    if info.get("tp_size") != config.tp_size:
        return models
    models = dataclasses.replace(models, sums=info.get(SUMS), products=info.get(PRODUCTS))
    if config.expert_parallel != AUTO:
        return models
    return dataclasses.replace(models, is_expert_parallel=info.get(EXPERT_PARALLEL, False))


def run_fingerprint(
    config: GenerateConfig,
    prompts: Prompts,
    shards: ShardPlan,
    target: Checkpoint,
    draft: Checkpoint | None,
    head: DraftHead | None,
    *,
    max_seq_len: int,
) -> dict[str, Any]:
    """Everything that decides a row's completion, or the file that it is in."""
    return {
        "prompts": prompts.fingerprint,
        "prompt_column": config.prompt_column,
        "messages_column": config.messages_column,
        **config.chat_fingerprint,
        **({} if config.turns_column is None else {"turns_column": config.turns_column}),
        **({} if prompts.template is None else prompts.template.fingerprint),
        **config.rollout_fingerprint,
        # Earlier versions did not read it.
        **({"tools_column": TOOLS} if prompts.has_tools else {}),
        "num_rows": prompts.num_rows,
        "rows_per_shard": shards.rows_per_shard,
        "target": target.fingerprint(),
        "draft": draft.fingerprint() if draft else NGRAMS_OF_OWN_TOKENS if config.uses_ngrams else None,
        "dtype": config.dtype,
        "policy": config.policy,
        "num_draft_tokens": None,
        **config.policy_options,
        **_head_fingerprint(config, head),
        "acceptance": config.acceptance,
        "overlap": config.overlap,
        "num_branches": config.num_branches if config.is_asynchronous or config.chooses_rounds else None,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        **_processing_fingerprint(config),
        "max_new_tokens": config.max_new_tokens,
        "max_seq_len": max_seq_len,
        "stop": config.stop,
        **({"stop_repeats": config.stop_repeats} if config.stop_repeats else {}),
        "num_samples": config.num_samples,
        "seed": config.seed,
        # Other code may compute something else from the same weights.
        **({"trust_remote_code": True} if config.trust_remote_code else {}),
        **_changes_fingerprint(target, draft),
        **({} if config.cache_dtype is None else {"cache_dtype": config.cache_dtype}),
        # The same numbers, rounded elsewhere.
        **({"model_impl": config.model_impl} if config.model_impl != "auto" else {}),
        # Rows that were generated without a trace cannot get one later.
        **({"trace": True} if config.is_traced else {}),
    }


def _processing_fingerprint(config: GenerateConfig) -> dict[str, Any]:
    """The options that change a logit; older runs do not have them."""
    neutral = {**vars(ProcessingOptions()), "row_options": None}
    values = {name: getattr(config, name) for name in neutral}
    found = {name: value for name, value in values.items() if value and value != neutral[name]}
    # Rows that were generated without them cannot get them later.
    written = {name: getattr(config, name) for name in ("logprobs", "prompt_logprobs")}
    return found | {name: value for name, value in written.items() if value is not None}


def _head_fingerprint(config: GenerateConfig, head: DraftHead | None) -> dict[str, Any]:
    """The head of a policy that reads one, identified by its weights, not by its folder."""
    if head is None:
        return {}
    found = {"head": head.info.weights_sha256}
    return found if config.verify is None else {**found, "verify": config.verify}


def _changes_fingerprint(target: Checkpoint, draft: Checkpoint | None) -> dict[str, Any]:
    """What is merged into the models, and quantised, while they are loaded; older runs do not have the
    options."""
    found: dict[str, str | None] = {}
    for role, model in (("target", target), ("draft", draft)):
        if model is not None:
            found[f"{role}_quantization"] = model.quantization
            found[f"{role}_adapter"] = None if model.adapter is None else model.adapter.fingerprint()
    return {name: value for name, value in found.items() if value is not None}


def _info(config: GenerateConfig, models: ModelPlan, topology: Topology) -> dict[str, Any]:
    return {
        # Until the loaded target has been checked.
        "exact": False,
        **reproducibility_info(config, topology, models),
        "target": models.target.name,
        "draft": models.draft.name if models.draft else config.draft if config.uses_ngrams else None,
        "head": models.head.description() if models.head else None,
        "prompts": config.prompts if len(config.prompts) > 1 else config.prompts[0],
        "vocab_size": models.vocab_size,
        "tp_size": config.tp_size,
        EXPERT_PARALLEL: models.is_expert_parallel,
        "world_size": topology.world_size,
        "draft_placement": topology.draft_placement,
        "device": topology.device.type,
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in ("specdist", *LIBRARIES)},
    }


def reproducibility(config: GenerateConfig, topology: Topology, models: ModelPlan) -> str:
    """One of :data:`specdist.config.seeds.SEED_FIXES`, whose ``WHEN_TOKENS`` says the same in words.

    Block lengths that depend on the rest of the batch change tokens only under rejection, where a block's end
    decides whether a token is the bonus or a verified draft; a draft that works ahead always has a token to
    be verified, unless every round chooses anew whether it does. Numbers that are rounded to 8 bits come to
    be others where a pass of more tokens changes their last digits: that moves any target's tokens.
    """
    if rounds_to_8_bits(models.target):
        return "distribution"
    depends_on_batch = config.policy == "goodput" and not config.is_asynchronous
    depends_on_batch |= config.chooses_rounds and topology.has_draft_rank
    depends_on_batch |= models.draft is not None and rounds_to_8_bits(models.draft)
    return "distribution" if depends_on_batch and not config.is_coupled else "tokens"


def reproducibility_info(config: GenerateConfig, topology: Topology, models: ModelPlan) -> dict[str, Any]:
    """All of it, by its names in the manifest. The libraries' products and sums round in another way where a
    pass has more tokens, on a GPU and in half precision; that can decide between two nearly equal tokens, or
    numbers of a cache in 8 bits."""
    is_rough = models.target.torch_dtype(config.dtype).itemsize < 4 or rounds_to_8_bits(models.target)
    return {
        "reproducibility": reproducibility(config, topology, models),
        UP_TO_ROUNDING: topology.device.type == "cuda" or is_rough,
    }


def rounds_to_8_bits(model: Checkpoint) -> bool:
    """Whether a model's cache, or inputs of its layers, are rounded to 8 bits."""
    quantization = quantization_of(model)
    return model.has_float8_cache or (quantization is not None and quantization.rounds_inputs)
