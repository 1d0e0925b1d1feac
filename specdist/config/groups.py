"""Options that several jobs share, each group declared once.

A job's configuration inherits from the groups that it has, and declares again what means something else to
it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from specdist.config.arguments import option
from specdist.config.processing import LogprobOptions, ProcessingOptions
from specdist.config.seeds import WHEN_TOKENS
from specdist.utils.rules import RULE, SEED, Refusals, Rule, within

# Whose code runs a model's layers.
ModelImpl = Literal["auto", "specdist", "transformers"]
# How experts are shared out over several ranks.
ExpertParallel = Literal["auto", "always", "never"]
EXPERT_PARALLEL = (
    "where ranks share a target's experts: always = each is whole, on one rank; never = each rank has a part "
    "of every one; auto = what is counted cheaper"
)
BYTES_PER_UNIT = {
    "": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9
}  # fmt: skip
# A draft that is the target's own multi-token prediction head.
MTP = "mtp"
SIZE = Rule(lambda size: bytes_of(size) is not None, "is not a size: write it like 8GiB")


def bytes_of(size: str | None) -> int | None:
    """The bytes of a size like ``8GiB``; None of what is not a size."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", size or "")
    if not match or match[2].upper() not in BYTES_PER_UNIT:
        return None
    return int(float(match[1]) * BYTES_PER_UNIT[match[2].upper()])


@dataclass(kw_only=True)
class ModelOptions:
    """The pair of models."""

    _argument_group_name = "Models"

    target: str = option(help="hub id or folder of the large model, whose distribution the output follows")
    draft: str | None = option(
        None,
        help="hub id or folder of the small model; mtp = the target's own multi-token prediction head; "
        "ngram = no model, candidates from a row's own tokens; none = target only",
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
        help="quantise the target's linear layers to 8 bits per channel, and their inputs per token, but not "
        "a mixture's experts; the output then follows the quantised target",
    )
    draft_quantization: Literal["float8", "int8", "int4"] | None = option(
        None, help="the same for the draft; int4 = weights alone, in groups of 64; changes acceptance alone"
    )
    cache_dtype: Literal["float8"] | None = option(
        None,
        help="keep keys and values of both models in 8 bits, with a scale of each token and head: half the "
        "memory of bfloat16; the output then follows the target with such a cache (default: --dtype)",
    )

    _refusals: ClassVar[Refusals] = (
        ("cache_dtype", lambda o: getattr(o, "model_impl", None) == "specdist",
         "needs layers that read it, and compiled code does not: use --model_impl auto"),
    )  # fmt: skip


@dataclass(kw_only=True)
class AdapterOptions:
    """LoRA adapters in PEFT's folders, which are merged into the weights while these are read."""

    _argument_group_name = "Adapters"

    target_adapter: str | None = option(
        None,
        help="PEFT folder or hub id of a LoRA adapter that is merged into the target while it is loaded; "
        "the output follows the target with it",
    )
    draft_adapter: str | None = option(None, help="the same for the draft; changes acceptance alone")


@dataclass(kw_only=True)
class DrawingOptions:
    """How the next token is drawn, alike for target and draft."""

    _argument_group_name = "Sampling"

    temperature: float = option(
        1.0,
        rule=within(at_least=0, below=math.inf, text="must be 0 (greedy) or a number above"),
        help="0 = greedy",
    )
    top_k: int = option(
        0,
        rule=Rule(lambda k: k >= -1, "must not be negative; 0, or vLLM's -1, keeps every token", (-1, 0)),
        help="keep the k likeliest tokens; 0 = all",
    )
    top_p: float = option(
        1.0, above=0, at_most=1, note="1 keeps every token",
        help="keep the smallest set of likeliest tokens with this total probability; 1 = all",
    )  # fmt: skip


@dataclass(kw_only=True)
class SamplingOptions(DrawingOptions):
    """The same, and how much of it."""

    _argument_group_name = "Sampling"

    max_new_tokens: int = option(256, at_least=1, help="maximum length of a completion, in tokens")
    seed: int = option(0, rule=SEED, help=f"of all random numbers. {WHEN_TOKENS}")


