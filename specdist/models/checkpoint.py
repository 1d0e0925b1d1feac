"""What a model's folder says before any weight is read: files, family, heads, tokens."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig

from specdist.errors import UserError
from specdist.models.adapters import can_page_attention

INDEX_NAME = "model.safetensors.index.json"
# Configurations, tokenizers and chat templates: all that decides a completion beside the weights.
SMALL_FILE_SUFFIXES = (".json", ".model", ".txt", ".jinja")
HUB_PATTERNS = ["*.safetensors", *(f"*{suffix}" for suffix in SMALL_FILE_SUFFIXES)]
FINGERPRINT_BYTES = 2**20
# DeepSpeed's automatic tensor parallelism refuses these families with an assertion, once all is loaded.
UNSHARDABLE_FAMILIES = ("gpt2", "gpt_neo")
# Other kinds (chunked, linear, ...) would be run as full attention without an error.
LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model's files on this machine. ``option`` (``--target`` or ``--draft``) is for messages."""

    option: str
    name: str
    folder: Path
    config: Any
    weight_files: tuple[Path, ...]

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model was made for."""
        return int(self.config.get_text_config().max_position_embeddings)

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

    def stop_token_ids(self) -> frozenset[int]:
        """The tokens that end a generation, from generation_config.json, else config.json."""
        try:
            found = GenerationConfig.from_pretrained(self.folder).eos_token_id
        except OSError:
            found = None
        found = self.config.get_text_config().eos_token_id if found is None else found
        return frozenset([found] if isinstance(found, int) else found or [])

    def fingerprint(self) -> str:
        """A digest that changes with the model: all small files, and the ends of every weight file.

        The header of a safetensors file lies at its beginning; reading terabytes whole would cost hours.
        """
        digest = hashlib.sha256()
        for path in sorted(self.folder.iterdir()):
            if path in self.weight_files:
                size = path.stat().st_size
                with path.open("rb") as file:
                    ends = file.read(FINGERPRINT_BYTES)
                    file.seek(max(0, size - FINGERPRINT_BYTES))
                    ends += file.read(FINGERPRINT_BYTES)
            elif path.suffix in SMALL_FILE_SUFFIXES:
                size, ends = path.stat().st_size, path.read_bytes()
            else:
                continue
            digest.update(f"{path.name}\0{size}\0".encode() + ends)
        return digest.hexdigest()


def open_checkpoint(option: str, name: str) -> Checkpoint:
    """Find the model's files, from the hub if need be. Raises :class:`UserError` for anything unusable."""
    folder = Path(name)
    if not folder.is_dir():
        folder = _from_hub(option, name)
    if not (folder / "config.json").is_file():
        raise UserError(f"{option} {name} has no config.json: name a folder written by save_pretrained")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, StrictDataclassError) as error:
        raise UserError(f"{option} {name}: config.json cannot be used: {error}") from error
    weight_files = _weight_files(option, name, folder)
    return Checkpoint(option=option, name=name, folder=folder, config=config, weight_files=weight_files)


def check_family(checkpoint: Checkpoint, tp_size: int) -> None:
    """Refuse a model that the engine cannot run, or cannot shard over ``tp_size`` ranks, by name."""
    config = checkpoint.config.get_text_config()
    family = config.model_type
    what = f"{checkpoint.option} {checkpoint.name}"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{what} is of the family {family}, which is no causal language model")
    other_layers = set(getattr(config, "layer_types", None) or []) - LAYER_TYPES
    if other_layers or not can_page_attention(config):
        raise UserError(
            f"{what} is of the family {family}, whose attention "
            + (f"({', '.join(sorted(other_layers))}) " if other_layers else "")
            + "does not go through transformers' attention registry: specdist cannot run it; choose a model "
            "of another family (Llama, Qwen, Gemma, ...)"
        )
    if tp_size == 1:
        return
    if family in UNSHARDABLE_FAMILIES:
        raise UserError(f"{what} is of the family {family}, which DeepSpeed cannot shard: use --tp_size 1")
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    if num_heads % tp_size or num_kv_heads % tp_size:
        raise UserError(
            f"--tp_size {tp_size} must divide the attention heads ({num_heads}) and the key/value heads "
            f"({num_kv_heads}) of {what}"
        )


def _from_hub(option: str, name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except (HFValidationError, RepositoryNotFoundError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{option} {name} is no folder here, and the hub did not give it "
            f"({type(error).__name__}): check the spelling, the network and your access"
        ) from error


def _weight_files(option: str, name: str, folder: Path) -> tuple[Path, ...]:
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{option} {name}: {INDEX_NAME} cannot be used ({error!r}): fetch it again"
            ) from error
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    files = tuple(folder / file_name for file_name in names)
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise UserError(f"{option} {name} lacks {missing[0]}, which {INDEX_NAME} names: fetch it again")
    if not files:
        pickled = bool(list(folder.glob("*.bin")))
        raise UserError(
            f"{option} {name} has no *.safetensors"
            + (
                ", only pickled *.bin weights, which can run code when read: load it once with transformers "
                "and save it with save_pretrained, which writes safetensors"
                if pickled
                else " files: is the download complete?"
            )
        )
    for path in files:
        _check_whole(option, name, path)
    return files


def _check_whole(option: str, name: str, path: Path) -> None:
    """Reads the header, and whether the file is as long as that says."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{option} {name}: {path.name} is no whole safetensors file ({error}): fetch it again"
        ) from error
