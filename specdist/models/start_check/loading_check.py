"""Checks that the loaded target is the model of the files: computes a few layers a second time.

A tensor that is cut wrongly, a missing scale or rotary frequencies in low precision make another model, which
still answers fluently. So at every start the loaded target runs a few tokens, far apart, through its first
and last layer (and one of every kind of layer) and its output head. Rank 0 computes the same with a model
that transformers builds and loads itself, unsharded and in float32, from those layers, a few rows of the
vocabulary and a few of many experts, with transformers' own attention and masks: it shares no code
with what is checked. Those are the layers, the paged cache and the kernels of the run.

Compared are the queries, keys and values of each of these layers after the rotary embedding, so that a wrong
position shows even where attention is flat, and the logits.

The tolerance is measured: the error of the same small model, unsharded, in the run's dtype. Sharding sums in
another order and rounds partial sums; errors of loading are as large as the numbers themselves.

T tokens, N numbers of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.attention.attention import AttentionCall, LayerAttention
from specdist.models.batch.flat import FlatBatch, model_positions
from specdist.models.cache.pages import PageUpdates
from specdist.models.families.adapters import is_paged_by_registry
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.hidden import find_layers
from specdist.models.passes.runner import ModelRunner
from specdist.models.passes.torch_pass import TorchPass
from specdist.models.recurrent.mixers import Mixer
from specdist.models.sharding.cutting import VocabParallelHead
from specdist.models.start_check.reference import (
    LAYER_NUMBERS,
    Sample,
    choose_sample,
    read_sample,
    run_reference,
)
from specdist.utils.errors import UserError

PAGE_SIZE = 16

# Rounded partial sums of several ranks have a few times the error of one rank.
TOLERANCE_FACTOR = 8.0
# The tolerance for float32, where the measured error may be 0, but sums in another order differ.
LEAST_TOLERANCE = 2.0**-10
# Where inputs of layers are rounded to 8 bits, sums in another order move some to the next number.
LEAST_ROUNDED_TOLERANCE = 2.0**-5
MAX_REASON_CHARACTERS = 200

logger = logging.getLogger(__name__)


def run_loaded(model: PreTrainedModel, sample: Sample, device: torch.device) -> dict[str, Tensor]:
    """The same as :func:`specdist.models.start_check.reference.run_reference`, of this rank's heads and
    vocabulary. Compiled code and kept latents have checks of their own against the layers that run here.

    Raises NotImplementedError if the model's layers are not in one list.
    """
    # Recorded passes are compared with unrecorded ones when they are recorded; rounded keys are right.
    best = Acceleration.of(device)
    acceleration = Acceleration(kernels=best.kernels, is_fused=best.is_fused, keeps_latents=False)
    experts = contextlib.nullcontext() if sample.experts is None else sample.experts.alone(model)
    with _only_layers(model, sample), experts, _unsaid():
        runner = ModelRunner(model, device, acceleration, model_impl="transformers", make_pass=_RecordingPass)
        logits_TV, found = _run(runner, sample), dict[str, Tensor]()
        if is_paged_by_registry(model):  # of other models the reference cannot tell them
            assert isinstance(runner.torch_pass, _RecordingPass)
            found = {
                f"layer {sample.layers[layer]} {what}": tensor
                for (layer, what), tensor in runner.torch_pass.recorded.items()
            }
    return {**found, "logits": logits_TV}


def _run(runner: ModelRunner, sample: Sample) -> Tensor:
    """Logits [T, V] of all tokens, float32 on the CPU."""
    num_tokens = len(sample.positions)
    num_pages = -(-num_tokens // PAGE_SIZE)
    runner.allocate(num_pages=num_pages, page_size=PAGE_SIZE, num_slots=1, max_seq_len=num_tokens)
    slots_T = np.zeros(num_tokens, np.int64)
    if runner.rope_border is not None:
        lengths = np.array([sample.positions[-1] + 1])
        runner.update_pages(PageUpdates(slots_T[:1], -1 - lengths, slots_T[:1]))
    own = model_positions(slots_T, np.array(sample.positions), runner.pages, runner.rope_border)
    batch = FlatBatch(sample.token_ids, slots_T, np.arange(num_tokens), position_ids_T=own)
    # Not in order, as pages are in a run.
    pages_1P = np.arange(num_pages, dtype=np.int32)[None, ::-1].copy()
    return runner.forward_over(batch, pages_1P, np.arange(num_tokens)).float().cpu()


class _RecordingPass(TorchPass):
    """Records the inputs of each layer's attention, by layer and name: [T, H * D]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorded: dict[tuple[int, str], Tensor] = {}

    def attention(self, batch: FlatBatch, pages_SP: np.ndarray) -> LayerAttention:
        return _Recording(super().attention(batch, pages_SP), self.recorded)