@dataclass(kw_only=True)
class CompletionOptions(SamplingOptions, ProcessingOptions, LogprobOptions):
    """Where completions end, and how many there are."""

    stop: list[str] | None = option(
        None, rule=Rule(bool, "must not be an empty string; leave the option out instead"), action="extend",
        help="strings that end a completion; they are not included in it",
    )  # fmt: skip
    stop_repeats: int = option(
        0, rule=Rule(lambda copies: abs(copies) != 1, "must be 0, 2 or more, or -2 or less"),
        help="end a completion where its end is a loop: so many copies or more (4 are usual) of the same 1 "
        "to 64 tokens, which have 64 or more in all; -4 = as 4, and keep the first copy alone; 0 = never",
    )  # fmt: skip
    num_samples: int = option(1, at_least=1, help="completions per prompt")


# Sequences at a time, where memory does not decide, or at most. A GPU's passes of more tokens take as much
# longer, and with a draft every sequence needs memory for its distributions.
HOST_SEQS, GPU_SEQS, GPU_SEQS_WITH_DRAFT = 32, 512, 256


@dataclass(kw_only=True)
class BatchOptions:
    """How much runs at a time."""

    _argument_group_name = "Batch"

    max_num_seqs: int | None = option(
        None, at_least=1,
        help="maximum number of sequences running at a time; free cache pages may limit it further "
        f"(default: {HOST_SEQS} on a CPU; on a GPU as many as the cache holds, at most {GPU_SEQS}, and "
        f"{GPU_SEQS_WITH_DRAFT} with a draft model)",
    )  # fmt: skip
    max_num_batched_tokens: int = option(
        2048, at_least=1,
        help="maximum number of tokens per target pass; longer prompts are split into chunks",
    )  # fmt: skip
    max_seq_len: int | None = option(
        None, at_least=1,
        help="maximum length of prompt plus completion, in tokens (default: what the models allow)",
    )  # fmt: skip


@dataclass(kw_only=True)
class TrustOptions:
    """What a model's folder may do."""

    _argument_group_name = "Rarely needed"

    trust_remote_code: bool = option(
        False, help="run custom code from a model's folder (auto_map); without it such a model is refused"
    )


@dataclass(kw_only=True)
class RankOptions(TrustOptions):
    """Limits of the ranks of one replica."""

    cache_memory: str | None = option(
        None, rule=SIZE,
        help="size of the key/value cache on each rank, such as 8GiB (default: the device's free memory)",
    )  # fmt: skip
    rank_timeout: float = option(
        600.0, rule=Rule(lambda value: value >= 1, "must be a number of seconds, 1 or more"),
        help="seconds after which a replica ends if one of its ranks gives no sign of life, or if none of "
        "them makes progress: no tensor read, no pass run, no round finished",
    )  # fmt: skip
    cpu_affinity: Literal["numa", "none"] = option(
        "numa", help="numa = bind each rank to those of its CPUs that are next to its GPU; none = no binding"
    )


@dataclass(kw_only=True)
class GpuCostOptions:
    """What a GPU costs: nothing is generated otherwise for it."""

    _argument_group_name = "Costs"

    gpu_price: float | None = option(
        None, rule=within(above=0, below=math.inf, text="must be a number above 0"),
        help="price of a GPU for an hour, in any currency: what a million tokens cost is told then",
    )  # fmt: skip


@dataclass(kw_only=True)
class StorageOptions:
    """Where copies of files lie, on disks of the machine that needs them."""

    _argument_group_name = "Storage"

    push_to_hub: str | None = option(
        None,
        help="owner/name of a data set on the Hugging Face hub, which gets the finished run: its card and "
        "its rows; created as a private one if it does not exist",
    )
    cache_dir: str | None = option(
        None,
        help="folder on a disk of this machine for what a URL in --prompts or --output needs locally: "
        "fetched prompts, rows of unfinished shards, logs (default: specdist-UID in the folder of "
        "temporary files)",
    )


def values_of(config: Any, *groups: type[Any]) -> dict[str, Any]:
    """The options of these groups, as another configuration that has them takes them."""
    return {item.name: getattr(config, item.name) for group in groups for item in dataclasses.fields(group)}


# These rules hold for a row's own options, too.
RULES: Mapping[str, Rule] = {
    item.name: item.metadata[RULE] for item in dataclasses.fields(CompletionOptions) if RULE in item.metadata
}
WHOLE_NUMBERS = frozenset(
    item.name for item in dataclasses.fields(CompletionOptions) if type(item.default) is int
)
