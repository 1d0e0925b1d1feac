"""A part of all families, another one every day, and some always: tokens of ``generate``, or a refusal."""

from __future__ import annotations

import datetime
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.all_families import FAMILIES, WIDTHS, build, tiny_config
from tests.models.family_runs import ERROR, EXACT, STORED, difference, run_all
from tests.models.family_table import outcome_words

# A mixture stored by expert, joined projections, norms over all heads, one key/value head, images.
ALWAYS = ("mixtral", "phi3 (longrope)", "olmo2", "gpt_bigcode", "mistral3")
NUM_IN_TURN = 4
RUN = json.loads(STORED.read_text(encoding="utf-8"))


@pytest.mark.skipif(version("transformers") != RUN["transformers"], reason="the table is of another version")
@pytest.mark.ranks
@pytest.mark.slow
def test_families_in_turn_do_what_the_table_says(tmp_path: Path) -> None:
    """``python -m tests.models.family_runs --output tests/models/families.json`` runs all, and makes it."""
    stored = RUN["outcomes"]
    wanted = {(one["family"], one["tp_size"]): outcome_words(one["kind"], one["detail"]) for one in stored}
    assert {family for family, _ in wanted} == set(FAMILIES)
    usual = [family for family in FAMILIES if wanted[family, 1] == EXACT and family not in ALWAYS]
    first = datetime.date.today().toordinal() * NUM_IN_TURN
    in_turn = [usual[(first + index) % len(usual)] for index in range(NUM_IN_TURN)]
    print("in turn:", ", ".join(in_turn))  # noqa: T201 (shown if the test fails)
    for one in run_all([*ALWAYS, *in_turn], tmp_path):
        if wanted[one.family, one.tp_size].startswith(ERROR):
            assert one.kind == ERROR, f"{one.family} no longer fails: run all again, for the table"
        else:
            assert outcome_words(one.kind, one.detail) == wanted[one.family, one.tp_size], one


def test_each_width_of_a_small_model_is_one_of_its_own() -> None:
    """Where two are equal, code that takes one for the other gives the right tokens."""
    meaning = {name: width for width, names in WIDTHS.items() for name in names.split()}
    for family in [one["family"] for one in RUN["outcomes"] if one["kind"] == EXACT and one["tp_size"] == 1]:
        config, by_width = vars(tiny_config(family).get_text_config()), dict[Any, set[int]]()
        for name in meaning.keys() & config.keys():
            by_width.setdefault(str(config[name]), set()).add(meaning[name])
        shared = [each for each in by_width.values() if len(each) > 1]
        # Of latent attention the width of a head is that of its rotated part, and all heads have keys.
        assert all(each in ({24, 10}, {8, 2}) for each in shared), (family, by_width)


@pytest.mark.parametrize("family", ["gpt2", "bert", "gemma2", "deepseek_v3"])
def test_no_vector_of_a_small_model_is_all_alike(family: str) -> None:
    """A norm of ones, or a bias of zeros, may be lost: norms of old names, and routers' buffers, had them."""
    model = build(family)
    vectors = {name: each for name, each in model.state_dict().items() if each.dim() == 1 and len(each) > 1}
    assert vectors and all(each.float().std() > 0.1 for each in vectors.values())


def test_a_wrong_token_is_a_difference_unless_it_is_a_tie() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0 - 1e-5], [0.0, 2.0, 1.0]])
    wanted = [{"token_ids": [1, 1], "logits": logits}] * 3
    assert difference([[1, 1], [2, 2], [1, 1]], wanted) == ""
    assert "token 1 after 24 is 2, not 1" in difference([[1, 1], [1, 2], [1, 1]], wanted)
    assert "1 tokens after 44, not 2" in difference([[1, 1], [1, 1], [1]], wanted)
