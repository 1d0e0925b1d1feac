"""What decides a run's rows: a relaunch with another fingerprint is another run."""

from __future__ import annotations

from typing import Any

from specdist.config.generate import GenerateConfig
from specdist.config.processing import ProcessingOptions
from specdist.data.formats.prompts import Prompts
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.heads.drafts import DraftHead

# In the place of a draft's fingerprint: its rule decides where blocks end, and so the tokens of a seed.
MEMORY_OF_OWN_TOKENS = "memory of a sequence's own tokens, 1"


def run_fingerprint(
    config: GenerateConfig,
    prompts: Prompts,
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
        # Runs of earlier versions gave every object the keys of all rows.
        **({"own_keys": own_keys} if (own_keys := prompts.columns_with_own_keys) else {}),
        "num_rows": prompts.num_rows,
        "rows_per_shard": config.rows_per_shard,
        "target": target.fingerprint(),
        "draft": draft.fingerprint() if draft else MEMORY_OF_OWN_TOKENS if config.uses_memory else None,
        "dtype": config.dtype,
        "policy": config.policy,
        "num_draft_tokens": None,
        **config.policy_options,
        **_head_fingerprint(config, head),
        **({} if config.draft_window is None else {"draft_window": config.draft_window}),
        "acceptance": config.acceptance,
        "overlap": config.overlap,
        "num_branches": config.num_branches if config.drafts_ahead or config.chooses_rounds else None,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        **_processing_fingerprint(config),
        "max_new_tokens": config.max_new_tokens,
        "max_seq_len": max_seq_len,
        "stop": config.stop,
        "num_samples": config.num_samples,
        "seed": config.seed,
        # Other code may compute something else from the same weights.
        **({"trust_remote_code": True} if config.trust_remote_code else {}),
        # Left out where it is off: older runs do not have the option.
        **({"split_special_tokens": True} if config.split_special_tokens else {}),
        **_changes_fingerprint(target, draft),
        # The same numbers, rounded elsewhere.
        **({"model_impl": config.model_impl} if config.model_impl != "auto" else {}),
        **({"memory_rows": True} if config.memory_rows else {}),
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
    """For policies that read a head, identified by its weights, not by its folder."""
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
