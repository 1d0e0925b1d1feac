"""A rank of the sharded parity test: all but the last share each model, which stands by like a draft.

Each computes the logits of its part of the vocabulary, one more of them on rank 0; of padding none does.
``FOLDER=ADAPTER`` is a model with an adapter, merged here, beside the weights in PEFT. After the word
``--plain`` passes are run without graphs and kernels alone.
"""

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdist.models.attention import expansion
from specdist.models.batch.flat import FlatBatch
from specdist.models.families.family_check import check_family
from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading.adapter_folder import open_adapter
from specdist.models.loading.loading import load_sharded
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.runner import ModelRunner
from specdist.models.sharding.cutting import join_sharding
from specdist.sampling.vocab_parallel import vocab_ranges
from tests.models.chunks import give_pages
from tests.models.families import VOCAB_SIZE
from tests.models.peft_adapters import with_adapter
from tests.ranks import join, leave

TOLERANCE = 5e-5  # float32 sums in another order
NUM_IDS = VOCAB_SIZE - 5
CHUNKS = ({0: (0, 20), 1: (0, 3)}, {1: (3, 30), 0: (20, 25)}, {0: (25, 26), 1: (30, 36)})
# A token takes Triton's interpreter long: just past a window, or a page.
PAST_WINDOW = ({0: (0, 14), 1: (0, 2)}, {0: (14, 17), 1: (2, 3)}, {0: (17, 18), 1: (3, 4)})
PAST_PAGE = ({0: (0, 3), 1: (0, 2)}, {0: (3, 5), 1: (2, 3)}, {0: (5, 6), 1: (3, 4)})

# Of each set of fused steps a family. Triton's interpreter takes long.
ACCELERATED = {"llama", "gemma2", "olmo2", "youtu"}
STEPS = {"RMS norm", "residual and norm", "rotary embedding", "gated activation"}
# OLMo 2 norms only behind; a part of a head of latent attention is rotated.
FEWER = {"olmo2": {"residual and norm"}, "youtu": {"rotary embedding"}}
# Of layers that read the same input.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def steps_of(model: PreTrainedModel) -> set[str]:
    """What is fused."""
    has_norms = any(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    fused = STEPS - FEWER.get(model.config.model_type, set()) if has_norms else set()
    has_siblings = any(
        set(names) <= module._modules.keys() for module in model.modules() for names in SIBLINGS
    )
    return fused | {"joined product"} if has_siblings else fused


# Whole chunks of small models expand latents, and others do not.
expansion.OPERATIONS_PER_BYTE = 0
has_kernels = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
num_ranks = int(os.environ["WORLD_SIZE"]) - 1
topology = join(tp_size=num_ranks)
group = dist.new_group(list(range(num_ranks)))
is_plain = sys.argv[1] == "--plain"
for argument in sys.argv[1 + is_plain :]:
    folder, _, adapter = argument.partition("=")
    checkpoint = open_checkpoint("--target", folder)
    if adapter:
        checkpoint = replace(checkpoint, adapter=open_adapter("--target_adapter", adapter, checkpoint))
    check_family(checkpoint, tp_size=num_ranks)
    if not topology.holds_target:
        join_sharding()
        continue
    model = load_sharded(
        checkpoint, dtype=torch.float32, device=topology.device, group=group, vocab_size=NUM_IDS
    )
    ids = vocab_ranges(NUM_IDS, num_ranks)[topology.rank]
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    if adapter:
        plain = with_adapter(plain, Path(adapter))
    rows = np.random.default_rng(1).integers(2, VOCAB_SIZE, size=(2, 40))
    with torch.inference_mode():
        expected = plain(torch.from_numpy(rows)).logits[:, :, ids.start : ids.stop]
    is_other = is_plain or adapter or model.config.tie_word_embeddings
    can_be_accelerated = not is_other and model.config.model_type in ACCELERATED
    for accelerated in (False, True) if can_be_accelerated else (False,):
        # Fused where Triton is there to be interpreted: the projections between are sharded.
        acceleration = Acceleration(is_static=accelerated, is_fused=accelerated)
        runner = ModelRunner(model, topology.device, acceleration)
        if accelerated and has_kernels:
            fused = {what.split(" of ")[0] for what in runner.torch_pass._fused.num_fused}
            assert fused == steps_of(model), (folder, fused)
        give_pages(runner, rows, page_size=4)
        few_tokens = PAST_WINDOW if getattr(model.config, "sliding_window", None) else PAST_PAGE
        for chunk in few_tokens if accelerated and has_kernels else CHUNKS:
            slots = np.concatenate([np.full(end - begin, slot) for slot, (begin, end) in chunk.items()])
            positions = np.concatenate([np.arange(begin, end) for begin, end in chunk.values()])
            batch = FlatBatch(rows[slots, positions], slots, positions)
            logits = runner.forward(batch, np.arange(len(slots)))
            torch.testing.assert_close(logits, expected[slots, positions], atol=TOLERANCE, rtol=TOLERANCE)
leave()
