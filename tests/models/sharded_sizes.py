"""A rank of the test of sharded sizes: it counts what DeepSpeed and the sliced head have left it."""

import sys

import torch
import torch.distributed as dist

from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading.loading import load_sharded
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.runner import ModelRunner
from specdist.models.sizes.sizes import model_size
from tests.engine.harness import page_bytes
from tests.models.families import VOCAB_SIZE
from tests.ranks import join, leave

FLOAT_BYTES = 4

topology = join(tp_size=2)
group = dist.new_group([0, 1])
for folder in sys.argv[1:]:
    checkpoint = open_checkpoint("--target", folder)
    model = load_sharded(
        checkpoint, dtype=torch.float32, device=topology.device, group=group, vocab_size=VOCAB_SIZE
    )
    held = sum(weight.numel() for weight in model.parameters()) * FLOAT_BYTES
    predicted = model_size(folder, checkpoint.config, FLOAT_BYTES)
    assert held == predicted.weight_bytes(2), f"{folder}: {held} held, {predicted.weight_bytes(2)} predicted"
    runner = ModelRunner(model, topology.device, Acceleration())
    assert page_bytes(runner, 1) == predicted.cache_bytes_per_token(2), folder
leave()
