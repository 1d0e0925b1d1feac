"""The memory of loading a sharded target."""

from pathlib import Path

import pytest

from tests.models.families import tiny_model
from tests.ranks import run_ranks

NUM_FILES = 8
FILE_BYTES = 50_000_000


@pytest.mark.ranks
def test_a_rank_holds_its_slice_and_at_most_one_file(tmp_path: Path) -> None:
    # 27 MiB a layer, in two pieces of half that; no tensor is larger than 9 MiB.
    model = tiny_model(
        "llama",
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=16,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        vocab_size=4096,
        tie_word_embeddings=False,
        initializer_range=0.02,
    )
    folder = tmp_path / "target"
    model.save_pretrained(folder, max_shard_size="62MB")
    sizes = sorted(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert len(sizes) >= NUM_FILES and sizes[-NUM_FILES] >= FILE_BYTES
    del model
    tiny_model("llama").save_pretrained(tmp_path / "draft")
    run_ranks("tests.models.loading_memory", 3, str(folder), str(tmp_path / "draft"))
