"""The sample of :mod:`specdist.models.start_check.reference` in the loaded model: its own attention, over a
real cache.

Two rows grow in the same passes, in chunks and in a block, as prompts and candidates do.

T tokens of a pass, H heads, G key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.config.groups import ModelImpl
from specdist.models.attention import probe
from specdist.models.attention.attention import AttentionCall, LayerAttention
from specdist.models.batch.flat import FlatBatch, model_positions
from specdist.models.cache.pages import PageUpdates
from specdist.models.families.adapters import is_paged_by_registry
from specdist.models.passes import compiled_check, fusing
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.hidden import find_layers
from specdist.models.passes.runner import ModelRunner
from specdist.models.passes.torch_pass import TorchPass
from specdist.models.recurrent.mixers import Mixer
from specdist.models.start_check.reference import LAYER_NUMBERS, NUM_STEPS, Sample, layered

PAGE_SIZE = 16
# Of the prompt, in the first pass.
FIRST_PART = 0.6
# What these say that a runner uses, the one of the run says again.
SAID_AGAIN = tuple(logging.getLogger(module.__name__) for module in (compiled_check, fusing, probe))


def run_loaded(
    model: PreTrainedModel,
    sample: Sample,
    *,
    device: torch.device,
    acceleration: Acceleration,
    model_impl: ModelImpl,
) -> dict[str, Tensor]:
    """The same as :func:`specdist.models.start_check.reference.run_reference`, of this rank's heads and
    vocabulary; and ``fast logits``, as the passes of a run compute them, where these are not transformers'
    layers, or keep latents.

    Raises NotImplementedError if the model's layers are not in one list.
    """
    # Recorded passes are compared with unrecorded ones when they are recorded; rounded keys are right.
    acceleration = dataclasses.replace(acceleration, is_static=False, capturer=None, has_float8_cache=False)
    experts = contextlib.nullcontext() if sample.experts is None else sample.experts.alone(model)
    with _only_layers(model, sample), experts, _unsaid():
        plainly = dataclasses.replace(acceleration, is_compiled=False, keeps_latents=False)
        plain = ModelRunner(model, device, plainly, model_impl="transformers", make_pass=_RecordingPass)
        longest = max((rules.window or 0 for rules in plain.rules.values()), default=0)
        if longest >= sample.num_tokens:
            raise NotImplementedError(f"a window of {longest} tokens is too long for a check")
        logits, found = _run(plain, sample), dict[str, Tensor]()
        if is_paged_by_registry(model):  # of other models the reference cannot tell them
            assert isinstance(plain.torch_pass, _RecordingPass)
            found = {name: torch.cat(parts) for name, parts in plain.torch_pass.recorded.items()}
        found["logits"] = logits
        fast = ModelRunner(model, device, acceleration, model_impl=model_impl)
        if fast.compiled is not None or any(rules.is_latent for rules in fast.rules.values()):
            found["fast logits"] = _run(fast, sample)
    order = _in_rows(sample)
    return {
        name if "logits" in name else f"layer {sample.layers[int(name.split()[0])]} {name.split()[1]}": (
            tensor[order]
        )
        for name, tensor in found.items()
    }


def _passes(sample: Sample) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows and places of the tokens of each pass: two chunks of every row's prompt, of several lengths, and a
    block."""
    num_prompt = sample.num_tokens - NUM_STEPS
    rows = np.arange(len(sample.rows))
    firsts = np.minimum((FIRST_PART * num_prompt + rows).astype(int), num_prompt - 1)
    begins = np.zeros_like(firsts)
    for ends in (firsts, np.full_like(firsts, num_prompt), np.full_like(firsts, sample.num_tokens)):
        pairs = list(zip(begins, ends, strict=True))
        yield (
            np.repeat(rows, ends - begins),
            np.concatenate([np.arange(begin, end) for begin, end in pairs]),
        )
        begins = ends


def _in_rows(sample: Sample) -> np.ndarray:
    """Where each token of the rows, one after the other, is in the passes, one after the other."""
    rows, places = (np.concatenate(parts) for parts in zip(*_passes(sample), strict=True))
    return np.lexsort((places, rows))


def _run(runner: ModelRunner, sample: Sample) -> Tensor:
    """Logits [T, V] of all passes' tokens, float32 on the CPU."""
    num_rows, width = len(sample.rows), -(-sample.num_tokens // PAGE_SIZE)
    runner.allocate(
        num_pages=num_rows * width,
        page_size=PAGE_SIZE,
        num_slots=num_rows,
        max_seq_len=sample.num_tokens,
    )
    # Not in order, as pages are in a run.
    pages = np.arange(num_rows * width, dtype=np.int32)[::-1].reshape(width, num_rows).T.copy()
    if runner.rope_border is not None:
        lengths = np.array([positions[-1] + 1 for positions in sample.rows])
        runner.update_pages(PageUpdates.of_rope_lengths(np.arange(num_rows), lengths))
    token_ids = np.stack([sample.token_ids(row) for row in range(num_rows)])
    positions = np.array(sample.rows)
    found = []
    for rows_T, places_T in _passes(sample):
        positions_T = model_positions(rows_T, positions[rows_T, places_T], runner.pages, runner.rope_border)
        batch = FlatBatch(token_ids[rows_T, places_T], rows_T, places_T, position_ids_T=positions_T)
        logits = runner.forward_over(batch, pages, np.arange(len(batch)))
        found.append(logits.float().cpu())
    return torch.cat(found)


class _RecordingPass(TorchPass):
    """Records the inputs of each layer's attention, by layer and name: [T, H * D] of every pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorded: dict[str, list[Tensor]] = {}

    def attention(self, batch: FlatBatch, pages_SP: np.ndarray) -> LayerAttention:
        return _Recording(super().attention(batch, pages_SP), self.recorded)


@dataclasses.dataclass
class _Recording:
    attention: Any
    recorded: dict[str, list[Tensor]]

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        for name, tensor in zip(("queries", "keys", "values"), call[:3], strict=True):
            self.recorded.setdefault(f"{layer} {name}", []).append(tensor.flatten(1).float().cpu())
        found: Tensor = self.attention.attend(layer, call)
        return found

    def mix(self, mixer: Mixer, rows_TR: Tensor) -> Tensor:
        found: Tensor = self.attention.mix(mixer, rows_TR)
        return found


@contextlib.contextmanager
def _unsaid() -> Iterator[None]:
    """A context in which these say no more than warnings."""
    levels = [logger.level for logger in SAID_AGAIN]
    try:
        for logger in SAID_AGAIN:
            logger.setLevel(logging.WARNING)
        yield
    finally:
        for logger, level in zip(SAID_AGAIN, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _only_layers(model: PreTrainedModel, sample: Sample) -> Iterator[None]:
    """A context in which the model has only the sample's layers, with numbers of their own."""
    config = model.config.get_text_config()
    owner, leaf, stack = find_layers(model)
    changed = {**layered(config, sample.layers), **sample.config}
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
