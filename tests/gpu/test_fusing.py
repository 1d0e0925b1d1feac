"""How many kernels a layer has, counted on the fake device."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from tests.gpu import check_fusing
from tests.gpu.processes import needs_fake_device, on_device

pytestmark = needs_fake_device


@pytest.mark.parametrize(
    ("family", "most"),
    [("llama", 11), ("qwen2", 11), ("mistral", 11), ("gemma", 11), ("qwen3", 13), ("gemma2", 11)],
)
def test_a_layer_has_few_kernels(family: str, most: int) -> None:
    """The last two have four norms; one kernel more than with the attention of the project."""
    on_device(check_fusing.check_kernels, family, most)


def test_a_token_is_rounded_by_one_kernel() -> None:
    """For all layers that read it; in plain operations by six or seven."""
    on_device(check_fusing.check_rounding)
