"""Loads weights onto devices: a whole model, or this rank's shard of one that DeepSpeed shards.

Parameters are filled with stored tensors, or with this rank's part of them, as they are read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.families.adapters import use_paged_attention
from specdist.models.families.computed import ComputedTensors, build_without_weights
from specdist.models.files.checkpoint import Checkpoint, auto_class, without_towers
from specdist.models.files.weight_files import open_weights, stored_shapes
from specdist.models.loading.conversions import Piece
from specdist.models.loading.packed_experts import (
    PackedExperts,
    fill_quantized,
    packed_experts_of,
    place_experts,
    use_sorted_experts,
)
from specdist.models.loading.places import StoredPlaces
from specdist.models.loading.weight_names import WeightNames, ties_embeddings
from specdist.models.passes.all_reduce import Choice, choose_sums
from specdist.models.passes.fused_modules import join_quantized, to_empty
from specdist.models.quantized.quantized import quantization_of
from specdist.models.quantized.quantized_linear import QuantizedLinear, choose_products, dequantize_absorbed
from specdist.models.quantized.quantized_weights import QuantizedWeight
from specdist.models.recurrent.cuts import TURNED, Cut, cut_of
from specdist.models.sharding.cutting import cut
from specdist.models.sharding.experts import share_sums
from specdist.utils.errors import UserError
from specdist.utils.packages import check_installed

logger = logging.getLogger(__name__)


class Filling:
    """The parameters of a model that have memory, and what of them is still missing.

    Attributes:
        missing: parameters, stored buffers and quantised weights that are not filled yet.
    """

    def __init__(
        self, model: PreTrainedModel, checkpoint: Checkpoint, stored: StoredPlaces, dtype: torch.dtype
    ) -> None:
        self._model, self._checkpoint, self._stored, self._dtype = model, checkpoint, stored, dtype
        self._targets: dict[str, Tensor | QuantizedLinear | PackedExperts] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **{name: buffer for name, buffer in model.named_buffers() if name in stored.names.known},
            **{
                f"{name}.weight": layer
                for name, layer in model.named_modules()
                if isinstance(layer, QuantizedLinear)
            },
            **dict(packed_experts_of(model)),
        }
        self.missing = set(self._targets)
        # The parts of a quantised tensor, and of what is converted, may lie in several files.
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._collected: dict[str, dict[str, Tensor]] = {}

    def needs(self, stored_name: str) -> bool:
        """Whether any of a stored tensor belongs to the model."""
        tensor, part = self._stored.tensor_of(stored_name)
        if part and part not in self._stored.quantized.expected(tensor):
            return False
        return tensor in self._stored.collected or any(
            # Of what is zero, or of no width, here it is noted that it was there.
            name in self._targets
            and ((cut := self._cut_of(name)) is None or not any(cut.ranges) or bool(piece.on_rank(cut)))
            for name, piece in self._stored.places.get(tensor, ())
        )

    @torch.no_grad()
    def take(self, stored_name: str, whole: Tensor) -> None:
        """Take what belongs to the model; ``whole`` may be overwritten afterwards."""
        tensor, part = self._stored.tensor_of(stored_name)
        if not part:
            self._place(tensor, {tensor: whole})
            return
        found = self._parts.setdefault(tensor, {})
        found[part] = whole.clone()
        if set(self._stored.quantized.expected(tensor)) <= set(found):
            self._place(tensor, self._stored.quantized.matrices(tensor, self._parts.pop(tensor)))

    def _place(self, tensor: str, matrices: Mapping[str, Tensor | QuantizedWeight]) -> None:
        """Put a tensor where it belongs: itself, or the matrices of joined experts."""
        for name, piece in self._stored.places.get(tensor, ()):
            if name in self._targets:
                self._fill(name, piece, matrices[piece.source])
        conversion = self._stored.collected.get(tensor)
        if conversion is None:
            return
        found = self._collected.setdefault(conversion.name, {})
        found[tensor] = _plain(matrices[tensor]).clone()
        if set(found) == conversion.stored_names:
            made = conversion.converted(self._collected.pop(conversion.name), self._whole)
            for name in set(made) & set(self._targets):
                self._fill(name, Piece.whole(name, made[name].shape), made[name])

    def _fill(self, name: str, piece: Piece, whole: Tensor | QuantizedWeight) -> None:
        target = self._targets[name]
        if isinstance(whole, Tensor):
            whole = self._checkpoint.adapted(name, whole)
        if isinstance(target, Tensor):
            self._fill_plain(name, target, piece, whole)
        else:
            fill_quantized(target, piece, whole)
        self.missing.discard(name)

    def _fill_plain(self, name: str, target: Tensor, piece: Piece, whole: Tensor | QuantizedWeight) -> None:
        cut = self._cut_of(name)
        if cut is not None and not any(cut.ranges):
            target.zero_()
        owned = piece.on_rank(cut)
        numbers = _plain(whole) if owned else torch.empty(0)
        layer = self._model.get_submodule(name.rpartition(".")[0])
        if getattr(layer, TURNED, False) and target.dim() == 2:
            target = target.T
        for own in owned:
            local = target
            for dim, (begin, length) in enumerate(zip(own.begin, own.shape, strict=True)):
                local = local.narrow(dim, begin, length)
            local.copy_(own.of(numbers))

    def _cut_of(self, name: str) -> Cut | None:
        target = self._targets[name]
        if not isinstance(target, Tensor):
            return target.cut
        owner, _, leaf = name.rpartition(".")
        return cut_of(self._model.get_submodule(owner), leaf)

    @cached_property
    def _whole(self) -> PreTrainedModel:
        """The model without weights, for conversions that look at it."""
        return build_without_weights(self._checkpoint, self._dtype)


def _plain(whole: Tensor | QuantizedWeight) -> Tensor:
    return whole if isinstance(whole, Tensor) else whole.dequantized(torch.float32)


def load_whole(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_tensor: Callable[[], None] = lambda: None,
) -> PreTrainedModel:
    """All of the model on one device. ``on_tensor`` is called after every tensor that is read here: some
    models are read by transformers. Raises :class:`UserError` if the files do not hold every parameter."""
    is_part = checkpoint.drafter is not None  # of the files of another model
    if is_part or quantization_of(checkpoint) is not None or _is_plain(checkpoint, dtype):
        return _load_read(checkpoint, dtype=dtype, device=device, on_tensor=on_tensor)
    if device.type != "cpu":
        check_installed("accelerate", f"{checkpoint.option} {checkpoint.name} on a GPU", "use --device cpu")
    try:
        model, report = auto_class(checkpoint.config).from_pretrained(
            checkpoint.folder,
            config=checkpoint.config,
            dtype=dtype,
            device_map=None if device.type == "cpu" else {"": device},
            output_loading_info=True,
            trust_remote_code=checkpoint.trusts_code,
            use_safetensors=True,
        )
    except (OSError, SafetensorError) as error:
        raise _vanished(checkpoint, error) from error
    except ImportError as error:
        raise UserError(
            f"{checkpoint.option} {checkpoint.name} needs a package that is not installed here ({error}): "
            "install it, or choose another model"
        ) from error
    # transformers fills them with random numbers.
    refuse_missing(checkpoint, report["missing_keys"])
    model = without_towers(model)
    _merge_adapter(model, checkpoint)
    use_paged_attention(model)
    return model.eval()


@torch.no_grad()
def _merge_adapter(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Merge an adapter into a model that is whole already."""
    for name in checkpoint.adapter.parameters if checkpoint.adapter is not None else ():
        parameter = model.get_parameter(name)
        parameter.copy_(checkpoint.adapted(name, parameter.cpu()))


