"""Which stored tensor each parameter of a model takes, with the renamings that transformers knows."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from specdist.models.draft_models.mtp import FileNames

# Stored by earlier versions of transformers in many published files: now computed, or unused.
HARMLESS = re.compile(r"(rotary_emb\.inv_freq|(^|\.)position_ids|\.att(n|ention)\.(masked_)?bias)$")

# No name of a parameter.
OF_ANOTHER = ""


def ties_embeddings(model: PreTrainedModel) -> bool:
    """Whether a model's embedding and output head are the same weights."""
    parts = (model.config.get_text_config(), model.config)
    return bool(
        next((each.tie_word_embeddings for each in parts if hasattr(each, "tie_word_embeddings")), False)
    )


def parameters_of_vocabulary(model: PreTrainedModel) -> set[str]:
    """The names of the embedding's and the head's weights and biases."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {f"{name}.{kind}" for name, module in model.named_modules() if module in ends
            for kind in ("weight", "bias")}  # fmt: skip


def _beyond(model: PreTrainedModel) -> list[str]:
    """Patterns of names of layers after the model's: those of multi-token prediction."""
    text = model.config.get_text_config()
    num_beyond = getattr(text, "num_nextn_predict_layers", None) or 0
    return [rf"^model\.layers\.{text.num_hidden_layers + number}\." for number in range(num_beyond)]


class WeightNames:
    """The names of a whole model's parameters and stored buffers, before any is quantised, and which stored
    tensor each takes."""

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = getattr(model, "conversions", None) or get_model_conversion_mapping(model)
        self._renamings = [change for change in mapping if isinstance(change, WeightRenaming)]
        self._converters = [change for change in mapping if isinstance(change, WeightConverter)]
        self._prefix = model.base_model_prefix
        self.known = dict(model.state_dict())
        # The tensors of towers that are left out, where a model has any.
        self._unread: dict[str, Tensor] = getattr(model, "unread", {})
        self._named = self.known | self._unread
        self._computed = {name for name, _ in model.named_buffers() if name not in self.known}
        ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), *_beyond(model)]
        self._ignored = [re.compile(pattern) for pattern in ignored]
        # The names of a drafter that is a part of another model's files.
        self._file_names: FileNames | None = getattr(model, "file_names", None)
        self._tied: dict[str, str] = {}
        if ties_embeddings(model):
            # Files usually hold such a pair once; in a sharded model they are two parameters.
            names = {id(module): name for name, module in model.named_modules()}
            head, embedding = (
                f"{names[id(module)]}.weight"
                for module in (model.get_output_embeddings(), model.get_input_embeddings())
            )
            self._tied = {embedding: head, head: embedding}

    def takers(self, stored_names: Iterable[str]) -> dict[str, set[str]]:
        """The parameters and buffers that take each stored tensor, perhaps none.

        As in transformers, if both tensors of a tied pair are stored, each takes its own.
        """
        direct = {stored: self.renamed(stored)[0] for stored in stored_names}
        stored = set(direct.values()) & set(self.known)
        tied = {name: other for name, other in self._tied.items() if other not in stored}
        return {stored: {name, tied.get(name, name)} & set(self.known) for stored, name in direct.items()}

    def lists(self, stored_names: Iterable[str], stack: str) -> set[str]:
        """What the files call the list of layers, whose parameters' names begin with ``stack``."""
        takers = self.takers(stored_names).items()
        of_layers = [name for name, taken in takers if any(each.startswith(stack) for each in taken)]
        return {match[1] for match in map(re.compile(r"(\w+)\.\d+\.").search, of_layers) if match}

    def converter(self, pattern: str) -> WeightConverter:
        """The last that has the pattern, as in transformers."""
        return next(each for each in reversed(self._converters) if pattern in each.source_patterns)

    def is_of_another(self, stored_name: str) -> bool:
        """Whether a tensor is of another model in the same files, whose layers may have the same names."""
        return self._file_names is not None and self._file_names.own(stored_name) is None

    def is_harmless(self, stored_name: str) -> bool:
        """Whether a tensor that no parameter takes is known to be unused, by transformers or by its name."""
        name = self.renamed(stored_name)[0]
        return (
            name in self._unread
            or name in self._computed
            or HARMLESS.search(name) is not None
            or any(pattern.search(name) for pattern in self._ignored)
        )

    def renamed(self, stored_name: str) -> tuple[str, str | None]:
        """The (first) parameter that it becomes and, where transformers converts it, as it does with single
        experts, the pattern of its conversion that fits its name."""
        if self._file_names is not None:
            own = self._file_names.own(stored_name)
            if own is None:
                return OF_ANOTHER, None
            stored_name = own
        known = self._named
        found = rename_source_key(stored_name, self._renamings, self._converters, self._prefix, known)
        if found[0] not in known and stored_name in known:
            # As in transformers: it has the model's own name already.
            return rename_source_key(stored_name, [], [], self._prefix, known)
        return found

    def is_unread(self, stored_name: str) -> bool:
        """Whether it is of a tower that is left out."""
        return self.renamed(stored_name)[0] in self._unread
