"""Drafters of the target's states in virtual time: a round takes what its parts take."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdist.lab.plan.roofline import roofline_costs
from specdist.lab.plan.shapes import named_config
from specdist.policies.choice import PolicyChoice
from tests.lab.emulation.config import EmulationConfig
from tests.lab.emulation.drafter_rates import BLOCK_LAYERS, BLOCK_SIZE, write_drafters
from tests.lab.emulation.run import Emulation
from tests.lab.emulation.virtual import MESSAGE_NS, ROUND_NS, SYNCHRONOUS_NS, tokens_per_s

LENGTH, OUTPUT = 2, 120


@pytest.mark.parametrize("kind", ["EAGLE-3", "DFlash"])
def test_a_round_takes_what_its_parts_take(kind: str, tmp_path: Path) -> None:
    """Every token is accepted; a drafter on a GPU of its own."""
    draft = write_drafters(named_config("8b"), tmp_path)[kind]
    config = EmulationConfig(
        emulate="h100-sxm", target="8b", draft=draft, acceptance=1.0, batch_sizes=[1], rounds=12,
        prompt_tokens=64, output_tokens=OUTPUT,
    )  # fmt: skip
    found = tokens_per_s(config, "synchronous", PolicyChoice.of("fixed", num_draft_tokens=LENGTH))
    emulation = Emulation(config)
    own, num_new = emulation.draft, LENGTH + 1
    states_s = num_new * emulation.target.gpu.send_s(own.model.num_read_numbers * 2)
    if kind == "EAGLE-3":
        # All that was accepted is run again, with the target's states.
        drafting_s = own.pass_s(num_new, 1, 1) + (LENGTH - 1) * own.pass_s(1, 1)
    else:
        drafting_s = own.contexts_s(num_new) + own.pass_s(BLOCK_SIZE, 1, 0) + LENGTH * own.sampling_s(1, 1)
    hosts_s = (MESSAGE_NS + ROUND_NS + SYNCHRONOUS_NS) / 1e9
    expected_s = emulation.target.pass_s(num_new, 1) + states_s + drafting_s + hosts_s
    assert found == pytest.approx(num_new / expected_s, rel=0.01)


def test_prompts_take_a_block_drafter_its_projections_of_states(tmp_path: Path) -> None:
    """Keys and values of 8 heads, each 128 wide, in five layers, of five states of 4,096 numbers."""
    config = EmulationConfig(
        emulate="h100-sxm", target="8b", draft=write_drafters(named_config("8b"), tmp_path)["DFlash"]
    )  # fmt: skip
    emulation = Emulation(config)
    sizes = {"num_rows": 4, "most_tokens": 8192, "most_draft_rows": 4}
    costs = roofline_costs(emulation.target, emulation.draft, **sizes)
    products = 4096 * (5 * 4096 + BLOCK_LAYERS * 2 * 8 * 128)
    many_s, few_s = (float(costs.draft_prefill(size)) / 1e9 for size in (8192, 4096))
    flops_per_s = emulation.draft.gpu.sustained_flops_per_s(2)
    assert many_s - few_s == pytest.approx(4096 * 2 * products / flops_per_s, rel=0.01)
