"""A rank of the parity test in bfloat16: two ranks share the model of each folder, far into a text.

Rank 0 runs the whole model with transformers' own attention; rank 1 runs it with another attention and with
the products that sharding cuts summed in two parts: how far these two are apart is what order of summation
costs in this precision, on this machine. The shared model may be ``FACTOR`` times as far from the first.

T asked tokens, V ids.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from specdist.models.batch.flat import FlatBatch
from specdist.models.families import computed
from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading.loading import load_sharded
from specdist.models.passes.runner import ModelRunner
from specdist.models.sizes.sizes import SUMMED
from tests.models.chunks import give_pages
from tests.models.families import VOCAB_SIZE
from tests.ranks import join, leave

# The same products, rounded at the same places: errors of the same size, and over thousands of logits their
# ratio is steady.
FACTOR = 2.5
# The old rotary buffers are planted again: so far beyond what is allowed is the shared model then, at least.
FAULT_FACTOR, PLANTED = 1.2, ("llama", "gpt_neox")
NUM_TOKENS = 2080
CHUNKS = ((0, 900), (900, 2050), *((position, position + 1) for position in range(2050, 2056)), (2056, 2080))
ASKED_T = np.array([*range(0, 60, 4), *range(1990, NUM_TOKENS)])

topology = join(tp_size=2)
group = dist.new_group([0, 1])
token_ids = np.random.default_rng(1).integers(2, VOCAB_SIZE, size=NUM_TOKENS)


def in_two_parts(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Its product as two ranks have it: each rounds its part of the sum, and the parts are added."""

    def forward(x: Tensor) -> Tensor:
        half = layer.in_features // 2
        parts = (
            F.linear(x[..., :half], layer.weight[:, :half]),
            F.linear(x[..., half:], layer.weight[:, half:]),
        )
        total = parts[0] + parts[1]
        return total if layer.bias is None else total + layer.bias

    return forward


@torch.inference_mode()
def whole_logits(folder: str, dtype: torch.dtype, *, is_cut: bool) -> Tensor:
    """[T, V] of a plain forward."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    if is_cut and model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    for name, module in model.named_modules() if is_cut else ():
        if isinstance(module, nn.Linear) and name.endswith(SUMMED):
            module.forward = in_two_parts(module)  # type: ignore[method-assign]
    logits = model(torch.from_numpy(token_ids)[None], logits_to_keep=torch.from_numpy(ASKED_T)).logits[0]
    return logits[:, :VOCAB_SIZE].float()


def shared_logits(folder: str, dtype: torch.dtype) -> Tensor:
    """[T, V] of both ranks' slices, through the paged runner in chunks and single steps."""
    model = load_sharded(
        open_checkpoint("--target", folder),
        dtype=dtype,
        device=topology.device,
        group=group,
        vocab_size=VOCAB_SIZE,
    )
    runner = ModelRunner(model, topology.device)
    give_pages(runner, token_ids[None], page_size=16)
    own = []
    for begin, end in CHUNKS:
        positions = np.arange(begin, end)
        asked = np.flatnonzero(np.isin(positions, ASKED_T))
        own.append(
            runner.forward(FlatBatch(token_ids[positions], np.zeros_like(positions), positions), asked)
        )
    slices = [torch.empty(0)] * 2
    dist.all_gather_object(slices, torch.cat(own).float())
    return torch.cat(slices, dim=1)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Of all asked tokens' logits, relative to their size, each row less its mean."""
    found, wanted = (logits - logits.mean(dim=1, keepdim=True) for logits in (found, wanted))
    return float((found - wanted).norm() / wanted.norm())


def into_converted_buffers(self: computed.ComputedTensors, model: nn.Module, device: torch.device) -> None:
    """The old fault: as in buffers that were converted to the model's precision."""
    dtype = next(model.parameters()).dtype
    for key, tensor in self._tensors.items():
        for place in self._places[key]:
            buffer = model.get_submodule(place.module)._buffers[place.name]
            buffer.copy_(tensor.to(dtype))  # type: ignore[union-attr]


sound, dtype = computed.ComputedTensors.restore, torch.bfloat16
for folder in sys.argv[1:]:
    wholes = [torch.empty(0)] * 2
    dist.all_gather_object(wholes, whole_logits(folder, dtype, is_cut=topology.rank == 1))
    allowed = FACTOR * distance(wholes[1], wholes[0])
    found = distance(shared_logits(folder, dtype), wholes[0])
    print(f"{folder}: {found:.3g} of {allowed:.3g} allowed")  # noqa: T201 (shown if a rank fails)
    assert found <= allowed, (folder, found, allowed)
    if folder.endswith(PLANTED):
        computed.ComputedTensors.restore = into_converted_buffers  # type: ignore[method-assign]
        found = distance(shared_logits(folder, dtype), wholes[0])
        computed.ComputedTensors.restore = sound  # type: ignore[method-assign]
        print(f"{folder}: {found:.3g} with the old buffers")  # noqa: T201
        assert found > FAULT_FACTOR * allowed, (folder, found, allowed)
leave()