def _is_plain(checkpoint: Checkpoint, dtype: torch.dtype) -> bool:
    """Whether the model is made of its stored tensors alone, without code of its own."""
    if checkpoint.trusts_code:
        return False
    names = WeightNames(build_without_weights(checkpoint, dtype))
    taken = set().union(*names.takers(_stored_shapes(checkpoint)).values())
    return taken >= set(names.known)


def _load_read(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, on_tensor: Callable[[], None]
) -> PreTrainedModel:
    """Load tensor by tensor, quantised layers as they stay in memory: never a whole dequantised model."""
    model = build_without_weights(checkpoint, dtype)
    computed = ComputedTensors(model)
    stored = StoredPlaces.of(checkpoint, model, _stored_shapes(checkpoint))
    _place_quantized(model, checkpoint, stored, dtype)
    to_empty(model, device)
    computed.restore(model, device)
    _read_weights(model, checkpoint, stored, dtype, on_tensor)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if ties_embeddings(model) and torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
    use_paged_attention(model)
    dequantize_absorbed(model, dtype)
    join_quantized(model)
    choose_products(model, dtype)
    if device.type == "cuda":
        use_sorted_experts(model, device, dtype)
    return model.eval()


def _place_quantized(
    model: PreTrainedModel, checkpoint: Checkpoint, stored: StoredPlaces, dtype: torch.dtype
) -> None:
    """Put quantised layers and packed experts in the place of plain ones, on the meta device."""
    stored.quantized.place_layers(model)
    place_experts(model, checkpoint.name, stored.quantized.formats, stored.of_quantized, dtype)


