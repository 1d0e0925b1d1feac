"""A model's files, and what its configuration says before any weight is read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping

from specdist.models.draft_models.block import UnknownPart, published_config
from specdist.models.draft_models.declaration import Drafter
from specdist.models.draft_models.kinds import drafter_of
from specdist.models.files.damage import reading
from specdist.models.files.lora import LoraAdapter
from specdist.models.files.weight_files import SAFETENSORS_NAME, find_weight_files
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object

CONFIG_NAME, TOKENIZER_CONFIG_NAME = "config.json", "tokenizer_config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"
# Configurations, tokenizers and chat templates, which decide completions beside the weights.
SMALL_FILE_SUFFIXES = (".json", ".model", ".txt", ".jinja")
HUB_PATTERNS = ["*.safetensors", *(f"*{suffix}" for suffix in SMALL_FILE_SUFFIXES)]
FINGERPRINT_BYTES = 2**20
# What configurations call the number of experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# What does not fit a family is found when it is cut (specdist.models.sharding.cutting). Not so for these:
# with the first DeepSpeed fails with an assertion, and X-MOD looks at values.
UNSHARDABLE_FAMILIES = ("bert-generation", "dbrx", "gpt_neo", "xmod", "zamba2")
# The longest sequence of a model that names none.
MOST_POSITIONS = 2**17
# Layers that keep a state (specdist.models.recurrent), and the tokens' keys too, or not.
HYBRID = "hybrid"
STATE_LAYER_TYPES = {"linear_attention", "conv", HYBRID}
# Layers in which no token sees another.
TOKENWISE_LAYER_TYPES = {"mlp", "moe"}


@dataclass(frozen=True, kw_only=True, eq=False)  # each is itself
class Checkpoint:
    """A model's files on this machine. ``option`` (``--target`` or ``--draft``) is for messages;
    ``trusts_code``: custom code in the folder may be run; ``quantization``: what its layers become while it
    is loaded (``--target_quantization``), after ``adapter`` is merged into them; ``has_float8_cache``: its
    keys and values are kept in 8 bits (``--cache_dtype``); ``chat_template``: in place of its tokenizer's."""

    option: str
    name: str
    folder: Path
    config: Any
    weight_files: tuple[Path, ...]
    trusts_code: bool = False
    quantization: str | None = None
    adapter: LoraAdapter | None = None
    has_float8_cache: bool = False
    chat_template: str | None = None

    @property
    def drafter(self) -> Drafter | None:
        """The kind of a draft that reads the target's states; None for other models."""
        return drafter_of(self.config)

    @property
    def has_experts(self) -> bool:
        """Whether tokens choose experts, so that what a pass reads depends on them."""
        text = self.config.get_text_config()
        return any(getattr(text, name, None) for name in EXPERT_COUNTS)

    @property
    def keeps_states(self) -> bool:
        """Whether there are recurrent layers."""
        return keeps_states(self.config)

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model was made for; states alone know no longest one."""
        return int(getattr(self.config.get_text_config(), "max_position_embeddings", MOST_POSITIONS))

    @property
    def vocab_width(self) -> int:
        """Width of the logits, which may exceed the tokenizer's tokens by padding."""
        return int(self.config.get_text_config().vocab_size)

    def torch_dtype(self, name: str) -> torch.dtype:
        """``--dtype`` for this model; ``auto`` is what its configuration names, else float32."""
        if name != "auto":
            return getattr(torch, name)
        stored = self.config.dtype or self.config.get_text_config().dtype or torch.float32
        return getattr(torch, stored) if isinstance(stored, str) else stored

    def adapted(self, parameter: str, whole: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """A stored parameter, or these rows of it, with what the adapter adds."""
        return whole if self.adapter is None else self.adapter.merged(parameter, whole, rows)

    def stop_token_ids(self) -> frozenset[int]:
        """The tokens that end a generation, from generation_config.json, else config.json.

        Raises :class:`UserError` for a damaged file: without its end token a model would not stop.
        """
        path, found = self.folder / GENERATION_CONFIG_NAME, None
        if path.is_file():
            with reading(f"{self.option} {self.name}: {path.name}"):
                found = _ids(parse_object(path.read_bytes()).get("eos_token_id"))
        if found is None:
            with reading(f"{self.option} {self.name}: config.json"):
                found = _ids(getattr(self.config.get_text_config(), "eos_token_id", None))
        return found or frozenset()

    def fingerprint(self) -> str:
        """A digest that changes with the model: all small files, and the ends of every weight file.

        The header of a safetensors file lies at its beginning; reading terabytes whole would cost hours.
        """
        with reading(f"{self.option} {self.name}: its folder", "put it back as it was"):
            return self._fingerprint()

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path in sorted(self.folder.iterdir()):
            if path in self.weight_files:
                size = path.stat().st_size
                with path.open("rb") as file:
                    ends = file.read(FINGERPRINT_BYTES)
                    file.seek(max(0, size - FINGERPRINT_BYTES))
                    ends += file.read(FINGERPRINT_BYTES)
            elif path.suffix in SMALL_FILE_SUFFIXES or (self.trusts_code and path.suffix == ".py"):
                size, ends = path.stat().st_size, path.read_bytes()
            else:
                continue
            digest.update(f"{path.name}\0{size}\0".encode() + ends)
        return digest.hexdigest()


def open_checkpoint(option: str, name: str, *, trust_remote_code: bool = False) -> Checkpoint:
    """Find the model's files, from the hub if need be. Raises :class:`UserError` for anything unusable.

    Args:
        trust_remote_code: run custom code in the model's folder.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = from_hub(option, name, [*HUB_PATTERNS, *(["*.py"] if trust_remote_code else [])])
    if (folder / ADAPTER_CONFIG_NAME).is_file():
        raise UserError(
            f"{option} {name} holds a PEFT adapter ({ADAPTER_CONFIG_NAME}), not a whole model: for "
            f"jobs/generate.py name the model that it was trained for with {option}, and this folder with "
            f"{option}_adapter; for others merge it with PEFT (merge_and_unload) and save that with "
            f"save_pretrained; if the weights beside it are merged already, move {ADAPTER_CONFIG_NAME} away"
        )
    if not (folder / CONFIG_NAME).is_file():
        raise UserError(f"{option} {name} has no config.json: name a folder written by save_pretrained")
    config = drafter_config(option, name, folder)
    if not trust_remote_code:
        # A drafter that is known here needs none.
        for file_name in (TOKENIZER_CONFIG_NAME, *([CONFIG_NAME] if config is None else [])):
            _refuse_code(option, name, folder / file_name)
    if config is None:
        with reading(f"{option} {name}: config.json"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    checkpoint = Checkpoint(
        option=option,
        name=name,
        folder=folder,
        config=config,
        weight_files=find_weight_files(
            option,
            name,
            folder,
            first=getattr(config, "transformers_weights", None) or SAFETENSORS_NAME,
        ),
        trusts_code=trust_remote_code,
    )
    checkpoint.stop_token_ids()
    return checkpoint


def keeps_states(config: Any) -> bool:
    """Whether a model of this configuration has recurrent layers."""
    return not STATE_LAYER_TYPES.isdisjoint(getattr(config.get_text_config(), "layer_types", None) or [])


def auto_class(config: Any) -> Any:
    """transformers' factory of models of this configuration. Models of text within models of texts and images
    are not all among the causal language models."""
    is_wrapped = type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    is_known = is_wrapped and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if is_known else AutoModelForCausalLM


def build_model(config: Any, *, trusts_code: bool = False, **options: Any) -> PreTrainedModel:
    """The model of texts of a configuration, which becomes its own; with weights that mean nothing.
    ``options``: as of transformers' ``from_config``."""
    drafter = drafter_of(config)
    if drafter is not None:
        return drafter.build(config, **options)
    return without_towers(auto_class(config).from_config(config, trust_remote_code=trusts_code, **options))


def without_towers(model: PreTrainedModel) -> PreTrainedModel:
    """The model without what it has for images and sounds beside its text model: other models, which no text
    reaches. ``model.unread`` has their parameters and buffers by name; files may hold them, by other names in
    transformers' ``model.conversions``."""
    base = model.base_model
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else base
    unread: dict[str, Tensor] = {}
    if base is not decoder:
        # A tower's own are found as long as it is there.
        model.conversions = get_model_conversion_mapping(model)
    prefix = next(f"{name}.".lstrip(".") for name, module in model.named_modules() if module is base)
    for name, part in list(base.named_children()) if base is not decoder else ():
        if isinstance(part, PreTrainedModel) and decoder not in part.modules():
            unread |= {f"{prefix}{name}.{key}": tensor for key, tensor in part.state_dict().items()}
            setattr(base, name, None)
    model.unread = unread
    return model


def kv_heads_of(config: Any) -> int:
    """Key/value heads by a text model's configuration."""
    if getattr(config, "multi_query", False):
        return 1
    num_heads = int(getattr(config, "num_attention_heads", 0))
    return int(getattr(config, "num_key_value_heads", None) or num_heads)


def _ids(found: Any) -> frozenset[int] | None:
    """Token ids from a configuration, which names one or several."""
    ids = [found] if isinstance(found, int) else found
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(item) is int for item in ids):
        raise ValueError(f"eos_token_id is {found!r}, neither a token id nor a list of them")
    return frozenset(ids)


