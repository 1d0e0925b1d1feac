"""Every method has its paper."""

from __future__ import annotations

import re
from typing import get_args, get_type_hints

from specdist.config.generate import GenerateConfig
from specdist.policies.references import OF_ACCEPTANCE
from specdist.policies.registry import POLICIES, papers_of


def test_every_choice_has_its_references() -> None:
    assert set(OF_ACCEPTANCE) == set(get_args(get_type_hints(GenerateConfig)["acceptance"]))
    for name, policy in POLICIES.items():
        # transformers' heuristic has no paper.
        assert policy.papers or name == "hf_heuristic"


def test_identifiers_are_arxivs() -> None:
    """Year and month of the first version, which is no later than the year that is given."""
    papers = {
        paper for name in POLICIES for acceptance in OF_ACCEPTANCE for paper in papers_of(name, acceptance)
    }
    for reference in papers:
        match = re.fullmatch(r"(\d\d)(\d\d)\.\d{5}", reference.arxiv)
        assert match and 2000 + int(match[1]) in (reference.year - 1, reference.year)
        assert 1 <= int(match[2]) <= 12
    assert len({reference.arxiv for reference in papers}) == len(papers)


def test_a_run_is_told_its_methods() -> None:
    found = papers_of("svip", "gumbel")
    assert [reference.arxiv for reference in found] == [
        "2211.17192",
        "2302.01318",
        "2411.18462",
        "2408.07978",
    ]
    assert papers_of("none", "rejection") == []
    assert found[0].markdown().endswith("ICML 2023; [arXiv:2211.17192](https://arxiv.org/abs/2211.17192)")
