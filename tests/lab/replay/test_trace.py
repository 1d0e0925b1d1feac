"""What the exhaustive trace holds, and what a file of it keeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from specdist.lab.replay import ExhaustiveTrace
from specdist.lab.tune.collect import coupled_with
from specdist.sampling.distributions import Dense, SamplingSettings
from specdist.utils.errors import UserError
from tests.engine.harness import requests_for
from tests.engine.test_greedy import prompts_of_lengths
from tests.lab.replay.traced import CAP, EOS, MAX_NEW_TOKENS, live_replica, make_policy, trace_of
from tests.models.families import noisy_copy, tiny_model
from tests.statistics import chi_square_p_value

PLAIN = SamplingSettings(temperature=1.0)
ALARM = 1e-4


def small_trace(settings: SamplingSettings) -> ExhaustiveTrace:
    target = tiny_model("llama", seed=3)
    draft = noisy_copy(target)
    replica = live_replica(target, draft, make_policy("fixed"), settings=settings, max_num_seqs=4)
    completions = replica.generate(requests_for(prompts_of_lengths(5, 17, 3)))
    return trace_of(target, draft, completions, settings=settings)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_entries_record_the_acceptance_of_the_drafts_tokens(temperature: float) -> None:
    for prompt in small_trace(SamplingSettings(temperature=temperature)).prompts:
        assert prompt.num_tokens <= MAX_NEW_TOKENS
        for position in range(prompt.num_tokens):
            num_drafted = prompt.num_drafted_N[position]
            num_accepted = prompt.num_accepted_N[position]
            drafted, own = prompt.token_ids_ND[position], prompt.completion_ids[position:]
            assert drafted[:num_accepted].tolist() == own[:num_accepted].tolist()
            # To the cap, or the last position but one, or a stop token.
            most = min(CAP, MAX_NEW_TOKENS - 1 - position)
            assert num_drafted == most or drafted[num_drafted - 1] == EOS
            assert prompt.is_stop_ND[position].sum() <= 1
            judged = ~np.isnan(prompt.acceptance_ND[position])
            assert judged.sum() == min(num_accepted + 1, num_drafted, len(own))
            if temperature == 0:
                assert prompt.acceptance_ND[position, :num_accepted].tolist() == [1.0] * num_accepted
                assert not prompt.acceptance_ND[position, num_accepted : judged.sum()].any()
                # A run's later tokens are those of a run that begins there.
                for depth in range(1, min(num_accepted, num_drafted - 1)):
                    later = position + depth
                    assert prompt.token_ids_ND[later, 0] == drafted[depth]
                    assert prompt.entropies_ND[later, 0] == pytest.approx(
                        prompt.entropies_ND[position, depth], rel=1e-4
                    )
            assert (prompt.top_probabilities_ND >= prompt.probabilities_ND).all()


def test_a_draft_that_is_the_target_is_always_accepted() -> None:
    target = tiny_model("llama", seed=3)
    replica = live_replica(target, target, make_policy("fixed"), settings=PLAIN, max_num_seqs=4)
    completions = replica.generate(requests_for(prompts_of_lengths(5, 17)))
    for prompt in trace_of(target, target, completions, settings=PLAIN).prompts:
        lengths_N = np.minimum(prompt.num_drafted_N, prompt.num_tokens - np.arange(prompt.num_tokens))
        assert prompt.num_accepted_N.tolist() == lengths_N.tolist()


def test_a_file_keeps_all_of_it(tmp_path: Path) -> None:
    trace = ExhaustiveTrace(small_trace(PLAIN).prompts, {"temperature": 1.0})
    trace.write(tmp_path / "trace.arrow")
    found = ExhaustiveTrace.read(tmp_path / "trace.arrow")
    assert found.origin == {"temperature": 1.0}
    assert found.max_draft_tokens == CAP and found.num_tokens == trace.num_tokens
    for one, other in zip(trace.prompts, found.prompts, strict=True):
        for item in dataclasses.fields(one):
            np.testing.assert_array_equal(getattr(one, item.name), getattr(other, item.name))


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.arrow").write_bytes(b"no arrow")
    with pytest.raises(UserError, match="not an exhaustive trace"):
        ExhaustiveTrace.read(tmp_path / "trace.arrow")


def test_drafts_given_the_outcome_follow_the_drafts_distribution() -> None:
    """x ~ P, then y given x: y ~ Q, and y is accepted with probability min(1, P/Q). Off the path y ~ Q."""
    generator = torch.Generator().manual_seed(1)
    num, size = 40_000, 6
    draft, target = (torch.rand(size, generator=generator) ** 2 for _ in range(2))
    draft, target = draft / draft.sum(), target / target.sum()
    own = torch.multinomial(target.double(), num, replacement=True, generator=generator)
    uniforms = torch.rand(3, num, dtype=torch.float64, generator=generator)
    distributions = [Dense(distribution.expand(num, size)) for distribution in (draft, target)]
    for on_path in (True, False):
        drawn, is_accepted, acceptance = coupled_with(
            *distributions, own, torch.full((num,), on_path), uniforms[0], uniforms[1]
        )
        counts = drawn.bincount(minlength=size)
        assert chi_square_p_value(counts, draft) > ALARM
        assert (drawn.numpy() == own.numpy())[is_accepted].all()
        if not on_path:
            assert not is_accepted.any()
            continue
        wanted = torch.clamp(target / draft, max=1.0).numpy()
        np.testing.assert_allclose(acceptance, wanted[drawn.numpy()], rtol=1e-6)
        for token in range(size):
            share = is_accepted[drawn.numpy() == token].mean()
            error = np.sqrt(wanted[token] * (1 - wanted[token]) / int(counts[token]))
            assert abs(share - wanted[token]) <= 4.5 * error + 1e-6
