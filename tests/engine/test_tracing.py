"""The trace of a live run says of every drafted token what the statistics count, in every mode."""

from __future__ import annotations

import pytest

from specdist.data import TracedToken
from specdist.policies import FixedLength
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Replica, requests_for
from tests.engine.test_greedy import MODES, prompts_of_lengths
from tests.models.families import noisy_copy, tiny_model
from tests.replay.traced import CAP, EOS, MAX_NEW_TOKENS, trace_of

AHEAD = [{}, {"num_ahead_tokens": 5}, {"num_ahead_tokens": 5, "num_branches": 2}]
SETTINGS = {
    "greedy": SamplingSettings(temperature=0.0),
    "gumbel": SamplingSettings(temperature=0.7, is_coupled=True),
    "rejection": SamplingSettings(temperature=0.7, top_p=0.95),
}
PROMPTS = prompts_of_lengths(5, 23, 40, 2, 11, 17)


def replica(sampling: str, *, is_traced: bool = True, **options: int) -> Replica:
    target = tiny_model("llama", seed=3)
    return Replica(
        target,
        noisy_copy(target),
        policy=FixedLength(4),
        settings=SETTINGS[sampling],
        eos=[EOS],
        max_new_tokens=MAX_NEW_TOKENS,
        is_traced=is_traced,
        **options,
    )


@pytest.mark.parametrize("sampling", list(SETTINGS))
@pytest.mark.parametrize("ahead", AHEAD, ids=MODES)
def test_it_agrees_with_the_statistics(ahead: dict[str, int], sampling: str) -> None:
    traced = replica(sampling, **ahead)
    completions = traced.generate(requests_for(PROMPTS))
    plain = replica(sampling, is_traced=False, **ahead).generate(requests_for(PROMPTS))
    assert [each.token_ids for each in completions] == [each.token_ids for each in plain]
    assert not any(each.trace for each in plain)
    stats = traced.ledger.close_shard(0)
    tokens = [token for each in completions for token in each.trace]
    num_ahead, num_hits = stats.num_ahead_judged, stats.num_ahead_hits
    assert len(tokens) == stats.num_draft_tokens + num_ahead
    assert sum(token.is_accepted for token in tokens) == stats.num_accepted_tokens + num_hits
    for completion in completions:
        check_row(completion.trace, len(completion.token_ids), sampling)
    assert any(token.round == 0 for token in tokens) == bool(ahead)


def check_row(tokens: tuple[TracedToken, ...], num_tokens: int, sampling: str) -> None:
    accepted = [token.position for token in tokens if token.is_accepted]
    # A place is filled once, and in order.
    assert accepted == sorted(set(accepted)) and all(position < num_tokens for position in accepted)
    by_round: dict[int, list[TracedToken]] = {}
    for token in tokens:
        by_round.setdefault(token.round, []).append(token)
        assert 0 < token.draft_probability <= token.top_probability <= 1 + 1e-6 and token.entropy >= 0
        acceptance = token.acceptance_probability
        assert acceptance is not None and 0 <= acceptance <= 1
        if sampling != "rejection" and token.is_judged:
            assert acceptance == float(token.is_accepted)
        assert acceptance > 0 or not token.is_accepted
    assert list(by_round) == sorted(by_round)
    for block in by_round.values():
        assert [token.depth for token in block] == list(range(len(block)))
        judged = [token for token in block if token.is_judged]
        assert judged == block[: len(judged)]
        assert all(token.is_accepted for token in judged[:-1])
        assert not any(token.is_accepted for token in block[len(judged) :])


def test_a_preempted_row_is_traced_as_if_nothing_had_happened() -> None:
    found = []
    for num_pages in (512, 20):
        traced = replica("greedy", num_pages=num_pages)
        completions = traced.generate(requests_for(PROMPTS))
        found.append([completion.trace for completion in completions])
        assert (traced.ledger.close_shard(0).num_preemptions > 0) == (num_pages == 20)
    for whole, interrupted in zip(*found, strict=True):
        assert [kept(token) for token in whole] == [kept(token) for token in interrupted]
        for one, other in zip(whole, interrupted, strict=True):
            assert other.entropy == pytest.approx(one.entropy, rel=1e-3, abs=1e-5)


def kept(token: TracedToken) -> tuple[int | bool, ...]:
    return token.round, token.depth, token.position, token.is_judged, token.is_accepted


def test_it_is_a_part_of_the_exhaustive_trace() -> None:
    """A greedy run's tokens are those that the exhaustive trace has behind the same decision."""
    traced = replica("greedy")
    completions = traced.generate(requests_for(PROMPTS))
    target = tiny_model("llama", seed=3)
    whole = trace_of(target, noisy_copy(target), completions, settings=SETTINGS["greedy"])
    assert CAP >= 4
    for completion, prompt in zip(completions, whole.prompts, strict=True):
        for token in completion.trace:
            place = token.position - token.depth, token.depth
            assert token.is_accepted == (token.depth < prompt.num_accepted_N[place[0]])
            assert token.entropy == pytest.approx(prompt.entropies_ND[place], rel=1e-3, abs=1e-5)
            assert token.draft_probability == pytest.approx(prompt.probabilities_ND[place], rel=1e-3)
