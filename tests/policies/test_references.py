"""Every method has its paper, and every paper its method."""

from __future__ import annotations

import re
from itertools import chain
from typing import get_args, get_type_hints

from specdist.config.generate import GenerateConfig
from specdist.policies.references import OF_ACCEPTANCE, OF_POLICY, OF_SPECULATION, REFERENCES, references_of


def test_every_choice_has_its_references() -> None:
    hints = get_type_hints(GenerateConfig)
    assert set(OF_POLICY) == set(get_args(hints["policy"]))
    assert set(OF_ACCEPTANCE) == set(get_args(hints["acceptance"]))
    used = set(chain(OF_SPECULATION, *OF_POLICY.values(), *OF_ACCEPTANCE.values()))
    assert used == set(REFERENCES)


def test_identifiers_are_arxivs() -> None:
    """Year and month of the first version, which is no later than the year that is given."""
    for reference in REFERENCES.values():
        match = re.fullmatch(r"(\d\d)(\d\d)\.\d{5}", reference.arxiv)
        assert match and 2000 + int(match[1]) in (reference.year - 1, reference.year)
        assert 1 <= int(match[2]) <= 12
    assert len({reference.arxiv for reference in REFERENCES.values()}) == len(REFERENCES)


def test_a_run_is_told_its_methods() -> None:
    found = references_of(policy="svip", acceptance="gumbel")
    assert [reference.arxiv for reference in found] == [
        "2211.17192",
        "2302.01318",
        "2411.18462",
        "2408.07978",
    ]
    assert references_of(policy="none", acceptance="rejection") == []
    assert found[0].markdown().endswith("ICML 2023; [arXiv:2211.17192](https://arxiv.org/abs/2211.17192)")
