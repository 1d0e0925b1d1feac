"""Quantised checkpoints: the model is that of the file, whole or sharded, as transformers itself loads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.start_check.loading_check import check_loading
from tests.models.families import VOCAB_SIZE
from tests.models.quantized_checkpoints import LAYOUTS
from tests.models.quantized_formats import (
    KINDS,
    ROUNDED_TOLERANCE,
    TOLERANCE,
    saved,
    sharded_differences,
    whole_difference,
)


def tolerance_of(layout: str) -> float:
    return ROUNDED_TOLERANCE if "inputs" in layout or layout in KINDS else TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_layout_is_read_as_transformers_reads_it(tmp_path: Path, layout: str) -> None:
    declared, _ = LAYOUTS[layout]
    if declared["quant_method"] == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    model, difference = whole_difference(saved(tmp_path, layout), layout)
    assert difference < tolerance_of(layout)
    checkpoint = open_checkpoint("--target", str(tmp_path))
    check = check_loading(
        model, checkpoint, dtype=torch.float32, device=torch.device("cpu"), vocab_size=VOCAB_SIZE
    )
    assert check.is_checked, check.reason


@pytest.mark.ranks
def test_a_quantised_model_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    """Every kind of scales, and a plain checkpoint that is quantised while it is loaded: the parts are cut
    with their scales, zero points and packed columns, joined projections each by itself, and the logits are
    those of the whole model whose inputs have the scales that they have on the ranks."""
    for (layout, family), difference in sharded_differences(tmp_path).items():
        assert 0 <= difference < tolerance_of(layout), (layout, family)
