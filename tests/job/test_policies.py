"""Every policy that --policy offers can be built and run, and its options are the run's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdist.policies.costs import CostModel, Curve
from specdist.policies.registry import OPTIONS, POLICIES, build_policy
from tests.job.launching import (
    Ended,
    parse,
    read_output,
    run_here,
)

COSTS = CostModel(target=Curve([1], [10]), draft=Curve([1], [1]))
ADAPTIVE = sorted(set(POLICIES) - {"fixed"})


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_built_from_its_options(
    options: dict[str, Any], heads: dict[str, Path], name: str
) -> None:
    """Under the names that the options have; its cap is what is reserved for a row."""
    config = parse(**options, output="run", policy=name, head=heads.get(name))
    policy = build_policy(config.policy_choice, COSTS, is_coupled=config.is_coupled)
    assert config.policy_options == {option: getattr(policy, option) for option in config.policy_options}
    assert policy.max_draft_tokens + 1 == config.block_tokens


def test_every_policy_declares_what_its_class_takes() -> None:
    """Under its own name, with defaults that their rules allow."""
    for name, policy in POLICIES.items():
        assert policy.name == name and policy.drafts and OPTIONS[name]
        for option, info in OPTIONS[name].items():
            assert info.rule.holds(info.default) and info.help, (name, option)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_greedy_text_is_the_same(
    options: dict[str, Any], heads: dict[str, Path], greedy: tuple[Path, Ended], tmp_path: Path, name: str
) -> None:
    output = tmp_path / "run"
    options = options | {"head": heads.get(name), "verify": "all" if name == "sprinter" else None}
    assert run_here(**options, output=output, policy=name, limit=8).code == 0
    found, expected = read_output(output), read_output(greedy[0])
    assert found["completion_ids"].to_pylist() == expected["completion_ids"].to_pylist()[:8]
    # These models are so small that a draft step takes as long as a target pass, and goodput sees that.
    assert sum(found["num_accepted_draft_tokens"].to_pylist()) > 0 or name == "goodput"
    fingerprint = json.loads((output / "manifest.json").read_text())["fingerprint"]
    policy_options = parse(**options, output="run", policy=name).policy_options
    assert {key: fingerprint[key] for key in policy_options} == policy_options
