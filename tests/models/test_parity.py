"""The flat forward over the paged cache against one plain transformers forward per row."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from specdist.cache.pages import PageTable
from specdist.models.attention import ATTENTION_NAME
from specdist.models.flat import FlatBatch
from specdist.models.runner import ModelRunner
from tests.models.families import FAMILIES, VOCAB_SIZE, tiny_model
from tests.ranks import run_ranks

PAGE_SIZE = 4
# float32 sums in another order; the logits are of order 1 to 10.
TOLERANCE = 5e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_chunks_match_plain_forwards(family: str) -> None:
    plain = tiny_model(family)
    paged = copy.deepcopy(plain)
    paged.set_attn_implementation(ATTENTION_NAME)
    runner = ModelRunner(paged, torch.device("cpu"))
    runner.allocate(num_pages=64, page_size=PAGE_SIZE, num_slots=5, max_seq_len=80)
    pages = PageTable(num_pages=64, page_size=PAGE_SIZE, num_slots=5)
    generator = np.random.default_rng(0)
    rows = {slot: generator.integers(2, VOCAB_SIZE, size=length) for slot, length in
            {4: 41, 0: 23, 2: 70, 1: 9}.items()}  # fmt: skip
    # Whole prompts, verification blocks, single steps and later chunks, mixed; rows begin at different times.
    schedule = [{4: 20, 0: 5}, {4: 21, 2: 60}, {4: 25, 0: 12, 2: 61, 1: 3}, {4: 41, 0: 23, 2: 70, 1: 9}]
    done = dict.fromkeys(rows, 0)
    expected = {}
    with torch.inference_mode():
        for slot, token_ids in rows.items():
            expected[slot] = plain(torch.as_tensor(token_ids)[None]).logits[0]
    for ends in schedule:
        for slot, end in ends.items():
            if done[slot] == 0:
                pages.open(slot, rows[slot].tolist())
            assert pages.extend(slot, end)
        runner.update_pages(pages.drain_updates())
        batch = FlatBatch(
            token_ids_T=np.concatenate([rows[slot][done[slot] : end] for slot, end in ends.items()]),
            slots_T=np.concatenate([np.full(end - done[slot], slot) for slot, end in ends.items()]),
            positions_T=np.concatenate([np.arange(done[slot], end) for slot, end in ends.items()]),
        )
        logits = runner.forward(batch, np.arange(len(batch)))
        wanted = torch.cat([expected[slot][done[slot] : end] for slot, end in ends.items()])
        torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=TOLERANCE)
        done.update(ends)


@pytest.mark.ranks
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_slices_of_two_ranks_match_plain_forwards(tmp_path: Path, tied: bool) -> None:
    families = [family for family in FAMILIES if family != "gpt2"]
    for family in families:
        model = tiny_model(family, tie_word_embeddings=tied)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # they start at zero, where a wrong cut shows nothing
                    parameter.normal_()
        model.save_pretrained(tmp_path / family, max_shard_size="60KB")
        assert len(list((tmp_path / family).glob("*.safetensors"))) > 1
    run_ranks("tests.models.sliced_parity", 3, *(str(tmp_path / family) for family in families))