@dataclasses.dataclass
class _Recording:
    attention: Any
    recorded: dict[tuple[int, str], Tensor]

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        for name, tensor in zip(("queries", "keys", "values"), call[:3], strict=True):
            self.recorded[layer, name] = tensor.flatten(1).float().cpu()
        found: Tensor = self.attention.attend(layer, call)
        return found

    def mix(self, mixer: Mixer, rows_TR: Tensor) -> Tensor:
        found: Tensor = self.attention.mix(mixer, rows_TR)
        return found


@contextlib.contextmanager
def _unsaid() -> Iterator[None]:
    """A context in which no more than warnings is said: the runner of the run says what it uses again."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _only_layers(model: PreTrainedModel, sample: Sample) -> Iterator[None]:
    """A context in which the model has only the sample's layers, with numbers of their own."""
    config = model.config.get_text_config()
    owner, leaf, stack = find_layers(model)
    changed = sample.changes(config)
    undo: list[Callable[[], None]] = [lambda: setattr(owner, leaf, stack)]

    def change(each: Any, name: str, value: Any) -> None:
        before = getattr(each, name)
        undo.append(lambda: setattr(each, name, before))
        setattr(each, name, value)

    try:
        kept = torch.nn.ModuleList(stack[layer] for layer in sample.layers)
        setattr(owner, leaf, kept)
        for number, layer in enumerate(kept):
            for module in layer.modules():
                for name in LAYER_NUMBERS:
                    if isinstance(vars(module).get(name), int):
                        change(module, name, number)
        for name, value in changed.items():
            change(config, name, value)
        yield
    finally:
        for each in reversed(undo):
            each()


@dataclass(frozen=True)
class Failure:
    """Why a pass gave nothing; ``is_limit``: the check cannot run such a model, and says nothing of it."""

    reason: str
    is_limit: bool


# A rank's tensors, or why there are none.
Part = dict[str, Tensor] | Failure


@dataclass(frozen=True, kw_only=True)
class LoadingCheck:
    """The result of the check, for the manifest.

    Attributes:
        reason: why nothing could be compared; None if it was.
        quantity: the quantity whose ``difference`` (of one token, relative to its size) is nearest to its
            ``tolerance``.
    """

    reason: str | None = None
    layers: tuple[int, ...] = ()
    num_tokens: int = 0
    last_position: int = 0
    quantity: str = ""
    difference: float = 0.0
    tolerance: float = 0.0

    @property
    def is_checked(self) -> bool:
        return self.reason is None

    def to_json(self) -> dict[str, Any]:
        if self.reason is not None:
            return {"is_checked": False, "reason": self.reason}
        values = dataclasses.asdict(self)
        del values["reason"]
        return {"is_checked": True, **values, "layers": list(self.layers)}

    def __str__(self) -> str:
        layers = ", ".join(map(str, self.layers))
        return (
            f"layers {layers} and the head agree with an unsharded float32 computation: {self.quantity} "
            f"differ most, by {self.difference:.2g} of their size (tolerance {self.tolerance:.2g})"
        )


def check_loading(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
) -> LoadingCheck:
    """Compare a loaded target with its files. All ranks of the group call it; only the result of its rank 0
    counts.

    Args:
        group: the ranks that share the model; None for a whole model.
        vocab_size: number of ids with logits.

    Raises:
        UserError: on rank 0, if they differ, or the loaded model itself does not run.
    """
    try:
        sample = choose_sample(checkpoint, vocab_size, model)
    except Exception as error:  # a family that cannot be cut to a few layers may still be loaded correctly
        return LoadingCheck(reason=_reason(error))
    whole, failures = _parts(model, sample, device, group)
    # It may be the few layers that do not run.
    is_limit = all(each.is_limit for each in failures)
    in_full = [] if is_limit else _parts(model, _in_full(sample, checkpoint), device, group)[1]
    if group is not None and dist.get_rank(group):
        return LoadingCheck(reason="see rank 0")
    for failure in in_full:
        if not failure.is_limit:
            raise UserError(
                f"{checkpoint.option} {checkpoint.name} was loaded and does not run ({failure.reason}). "
                "Nothing was generated: choose another model, and report it with the model's name and the "
                "versions in manifest.json"
            )
    if failures:
        return LoadingCheck(reason=failures[0].reason)
    loaded = {name: torch.cat([each[name] for each in whole], dim=1) for name in whole[0]}
    try:
        stored = read_sample(checkpoint, model, sample)
        exact, rounded = (
            run_reference(type(model), checkpoint, sample, stored, *where)
            for where in ((torch.float32, torch.device("cpu")), (dtype, device))
        )
    except Exception as error:  # as above
        return LoadingCheck(reason=_reason(error))
    rounds = any(form.activations is not None for form, *_ in stored.rounded.values())
    least = LEAST_ROUNDED_TOLERANCE if rounds else LEAST_TOLERANCE
    exact, rounded = (
        {name: _repeated(name, wanted, whole) for name, wanted in computed.items()}
        for computed in (exact, rounded)
    )
    if lacking := set(loaded) ^ set(exact):
        return LoadingCheck(reason=f"only one of the two computations has {', '.join(sorted(lacking))}")
    return _compared(checkpoint, sample, loaded, exact, rounded, least, len(whole))


