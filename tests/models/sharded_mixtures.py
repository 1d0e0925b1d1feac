"""A rank of the test of mixtures over ranks: experts cut by their width, and whole ones.

In float32 the tokens of ``generate`` are the likeliest at every place, so that a run chooses them. In
bfloat16 distributions are as near to those of the whole model as these are to those in float32, within a
factor; with one expert of one layer dropped, or a few of many, they are not.

T tokens, V ids.
"""

from __future__ import annotations

import sys
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.batch.flat import FlatBatch
from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading.loading import load_sharded
from specdist.models.passes.runner import ModelRunner
from specdist.models.sharding.experts import experts_of
from specdist.models.start_check.loading_check import check_loading
from tests.models.all_families import VOCAB_SIZE
from tests.models.chunks import give_pages
from tests.ranks import join, leave

PASSES = (0, 3, 30, 31)
# float32 sums in another order, of logits of order 10.
TOLERANCE = 2e-4
# Rounding before and after a sum over ranks, beside that of the whole model.
FACTOR, FAULT_FACTOR = 2.0, 1.5
SUMS_PER_LAYER = 2


def shared_logits(model: PreTrainedModel, ids_T: np.ndarray) -> tuple[Tensor, int]:
    """[T, V] of all ranks' slices, and the sums over the ranks in the last pass."""
    runner, found, num_sums = ModelRunner(model, topology.device), [], 0
    give_pages(runner, ids_T[None], page_size=4)
    for begin, end in zip(PASSES, (*PASSES[1:], len(ids_T)), strict=True):
        positions = np.arange(begin, end)
        batch = FlatBatch(ids_T[positions], np.zeros_like(positions), positions)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            found.append(runner.forward(batch, np.arange(len(positions))).float())
        num_sums = all_reduce.call_count
    slices = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(slices, torch.cat(found))
    return torch.cat(slices, dim=1), num_sums


def distance(found: Tensor, wanted: Tensor) -> float:
    """In total variation, the mean of all tokens."""
    return float((found.softmax(1) - wanted.softmax(1)).abs().sum(1).mean() / 2)


topology = join(tp_size=int(sys.argv[1]))
group = dist.new_group(list(range(topology.tp_size)))
for folder in sys.argv[2:]:
    reference = torch.load(f"{folder}/wanted.pt")
    tokens, wanted, rounded = reference["tokens"], reference["logits"], reference["rounded"]
    ids_T, checkpoint = tokens[0].numpy(), open_checkpoint("--target", folder)
    for is_expert_parallel in (False, True):
        model = load_sharded(
            checkpoint,
            dtype=torch.float32,
            device=topology.device,
            group=group,
            vocab_size=VOCAB_SIZE,
            is_expert_parallel=is_expert_parallel,
        )
        what = (folder, is_expert_parallel)
        found, num_sums = shared_logits(model, ids_T)
        assert num_sums == SUMS_PER_LAYER * model.config.num_hidden_layers, (what, num_sums)
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)
        new_T = ids_T[reference["prompt_length"] :]
        assert found[-1 - len(new_T) : -1].argmax(1).tolist() == new_T.tolist(), what
        where = {"device": topology.device, "vocab_size": VOCAB_SIZE, "group": group}
        check = check_loading(model, checkpoint, dtype=torch.float32, **where)
        assert check.is_checked == topology.is_rank0, check.reason
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        allowed = FACTOR * distance(rounded, wanted)
        own = distance(shared_logits(model, ids_T)[0], rounded)
        _, experts = next(iter(experts_of(model)))
        if not is_expert_parallel or topology.rank == 0:
            experts.down_proj.data[: max(1, len(experts.down_proj) // 8)] = 0
        dropped = distance(shared_logits(model, ids_T)[0], rounded)
        print(*what, f"{own:.3g} of {allowed:.3g}; without an expert {dropped:.3g}")  # noqa: T201
        assert own <= allowed and FAULT_FACTOR * allowed < dropped, what
leave()
