"""The papers' tables on traces made by hand, where every number is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specdist.lab.replay import ExhaustiveTrace, PromptTrace
from specdist.utils.errors import UserError
from tests.lab.papers import gammatune, leviathan, specdecpp, svip
from tests.lab.papers.config import PapersConfig
from tests.lab.papers.counts import Counts, of_policy, truncated
from tests.lab.papers.tables import Claim, PaperTable, Repeated

CAP = 40


def trace_of(accepted: np.ndarray, cap: int = CAP) -> PromptTrace:
    """A completion in which the draft's first token for a position is accepted where ``accepted`` says so.

    Entropies tell exactly where: 0 for tokens to be accepted, 4 for others.
    """
    length = len(accepted)
    places_ND = np.minimum(np.arange(length)[:, None] + np.arange(cap), length - 1)
    num_drafted_N = np.minimum(length - 1 - np.arange(length), cap)
    is_good_ND = accepted[places_ND]
    num_accepted_N = np.minimum(np.cumprod(is_good_ND, 1).sum(1), num_drafted_N)
    probabilities_ND = np.where(is_good_ND, 1.0, 0.1)
    return PromptTrace(
        prompt_ids=np.array([1, 2]),
        completion_ids=np.arange(length),
        max_new_tokens=length,
        num_accepted_N=num_accepted_N,
        num_drafted_N=num_drafted_N,
        token_ids_ND=np.zeros((length, cap), int),
        is_stop_ND=np.zeros((length, cap), bool),
        entropies_ND=np.where(is_good_ND, 0.0, 4.0),
        probabilities_ND=probabilities_ND,
        top_probabilities_ND=probabilities_ND,
        acceptance_ND=is_good_ND.astype(float),
        estimates_END=np.zeros((0, length, cap)),
    )


@pytest.fixture(scope="module")
def every_fifth_is_rejected() -> ExhaustiveTrace:
    return ExhaustiveTrace([trace_of(np.arange(101) % 5 != 0) for _ in range(2)])


def test_counts_of_fixed_lengths(every_fifth_is_rejected: ExhaustiveTrace) -> None:
    """Four accepted and a recovered token: blocks of four are all accepted, longer ones are cut there."""
    for length in (4, 8):
        found = of_policy("fixed", [every_fifth_is_rejected], num_draft_tokens=length)
        assert found.num_tokens == 200
        assert found.num_target == 2 * 20
        assert found.num_accepted == 2 * 80
    # A block that ends with the completion is shorter.
    assert found.speedup(0.0) == pytest.approx(5)
    assert found.num_draft <= 2 * 20 * 8


def test_a_truncated_completion_drafts_nothing_past_its_end(
    every_fifth_is_rejected: ExhaustiveTrace,
) -> None:
    cut = truncated(every_fifth_is_rejected, 51)
    fresh = ExhaustiveTrace([trace_of(np.arange(51) % 5 != 0) for _ in range(2)])
    for ours, expected in zip(cut.prompts, fresh.prompts, strict=True):
        np.testing.assert_array_equal(ours.num_drafted_N, expected.num_drafted_N)
        np.testing.assert_array_equal(ours.num_accepted_N, expected.num_accepted_N)
        assert ours.num_tokens == ours.max_new_tokens == 51
    assert of_policy("fixed", [cut], num_draft_tokens=8) == of_policy("fixed", [fresh], num_draft_tokens=8)


def test_svip_beats_a_constant_length_where_entropies_tell() -> None:
    """Eight tokens are accepted and the ninth is not: it stops at that one, and wastes no other."""
    every_ninth = ExhaustiveTrace([trace_of(np.arange(100) % 9 != 0)])
    table, claim = svip.by_task(dict.fromkeys(svip.TASKS, every_ninth), 0.0)
    assert claim.holds
    acceptance = {row[0]: float(row[table.head.index("acceptance")]) for row in table.rows}
    assert acceptance["SVIP h = 1"] == pytest.approx(8 / 9, abs=0.02)


def test_leviathan_holds_for_independent_tokens_and_not_for_clustered_ones() -> None:
    rng = np.random.default_rng(0)
    independent = [ExhaustiveTrace([trace_of(rng.random(1000) < 0.8)])]
    _, ratios = leviathan.gains(independent, 0.0)
    assert min(ratios) > 0.93
    assert max(ratios) < 1.07
    clustered = [ExhaustiveTrace([trace_of(np.arange(1000) % 500 < 400)])]
    _, ratios = leviathan.gains(clustered, 0.0)
    assert min(ratios) < 0.85


def test_acceptance_rates_are_the_overlap() -> None:
    """P = (0.75, 0.25) and Q = (0.5, 0.5): 0.75 in common at T = 1, and the argmax of one at T = 0."""
    target, draft = torch.tensor([[3.0, 1.0]]).log(), torch.tensor([[1.0, 1.0 + 1e-6]]).log()
    rates = leviathan.acceptance_rates([(target, draft)])
    assert rates[1.0] == pytest.approx(0.75, abs=1e-5)
    assert rates[0.0] == 0


def test_the_ratio_of_entropies_is_1_for_equal_models() -> None:
    logits = torch.randn(200, 7, generator=torch.Generator().manual_seed(0))
    table = svip.ratio_of_entropies([(logits, logits)])
    assert table.rows[0][:5] == ["1.00"] * 5


def test_gammatune_finds_its_length_from_any_first_one(
    every_fifth_is_rejected: ExhaustiveTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Given:
        def spec_bench(self, temperature: float) -> dict[str, ExhaustiveTrace]:
            assert temperature == 0
            return {"all": every_fifth_is_rejected}

    (table,), claims = gammatune.tables(Given())  # type: ignore[arg-type]
    assert [claim.holds for claim in claims] == [True, True]
    assert len(table.rows) == 6


def test_specdecpp_compares_the_best_with_the_best() -> None:
    def counts(num_target: int, num_draft: int) -> Counts:
        return Counts(100, num_draft, num_target, num_draft, 100 - num_target, num_draft + num_target - 100)

    found = specdecpp.Found(
        {specdecpp.PUBLISHED: {0.3: counts(25, 100), specdecpp.PUBLISHED_THRESHOLD: counts(25, 120)}},
        {2: counts(50, 100), 4: counts(25, 110)},
    )
    assert found.best_fixed == 4
    assert found.gain(found.best) > 0
    assert found.gain(found.published) < 0
    assert [claim.holds for claim in specdecpp.claims(dict.fromkeys(specdecpp.SETS, found))] == [True, True]
    worse = specdecpp.Found({specdecpp.PUBLISHED: {0.3: counts(25, 115), 0.7: counts(25, 120)}}, found.fixed)
    assert [claim.holds for claim in specdecpp.claims(dict.fromkeys(specdecpp.SETS, worse))] == [False, False]


def test_results_survive_json(tmp_path: Path) -> None:
    repeated = Repeated(
        {"date": "2026-01-01", "target": "a", "draft": "b", "command": "python -m tests.lab.papers"},
        [PaperTable("T", ["x"], [["1"]], "About.")],
        [Claim("P", "c", "f", holds=False)],
    )
    repeated.write(tmp_path / "papers.json")
    assert Repeated.read(tmp_path / "papers.json") == repeated
    assert "| P | c | f | no |" in repeated.claims_markdown()
    assert "### T" in repeated.tables_markdown()


@pytest.mark.parametrize(
    ("options", "named"),
    [({"tables": ["eagle"]}, "--tables 'eagle' must be one of"), ({"num_prompts": 10}, "--num_prompts 10")],
)
def test_wrong_options_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        PapersConfig(target="t", draft="d", prompts="p", work="w", output="o", **options)  # type: ignore[arg-type]
