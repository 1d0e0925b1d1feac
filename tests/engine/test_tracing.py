"""The trace of a live run records for every candidate what the statistics count, in every mode."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specdist.data.stats.traces import TracedToken
from specdist.engine.request import Completion
from specdist.policies import FixedLength, LengthPolicy
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness, decode, llama_pair, requests_for
from tests.engine.test_goodput import goodput
from tests.engine.test_greedy import prompts_of_lengths
from tests.engine.traced_rows import check_acceptance

AHEAD = [{}, {"num_ahead_tokens": 5}, {"num_ahead_tokens": 5, "num_branches": 2}]
SETTINGS = {
    "greedy": SamplingSettings(temperature=0.0),
    "gumbel": SamplingSettings(temperature=0.7, is_coupled=True),
    "rejection": SamplingSettings(temperature=0.7, top_p=0.95),
}
PROMPTS = prompts_of_lengths(5, 23, 40, 2, 11, 17)
TARGET, DRAFT = llama_pair()


def replica(
    sampling: str,
    *,
    is_traced: bool = True,
    policy: str = "fixed",
    stop: Sequence[str] = (),
    **options: int,
) -> Harness:
    made: LengthPolicy = FixedLength(4) if policy == "fixed" else goodput(SETTINGS[sampling])
    return Harness(
        TARGET,
        DRAFT,
        policy=made,
        settings=SETTINGS[sampling],
        eos=[7],
        stop=stop,
        max_new_tokens=24,
        is_traced=is_traced,
        **options,
    )


def check_row(completion: Completion, sampling: str) -> None:
    tokens, num_tokens = completion.trace, len(completion.token_ids)
    accepted = [token.position for token in tokens if token.is_accepted]
    # A position is drafted once, and in order.
    assert accepted == sorted(set(accepted)) and all(position < num_tokens for position in accepted)
    by_round: dict[int, list[TracedToken]] = {}
    for token in tokens:
        by_round.setdefault(token.round, []).append(token)
        assert 0 < token.draft_probability <= token.top_probability <= 1 + 1e-6 and token.entropy >= 0
        if token.is_accepted:
            assert completion.token_ids[token.position] == token.token_id
        if token.is_verified:
            assert token.acceptance_probability is not None
            assert token.acceptance_probability > 0 or not token.is_accepted
            if sampling != "rejection":
                assert token.acceptance_probability == float(token.is_accepted)
    assert list(by_round) == sorted(by_round)
    for block in by_round.values():
        assert [token.depth for token in block] == list(range(len(block)))
        judged = [token for token in block if token.is_verified]
        assert judged == block[: len(judged)]
        assert all(token.is_accepted for token in judged[:-1])
        assert not any(token.is_accepted for token in block[len(judged) :])


def check_against_statistics(traced: Harness, completions: list[Completion]) -> None:
    stats = traced.stats_recorder.close_shard(0)
    tokens = [token for each in completions for token in each.trace]
    assert len(tokens) == stats.num_draft_tokens
    num_accepted = sum(token.is_accepted for token in tokens)
    assert num_accepted == stats.num_accepted_tokens > 0
    # Of a miss a candidate was rejected, or a token that was drafted ahead, which is none.
    num_rejected = stats.num_misses - (stats.num_ahead_verified - stats.num_ahead_hits)
    assert sum(token.is_verified for token in tokens) == num_accepted + num_rejected


@pytest.mark.parametrize(
    ("ahead", "sampling", "policy"),
    [
        (AHEAD[0], "greedy", "fixed"),
        (AHEAD[0], "rejection", "goodput"),
        (AHEAD[1], "gumbel", "goodput"),
        (AHEAD[2], "rejection", "fixed"),
    ],
    ids=["none-greedy", "none-rejection", "asynchronous-gumbel", "branches-rejection"],
)
def test_tracing_changes_nothing_and_agrees_with_the_statistics(
    ahead: dict[str, int], sampling: str, policy: str
) -> None:
    traced = replica(sampling, policy=policy, **ahead)
    completions = traced.generate(requests_for(PROMPTS))
    plain = replica(sampling, policy=policy, is_traced=False, **ahead).generate(requests_for(PROMPTS))
    assert [each.token_ids for each in completions] == [each.token_ids for each in plain]
    assert not any(each.trace for each in plain)
    for completion in completions:
        check_row(completion, sampling)
    check_against_statistics(traced, completions)


@pytest.mark.parametrize(
    ("ahead", "sampling"), [(AHEAD[0], "rejection"), (AHEAD[1], "greedy"), (AHEAD[2], "gumbel"),
                            (AHEAD[2], "rejection")],
)  # fmt: skip
def test_traced_acceptance_is_the_ratio_of_both_models_probabilities(
    ahead: dict[str, int], sampling: str
) -> None:
    probabilities = set()
    for completion in replica(sampling, **ahead).generate(requests_for(PROMPTS, num_samples=2)):
        check_acceptance(
            TARGET,
            DRAFT,
            completion.trace,
            prompt_ids=completion.request.prompt_ids,
            completion_ids=completion.token_ids,
            settings=SETTINGS[sampling],
            row_key=(0, completion.request.row_id, completion.request.sample_index),
        )
        probabilities |= {token.acceptance_probability for token in completion.trace}
    # None: after a next token that ended its row.
    assert len(probabilities - {None}) > 20 if sampling == "rejection" else {0, 1} <= probabilities


@pytest.mark.parametrize("ahead", [AHEAD[0], AHEAD[2]], ids=["none", "branches"])
def test_tokens_after_a_stop_are_not_counted(ahead: dict[str, int]) -> None:
    """With a stop string in the middle of accepted candidates: those after it are not tokens of the row."""
    free = replica("greedy", **ahead).generate(requests_for(PROMPTS))
    stop_ids = {
        one.token_id
        for completion in free
        for one, next_one in zip(completion.trace, completion.trace[1:], strict=False)
        if one.is_accepted and next_one.is_accepted and one.round == next_one.round
    }
    stop = [decode([token_id]) for token_id in sorted(stop_ids)[::5]]
    stopped = replica("greedy", stop=stop, **ahead)
    completions = stopped.generate(requests_for(PROMPTS))
    assert any(completion.finish_reason == "stop" for completion in completions)
    tokens = [token for completion in completions for token in completion.trace]
    # The target would have accepted them.
    assert any(token.acceptance_probability == 1 and not token.is_verified for token in tokens)
    for completion in completions:
        check_row(completion, "greedy")
    check_against_statistics(stopped, completions)


def test_a_preempted_row_is_traced_as_without_preemption() -> None:
    found = []
    for num_pages in (512, 22):
        traced = replica("greedy", num_pages=num_pages, **AHEAD[2])
        completions = traced.generate(requests_for(PROMPTS))
        tokens = [token for completion in completions for token in completion.trace]
        found.append(
            [(t.round, t.depth, t.position, t.token_id, t.is_verified, t.is_accepted) for t in tokens]
        )
        assert (traced.stats_recorder.close_shard(0).num_preemptions > 0) == (num_pages < 512)
    assert found[0] == found[1]
