"""Every method has its paper."""

from __future__ import annotations

from typing import get_args, get_type_hints

from specdist.config.generate import GenerateConfig
from specdist.policies.registry import OF_ACCEPTANCE, POLICIES, papers_of


def test_every_choice_has_its_references() -> None:
    assert set(OF_ACCEPTANCE) == set(get_args(get_type_hints(GenerateConfig)["acceptance"]))
    for name, policy in POLICIES.items():
        # transformers' heuristic has no paper.
        assert policy.papers or name == "hf_heuristic"


def test_a_run_is_told_its_methods() -> None:
    found = papers_of("svip", "gumbel")
    links = [paper.partition("[arXiv:")[2].partition("]")[0] for paper in found]
    assert links == ["2211.17192", "2302.01318", "2411.18462", "2408.07978"]
    assert papers_of("none", "rejection") == []
    assert found[0].endswith("ICML 2023; [arXiv:2211.17192](https://arxiv.org/abs/2211.17192)")