def _parts(
    model: PreTrainedModel, sample: Sample, device: torch.device, group: dist.ProcessGroup | None
) -> tuple[list[dict[str, Tensor]], list[Failure]]:
    """The tensors of the ranks that ran the sample, and the failures of the others."""
    part: Part
    try:
        part = _own_part(model, run_loaded(model, sample, device), sample)
    except Exception as error:  # all ranks wait for the others' parts
        part = Failure(_reason(error), isinstance(error, NotImplementedError))
    parts = _of_all_ranks(part, group)
    return (
        [each for each in parts if not isinstance(each, Failure)],
        [each for each in parts if isinstance(each, Failure)],
    )


def _in_full(sample: Sample, checkpoint: Checkpoint) -> Sample:
    """The same tokens through the whole model."""
    layers = tuple(range(checkpoint.config.get_text_config().num_hidden_layers))
    return dataclasses.replace(sample, layers=layers, experts=None)


def _reason(error: Exception) -> str:
    """Why nothing can be compared."""
    logger.debug("the sample cannot be computed", exc_info=True)
    text = " ".join(str(error).split())
    if not isinstance(error, NotImplementedError):
        text = f"{type(error).__name__}: {text}"
    return textwrap.shorten(text, MAX_REASON_CHARACTERS)


def _own_part(model: PreTrainedModel, found: dict[str, Tensor], sample: Sample) -> dict[str, Tensor]:
    """``found`` with only the sample's ids of this rank's logits."""
    head = model.get_output_embeddings()
    own = head.ids if isinstance(head, VocabParallelHead) else range(found["logits"].shape[1])
    columns = [token_id - own.start for token_id in sample.vocab_ids if token_id in own]
    return {name: tensor[:, columns] if name == "logits" else tensor for name, tensor in found.items()}


def _of_all_ranks(part: Part, group: dist.ProcessGroup | None) -> list[Part]:
    """Parts in the order of the ranks, and so of the heads and of the vocabulary."""
    parts = [part]
    if group is not None:
        parts *= dist.get_world_size(group)
        dist.all_gather_object(parts, part, group=group)
    return parts


def _repeated(quantity: str, wanted: Tensor, parts: Sequence[dict[str, Tensor]]) -> Tensor:
    """The quantity as the ranks together have it: with fewer key/value heads than ranks each has one."""
    if quantity == "logits" or quantity not in parts[0]:
        return wanted
    width = parts[0][quantity].shape[1]
    repeats = max(1, width * len(parts) // wanted.shape[1])
    return wanted.unflatten(1, (-1, width)).repeat_interleave(repeats, dim=1).flatten(1)


def _compared(
    checkpoint: Checkpoint,
    sample: Sample,
    loaded: dict[str, Tensor],
    exact: dict[str, Tensor],
    rounded: dict[str, Tensor],
    least_tolerance: float,
    num_ranks: int,
) -> LoadingCheck:
    checks = []
    for quantity, found in loaded.items():
        wanted = exact[quantity]
        own_error = relative_difference(rounded[quantity], wanted)
        checks.append(
            LoadingCheck(
                layers=sample.layers,
                num_tokens=len(sample.positions),
                last_position=sample.positions[-1],
                quantity=quantity,
                difference=float(f"{relative_difference(found, wanted):.3g}"),
                tolerance=float(f"{max(least_tolerance, TOLERANCE_FACTOR * own_error):.3g}"),
            )
        )
    # Not "difference > tolerance": NaN is also wrong.
    failed = [check for check in checks if not check.difference <= check.tolerance]
    if failed:
        raise UserError(
            f"{checkpoint.option} {checkpoint.name} was not loaded as it is in its files: "
            f"{failed[0].quantity} differ by {failed[0].difference:.3g} of their size from an unsharded "
            f"computation in float32, where {failed[0].tolerance:.3g} is the most that rounding explains. "
            f"Nothing was generated: {'try --tp_size 1, and ' if num_ranks > 1 else ''}report it with the "
            "model's name and the versions in manifest.json"
        )
    worst = max(checks, key=lambda check: check.difference / check.tolerance)
    if worst.tolerance >= 1:
        return LoadingCheck(reason=f"{worst.quantity} have no correct digit in {checkpoint.name}'s dtype")
    return worst


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    """The largest of any token, [T, N] against [T, N], after subtracting the mean over N, since logits may be
    shifted by a constant."""
    found, wanted = (tensor - tensor.mean(dim=1, keepdim=True) for tensor in (found, wanted))
    sizes_T = wanted.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((found - wanted).norm(dim=1) / sizes_T).max())
