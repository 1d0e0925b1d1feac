"""The engine in one process on a fake GPU gives the same rows as on a CPU."""

from __future__ import annotations

import pytest

from tests.gpu import check_engine
from tests.gpu.processes import needs_fake_device, on_device

pytestmark = needs_fake_device


# Other families have what these have; modes, rules and policies are spread over them.
@pytest.mark.parametrize(
    "case",
    [
        ("llama", "synchronous", "top_p", "confidence"),
        ("gemma2", "branches", "rejection", "goodput"),
        ("gpt2", "asynchronous", "gumbel", "fixed"),
    ],
    ids="-".join,
)
def test_a_family_gives_the_rows_of_a_cpu(case: tuple[str, ...]) -> None:
    on_device(check_engine.check_family, *case)


def test_packed_experts_give_the_rows_of_a_cpu_in_recorded_passes() -> None:
    on_device(check_engine.check_packed_experts)


@pytest.mark.parametrize(
    "case", [("jamba", "synchronous", "mamba"), ("qwen3_5_text", "branches", "delta_rule")], ids="-".join
)
def test_states_give_the_rows_of_a_cpu(case: tuple[str, ...]) -> None:
    on_device(check_engine.check_states, *case)


@pytest.mark.parametrize("check", ["heads", "processing"])
def test_a_run_gives_the_rows_of_a_cpu(check: str) -> None:
    on_device(getattr(check_engine, f"check_{check}"))
