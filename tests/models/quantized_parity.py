"""A rank of the parity test of quantised models: sharded over two ranks they are what they are whole, but for
scales of inputs, of which every rank has those of its own columns.

Its arguments are a file for the differences, one of each model, and the models: folders, some of them
``FOLDER=KIND`` with the kind of ``--target_quantization``.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from specdist.models.families.family_check import check_family
from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading import loading
from specdist.models.loading.loading import load_sharded, load_whole
from specdist.models.loading.places import check_weights
from specdist.models.quantized.quantized import quantization_of
from specdist.models.quantized.quantized_linear import QuantizedLinear, choose_products
from specdist.models.sizes.sizes import model_size
from specdist.models.start_check.loading_check import check_loading, relative_difference
from specdist.sampling.vocab_parallel import vocab_ranges
from tests.models.families import VOCAB_SIZE
from tests.models.test_quantized import TOKENS, logits_of
from tests.ranks import join, leave

allocated: list[int] = []
to_empty = loading.to_empty


def counting(module: torch.nn.Module, device: torch.device) -> None:
    """Notes the bytes of a model that gets memory."""
    tensors = [*module.parameters(), *module.buffers()]
    allocated.append(sum(tensor.nbytes for tensor in tensors))
    to_empty(module, device)


def by_ranks(layer: QuantizedLinear, inputs: Tensor) -> Tensor:
    """A layer whose inputs are rounded with a scale for each half of a token's columns."""
    sums: Any = 0
    for part, weight in zip(
        inputs.chunk(2, dim=-1), layer.weight.dequantized(torch.float32).chunk(2, dim=1), strict=True
    ):
        if layer.form.numbers == "int8":
            scale = part.abs().amax(-1, keepdim=True) / 127.5
            numbers = (part / scale).round().clamp(-128, 127)
        else:
            scale = part.abs().amax(-1, keepdim=True) / 448
            numbers = (part / scale).to(torch.float8_e4m3fn)
        sums += (F.linear(numbers.double(), weight.double()) * scale).float()
    return sums if layer.bias is None else sums + layer.bias


loading.to_empty = counting
topology = join(tp_size=2)
group = dist.new_group([0, 1])
own = vocab_ranges(VOCAB_SIZE, 2)[topology.rank]
differences = []
for argument in sys.argv[2:]:
    folder, _, request = argument.partition("=")
    checkpoint = replace(open_checkpoint("--target", folder), quantization=request or None)
    check_family(checkpoint, 2)
    check_weights(checkpoint, 2)
    where = {"dtype": torch.float32, "device": topology.device}
    whole = load_whole(checkpoint, **where)
    size = model_size("it", checkpoint.config, 4, quantization=quantization_of(checkpoint))
    weights = [layer.weight for layer in whole.modules() if isinstance(layer, QuantizedLinear)]
    tensors = [each for w in weights for each in (w.numbers, w.scales_AB, w.zeros_AB) if each is not None]
    held = size.quantized_bytes + size.whole_quantized_bytes
    assert held == sum(each.nbytes for each in tensors), argument
    allocated.clear()
    shard = load_sharded(checkpoint, **where, group=group, vocab_size=VOCAB_SIZE)
    # At no time the plain shard, as DeepSpeed would allocate it.
    num_bytes = sum(tensor.nbytes for tensor in [*shard.parameters(), *shard.buffers()])
    assert len(allocated) == 1 and allocated[0] <= num_bytes, (argument, allocated, num_bytes)
    layers = [each for each in shard.modules() if isinstance(each, QuantizedLinear)]
    assert len(layers) == len(weights) > 0 and any(layer.cut is not None for layer in layers)
    of_whole = [layer.weight for layer in layers if layer.cut is None]
    assert size.whole_quantized_bytes == sum(w.numbers.nbytes + w.scales_AB.nbytes for w in of_whole), (
        argument
    )
    assert size.num_whole_quantized == sum(w.numbers.numel() for w in of_whole), argument
    # A row's scale stays whole where its inputs are cut.
    for name, layer in shard.named_modules():
        if isinstance(layer, QuantizedLinear) and layer.cut is not None:
            wanted = whole.get_submodule(name).weight.dequantized(torch.float32)
            own_rows = torch.tensor([index for each in layer.cut.ranges for index in each], dtype=torch.int64)
            wanted = wanted.index_select(layer.cut.dim, own_rows)
            assert torch.equal(layer.weight.dequantized(torch.float32), wanted), (argument, name)
    scaled = [
        name
        for name, layer in shard.named_modules()
        if isinstance(layer, QuantizedLinear) and layer.sums_over_ranks and layer.form.activations == "token"
    ]
    for name in scaled:
        layer = whole.get_submodule(name)
        layer.forward = partial(by_ranks, layer)
    expected = logits_of(whole, TOKENS)[:, own.start : own.stop]
    difference = relative_difference(logits_of(shard, TOKENS), expected)
    assert difference < 1, (argument, difference)  # not NaN either, which a maximum may lose
    differences.append(difference)
    check = check_loading(
        shard, checkpoint, dtype=torch.float32, device=topology.device, vocab_size=VOCAB_SIZE, group=group
    )
    assert check.is_checked == topology.is_rank0, check.reason
    if request == "int8":  # what one rank has no kernel for no rank uses
        with patch.object(torch, "_int_mm", None if topology.rank else torch._int_mm):
            choose_products(shard, torch.float32, group)
        assert all(each._product == each.dequantized_product for each in layers)
largest = torch.tensor(differences)
dist.all_reduce(largest, dist.ReduceOp.MAX)
if topology.is_rank0:
    Path(sys.argv[1]).write_text(json.dumps(largest.tolist()))
leave()
