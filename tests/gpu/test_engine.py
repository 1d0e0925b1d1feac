"""The engine in one process on a fake GPU gives the same rows as on a CPU."""

from __future__ import annotations

import pytest

from tests.gpu import check_engine
from tests.gpu.processes import needs_fake_device, on_device
from tests.models.families import FAMILIES

pytestmark = needs_fake_device


# Llama has all that Mistral has but the window, which is Gemma 2's; Qwen 2's biases are in joined products.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("qwen2", "mistral")])
def test_every_family_gives_the_rows_of_a_cpu(family: str) -> None:
    on_device(check_engine.check_family, family)


def test_a_mixture_of_experts_gives_the_rows_of_a_cpu_in_recorded_passes() -> None:
    on_device(check_engine.check_experts)


def test_packed_experts_give_the_rows_of_a_cpu_in_recorded_passes() -> None:
    on_device(check_engine.check_packed_experts)


def test_states_give_the_rows_of_a_cpu() -> None:
    on_device(check_engine.check_states)


def test_runs_of_different_lengths_stay_recorded() -> None:
    on_device(check_engine.check_short_runs)


def test_processed_logits_give_the_rows_of_a_cpu() -> None:
    on_device(check_engine.check_processing)


def test_preemption_changes_no_row_on_a_gpu() -> None:
    on_device(check_engine.check_preemption)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_that_is_not_finite_costs_only_itself_on_a_gpu(dtype: str) -> None:
    on_device(check_engine.check_damaged_rows, dtype)


def test_running_out_of_memory_changes_no_row_on_a_gpu() -> None:
    on_device(check_engine.check_out_of_memory)


@pytest.mark.parametrize("mode", ["synchronous", "branches"])
def test_policies_that_read_a_head_give_the_rows_of_a_cpu(mode: str) -> None:
    on_device(check_engine.check_heads, mode)
