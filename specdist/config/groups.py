"""Options that several jobs share, each group declared once.

A job's configuration inherits from the groups that it has, and declares again what means something else to
it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from specdist.config.arguments import option
from specdist.config.chat import ChatOptions
from specdist.config.processing import LogprobOptions, ProcessingOptions
from specdist.utils.errors import UserError

# Whose code runs a model's layers.
ModelImpl = Literal["auto", "specdist", "transformers"]
# A draft that is the target itself with fewer bits (QuantSpec, arXiv:2502.10424).
SELF, SELF_KINDS = "self:", ("int4", "int8", "float8")


@dataclass(kw_only=True)
class PromptOptions(ChatOptions):
    """Where prompts come from."""

    _argument_group_name = "Prompts"
    _url_options: ClassVar[tuple[str, ...]] = ("prompts",)

    prompts: str = option(
        help="Arrow IPC file or folder, save_to_disk folder, Parquet, JSONL or CSV; or its URL (s3://, "
        "gs://, hf://)"
    )
    prompt_column: str | None = option(None, help="column that holds the prompt text (default: prompt)")
    messages_column: str | None = option(
        None, help="column of chat messages, formatted with the chat template"
    )
    split_special_tokens: bool = option(
        False,
        help="encode special tokens inside prompts and messages as text; a chat template's own stay special",
    )

    def check_prompts(self) -> None:
        """Fill in the column. Raises :class:`UserError`."""
        _ = self.chat_format
        if self.prompt_column and self.messages_column:
            raise UserError(
                f"--prompt_column {self.prompt_column} and --messages_column {self.messages_column} exclude "
                "each other: name the column of plain prompts or the column of chat messages"
            )
        if self.messages_column is None:
            self.prompt_column = self.prompt_column or "prompt"


@dataclass(kw_only=True)
class ModelOptions:
    """The pair of models."""

    _argument_group_name = "Models"

    target: str = option(help="hub id or folder of the large model, whose distribution the output follows")
    draft: str | None = option(
        None,
        help="hub id or folder of the small model; self:int4, self:int8, self:float8 = the target's own "
        "weights, quantised; memory = no model, candidates from a row's own tokens; none = target only",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", help="auto = the checkpoint's")
    device: Literal["auto", "cpu", "cuda"] = option("auto", help="auto = cuda if available")
    model_impl: ModelImpl = option(
        "auto",
        help="whose code runs a model's layers; specdist = compiled code for families like Llama, on a CPU; "
        "auto = that on a CPU, if at the start it gives the logits of transformers",
    )


@dataclass(kw_only=True)
class QuantizationOptions:
    """What is quantised while it is loaded; a checkpoint that is quantised needs no option."""

    _argument_group_name = "Quantised weights"

    target_quantization: Literal["float8", "int8"] | None = option(
        None,
        help="quantise the target's layers to 8 bits per channel, and their inputs per token; the output "
        "then follows the quantised target",
    )
    draft_quantization: Literal["float8", "int8", "int4"] | None = option(
        None, help="the same for the draft; int4 = weights alone, in groups of 64; changes acceptance alone"
    )

    def check_quantization(self, draft: str | None) -> None:
        """Raises :class:`UserError` for ``--draft self:KIND`` of another kind, or with
        ``--draft_quantization`` besides."""
        if draft is None or not draft.startswith(SELF):
            return
        if draft.removeprefix(SELF) not in SELF_KINDS:
            kinds = ", ".join(SELF + kind for kind in SELF_KINDS)
            raise UserError(
                f"--draft {draft} is not a kind of the target's own weights: use {kinds}, or name a model"
            )
        if self.draft_quantization is not None:
            raise UserError(
                f"--draft {draft} says how the draft is quantised: leave --draft_quantization "
                f"{self.draft_quantization} out"
            )


@dataclass(kw_only=True)
class DrawingOptions:
    """How the next token is drawn, alike for target and draft."""

    _argument_group_name = "Sampling"

    temperature: float = option(1.0, help="0 = greedy")
    top_k: int = option(0, help="keep the k likeliest tokens; 0 = all")
    top_p: float = option(
        1.0, help="keep the smallest set of likeliest tokens with this total probability; 1 = all"
    )


@dataclass(kw_only=True)
class SamplingOptions(DrawingOptions):
    """The same, and how much of it."""

    _argument_group_name = "Sampling"

    max_new_tokens: int = option(256, help="maximum length of a completion, in tokens")
    seed: int = option(0, help="the same seed gives the same completions")


@dataclass(kw_only=True)
class CompletionOptions(SamplingOptions, ProcessingOptions, LogprobOptions):
    """Where completions end, and how many there are."""

    stop: list[str] | None = option(
        None, help="strings that end a completion; they are not included in it", action="extend"
    )
    num_samples: int = option(1, help="completions per prompt")


@dataclass(kw_only=True)
class BatchOptions:
    """How much runs at a time."""

    _argument_group_name = "Batch"

    max_num_seqs: int = option(
        32, help="maximum number of sequences running at a time; free cache pages may limit it further"
    )
    max_num_batched_tokens: int = option(
        2048, help="maximum number of tokens per target pass; longer prompts are split into chunks"
    )
    max_seq_len: int | None = option(
        None, help="maximum length of prompt plus completion, in tokens (default: what the models allow)"
    )


@dataclass(kw_only=True)
class TrustOptions:
    """What a model's folder may do."""

    _argument_group_name = "Rarely needed"

    trust_remote_code: bool = option(
        False, help="run custom code from a model's folder (auto_map); without it such a model is refused"
    )
    allow_pickle: bool = option(False, help="load pickled *.bin weights if a model has no safetensors")


@dataclass(kw_only=True)
class RankOptions(TrustOptions):
    """Limits of the ranks of one replica."""

    cache_memory: str | None = option(
        None,
        help="size of the key/value cache on each rank, such as 8GiB (default: the device's free memory)",
    )
    rank_timeout: float = option(
        600.0,
        help="seconds after which a replica ends if one of its ranks gives no sign of life, or if none of "
        "them makes progress: no tensor read, no pass run, no round finished",
    )
    cpu_affinity: Literal["numa", "none"] = option(
        "numa", help="numa = bind each rank to those of its CPUs that are next to its GPU; none = no binding"
    )


def values_of(config: Any, *groups: type[Any]) -> dict[str, Any]:
    """The options of these groups, as another configuration that has them takes them."""
    return {item.name: getattr(config, item.name) for group in groups for item in dataclasses.fields(group)}
