"""A rank that loads its shard of a large checkpoint, or the draft, and checks its peak memory.

Arguments: folders of target and draft.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading.loading import load_sharded, load_whole
from specdist.models.sharding.cutting import join_sharding
from tests.ranks import join, leave

MIB = 2**20
# The interpreter's own growth while DeepSpeed and transformers build modules, and one whole tensor in use.
OVERHEAD_BYTES = 64 * MIB


def status(field: str) -> int:
    """A memory field of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


topology = join(tp_size=2)
group = dist.new_group([0, 1])
checkpoint = open_checkpoint("--target", sys.argv[1])
if topology.holds_target:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    model = load_sharded(
        checkpoint,
        dtype=torch.float32,
        device=topology.device,
        group=group,
        vocab_size=checkpoint.vocab_width,
    )
    peak = status("VmHWM") - before
    slice_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    largest = max(path.stat().st_size for path in checkpoint.weight_files)
    whole = sum(path.stat().st_size for path in checkpoint.weight_files)
    limit = largest + slice_bytes + OVERHEAD_BYTES
    assert peak <= limit, f"{peak / MIB:.0f} MiB are more than {limit / MIB:.0f}"
    # Sharding over two ranks is meant to halve the memory.
    assert slice_bytes < 0.6 * whole, f"{slice_bytes / MIB:.0f} of {whole / MIB:.0f} MiB"
else:
    join_sharding()
    draft = open_checkpoint("--draft", sys.argv[2])
    load_whole(draft, dtype=torch.float32, device=topology.device)
leave()
