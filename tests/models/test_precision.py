"""Models sharded over two ranks against whole ones in bfloat16, beyond two thousand positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.families import tiny_model
from tests.ranks import run_ranks

# Two layers, so that the rounding of one shows in the other.
LONG = {"max_position_embeddings": 4096, "num_hidden_layers": 2}
# The family that most run, and one of each kind of cut (soft caps, joined projections with biases, norms over
# all heads, latents), with windows in which a wrong frequency shows, and attention that is not flat.
FAMILIES = {
    "gemma2": {"sliding_window": 1536, "attn_logit_softcapping": 50.0},
    "gpt_neox": {"num_attention_heads": 2, "initializer_range": 0.35},
    "llama": {},
    "olmo2": {},
    "youtu": {},
}


@pytest.mark.ranks
def test_sharded_models_agree_up_to_rounding_but_not_with_the_old_fault_planted(tmp_path: Path) -> None:
    """Rotary frequencies in half precision, which float32 and short texts hid, are found."""
    for family, overrides in FAMILIES.items():
        model = tiny_model(family, **LONG, **overrides)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # they start at zero, where a wrong cut shows nothing
                    parameter.normal_(std=0.2)
                if name.endswith("q_norm.weight"):  # which makes attention flat, whatever the positions
                    parameter.fill_(4)
        model.save_pretrained(tmp_path / family)
    run_ranks("tests.models.precision_parity", 2, *(str(tmp_path / family) for family in FAMILIES))