def load_sharded(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    vocab_size: int,
    is_expert_parallel: bool = False,
    sums: Choice | None = None,
    on_tensor: Callable[[], None] = lambda: None,
) -> PreTrainedModel:
    """This rank's shard, with a part of every expert, or with whole ones (``is_expert_parallel``); ``sums``:
    an earlier choice (:mod:`specdist.models.passes.all_reduce`), else there is a new one. DeepSpeed
    shards the model on the meta device; then each weight is read from its file, which is memory-mapped, and
    cut as DeepSpeed's layer cuts it: a rank holds its shard and at most one file. ``on_tensor`` is called
    after every tensor.

    The logits are those of this rank's part of the first ``vocab_size`` ids, see
    :func:`specdist.sampling.vocab_parallel.vocab_ranges`. All ranks of the world outside of the group must
    call :func:`specdist.models.sharding.cutting.join_sharding` at the same time.

    DeepSpeed's own loading of checkpoint files is not used: it leaves the norms of families that it does not
    list (Gemma's) without weights, and fails if a layer's weight and bias are in different files.
    """
    model = build_without_weights(checkpoint, dtype)
    use_paged_attention(model)
    computed = ComputedTensors(model)
    stored = StoredPlaces.of(checkpoint, model, _stored_shapes(checkpoint))
    shard = cut(
        model,
        checkpoint,
        dtype=dtype,
        group=group,
        vocab_size=vocab_size,
        is_expert_parallel=is_expert_parallel,
    )
    _place_quantized(shard, checkpoint, stored, dtype)
    to_empty(shard, device)
    # DeepSpeed has converted them to the model's dtype: with rotary frequencies in bfloat16 angles are wrong
    # by radians after a thousand tokens.
    computed.restore(shard, device)
    _read_weights(shard, checkpoint, stored, dtype, on_tensor)
    dequantize_absorbed(shard, dtype)
    join_quantized(shard, group)
    choose_products(shard, dtype, group)
    share_sums(shard, group, dtype, device)
    if device.type == "cuda":
        use_sorted_experts(shard, device, dtype)
        width = shard.config.get_text_config().hidden_size
        choose_sums(shard, dtype=dtype, device=device, group=group, width=width, frozen=sums)
    return shard.eval()


def _read_weights(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    stored: StoredPlaces,
    dtype: torch.dtype,
    on_tensor: Callable[[], None],
) -> None:
    """Fill all parameters and stored buffers. Raises :class:`UserError` if the files do not hold them all."""
    filling = Filling(model, checkpoint, stored, dtype)
    for stored_name, whole in _tensors(checkpoint, filling.needs):
        filling.take(stored_name, whole)
        on_tensor()
    refuse_missing(checkpoint, filling.missing)


def _tensors(checkpoint: Checkpoint, needs: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors that are needed, memory-mapped where the format allows it: of a tensor that is cut,
    the parts that nobody takes are not read."""
    try:
        for path in checkpoint.weight_files:
            with open_weights(path) as file:
                for name in file.names:
                    if needs(name):
                        yield name, file.read(name)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _vanished(checkpoint, error) from error


def _stored_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    try:
        return stored_shapes(checkpoint.weight_files)
    except (OSError, SafetensorError) as error:
        raise _vanished(checkpoint, error) from error


def _vanished(checkpoint: Checkpoint, error: Exception) -> UserError:
    """The error for a file that was complete when the job began."""
    return UserError(
        f"{checkpoint.option} {checkpoint.name} has changed since the job began, or cannot be read any more "
        f"({error}): put it back, and start the same command again"
    )


def refuse_missing(checkpoint: Checkpoint, missing: Collection[str]) -> None:
    """Raises :class:`UserError` if any of the model's tensors are in none of its files."""
    if missing:
        raise UserError(
            f"{checkpoint.option} {checkpoint.name}: its files hold no {', '.join(sorted(missing))}: "
            "fetch it again"
        )