def drafter_config(option: str, name: str, folder: Path) -> Any:
    """The configuration of a published drafter whose config.json transformers does not know; None of any
    other model. Raises :class:`UserError` for a drafter with a part that is not known here."""
    what = f"{option} {name}: {CONFIG_NAME}"
    with reading(what):
        try:
            return published_config(parse_object((folder / CONFIG_NAME).read_bytes()))
        except UnknownPart as error:
            raise UserError(f"{what} is of a drafter, and names {error}: choose another draft") from error


def _refuse_code(option: str, name: str, path: Path) -> None:
    """Raises :class:`UserError` for a folder with custom code, which is run only if the user allows it."""
    if not path.is_file():
        return
    with reading(f"{option} {name}: {path.name}"):
        code = parse_object(path.read_bytes()).get("auto_map")
    if code:
        raise UserError(
            f"{option} {name} has custom code ({path.name} names it under auto_map), which is not run by "
            "default: read it, and pass --trust_remote_code to run it; or remove auto_map, if transformers "
            "supports the family itself"
        )


def from_hub(option: str, name: str, patterns: list[str]) -> Path:
    """The folder with these files. Raises :class:`UserError`."""
    if Path(name).exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise UserError(f"{option} {name} is not a folder here: check the spelling, or name one of the hub")
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HFValidationError, RepositoryNotFoundError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{option} {name} is not a folder here, and the hub did not give it "
            f"({type(error).__name__}): check the spelling, the network and your access"
        ) from error
