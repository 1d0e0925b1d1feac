"""Virtual time: what a round takes is what its passes, messages and hosts take, and goodput loses nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from specdist.engine.request import Request
from specdist.job.costs.measuring import ONE_PROCESS
from specdist.lab.plan.simulate import Mode
from specdist.policies.registry import PolicyChoice
from tests.lab.emulation.config import EmulationConfig, choice_of
from tests.lab.emulation.markov import markov_pair
from tests.lab.emulation.run import Case, Emulation, run_emulation
from tests.lab.emulation.virtual import ASYNCHRONOUS_NS, MESSAGE_NS, ROUND_NS, SYNCHRONOUS_NS, VirtualRun

LENGTH = 2
GOODPUT = choice_of("goodput")
SMALL_PAIR = EmulationConfig(
    emulate="h100-sxm", target="8b", draft="0.5b", batch_sizes=[1], prompt_tokens=64, output_tokens=120,
    rounds=12, acceptance=1.0,
)  # fmt: skip


def tokens_per_s(config: EmulationConfig, mode: Mode, choice: PolicyChoice) -> float:
    """Of a batch of ``config``'s first size."""
    assert config.batch_sizes is not None
    case = Case(batch_size=config.batch_sizes[0], mode=mode, choice=choice)
    return Emulation(config).measure(case).tokens_per_s


@pytest.mark.parametrize("mode", ["colocated", "synchronous", "asynchronous"])
def test_a_round_takes_what_its_parts_take(mode: Mode) -> None:
    """Every token is accepted, so that every round is like every other."""
    found = tokens_per_s(SMALL_PAIR, mode, choice_of("fixed", num_draft_tokens=LENGTH))
    emulation = Emulation(SMALL_PAIR)
    target_s, step_s, first_s = (
        at.pass_s(size, 1)
        for at, size in ((emulation.target, LENGTH + 1), (emulation.draft, 1), (emulation.draft, 2))
    )
    # After a block that was accepted whole the draft runs its last token, too.
    drafting_s = first_s + (LENGTH - 1) * step_s
    if mode == "asynchronous":
        # One more stands for the next token; the draft is done before the target.
        drafting_s = LENGTH * step_s + ASYNCHRONOUS_NS / 1e9
        assert drafting_s < target_s
        expected_s = target_s + (MESSAGE_NS + ROUND_NS) / 1e9
    else:
        hosts_ns = ROUND_NS + (MESSAGE_NS + SYNCHRONOUS_NS if mode == "synchronous" else 0)
        expected_s = target_s + drafting_s + hosts_ns / 1e9
    assert found == pytest.approx((LENGTH + 1) / expected_s, rel=0.01)


def test_the_planner_predicts_what_the_engine_does() -> None:
    """In every mode, with the same times of passes, hosts and messages in both."""
    config = EmulationConfig(
        emulate="h100-sxm", target="70b", draft="1b", tp_size=4, batch_sizes=[8], policies=["fixed"],
        prompt_tokens=250, output_tokens=250, rounds=100,
    )  # fmt: skip
    outcomes = run_emulation(config, "").outcomes
    assert len(outcomes) == 5
    for one in outcomes:
        assert one.planned_tokens_per_s == pytest.approx(one.tokens_per_s, rel=0.05), one


def test_every_round_chosen_is_as_fast_as_the_best_that_stays_the_same() -> None:
    """A batch whose passes are as long as the candidates are many, and a fixed length that is too long for
    it: blocks ahead are shorter, and the same sequences are drafted for as where every round has branches."""
    config = EmulationConfig(
        emulate="h100-sxm", target="70b", draft="1b", tp_size=4, batch_sizes=[64], rounds=48,
        prompt_tokens=128, output_tokens=256,
    )  # fmt: skip
    fixed = choice_of("fixed", num_draft_tokens=8)
    best = tokens_per_s(config, "branches", fixed)
    for choice in (fixed, GOODPUT):
        assert tokens_per_s(config, "auto", choice) >= 0.98 * best


def test_a_draft_that_is_never_right_costs_an_auto_run_nothing() -> None:
    """At most a fiftieth of the target's own rate: it is listened to, now and then."""
    config = dataclasses.replace(SMALL_PAIR, batch_sizes=[4], acceptance=0.0, output_tokens=300, rounds=80)
    alone = tokens_per_s(config, "auto", PolicyChoice())
    assert tokens_per_s(config, "auto", GOODPUT) >= 0.98 * alone


def test_goodput_loses_nothing_with_experts_where_a_fixed_length_loses_half() -> None:
    """Every candidate's experts are read; at most a fiftieth of the target's own rate is spent to learn that
    the draft is often wrong."""
    config = EmulationConfig(
        emulate="h100-sxm", target="Qwen/Qwen3-30B-A3B", draft="0.5b", acceptance=0.3, batch_sizes=[1],
        rounds=300, prompt_tokens=256, output_tokens=256,
    )  # fmt: skip
    alone, fixed, goodput = (
        tokens_per_s(config, "colocated", choice)
        for choice in (PolicyChoice(), choice_of("fixed", num_draft_tokens=5), GOODPUT)
    )
    assert fixed < 0.6 * alone and goodput >= 0.98 * alone


def whole_run(config: EmulationConfig, choice: PolicyChoice) -> float:
    """Tokens per second of a batch with both models on one GPU, with its prompts and all that is learned."""
    assert config.batch_sizes is not None
    emulation = Emulation(config)
    case = Case(batch_size=config.batch_sizes[0], mode="colocated", choice=choice)
    costs = ONE_PROCESS.added_to(emulation.costs(case).passes)
    order = dataclasses.replace(emulation.order(case, costs), num_full=0)
    pair = markov_pair(emulation.pair)
    run = VirtualRun(order, pair, emulation.target, emulation.draft, has_own_gpu=False)
    ids = np.random.default_rng(1).integers(config.vocab_size, size=config.prompt_tokens)
    requests = [
        Request(row_id=row, sample_index=0, prompt_ids=np.roll(ids, row).tolist())
        for row in range(case.batch_size)
    ]
    engine = run.engine(requests)
    num_tokens = sum(len(completion.token_ids) for completion in engine.run())
    return num_tokens / max(run.device.now_ns, run.device.free_at_ns) * 1e9


@pytest.mark.parametrize(
    ("prompt_tokens", "acceptance", "temperature", "least"),
    [(600, 0.82, 0.0, 0.97), (40, 0.3, 1.0, 0.97), (40, 0.95, 0.0, 1.08)],
)
def test_a_short_run_is_not_slower_than_the_target_alone(
    prompt_tokens: int, acceptance: float, temperature: float, least: float
) -> None:
    """With a draft that costs half of its target: it is found out what its prompts cost and what is accepted,
    and what pays is not missed."""
    config = EmulationConfig(
        emulate="h100-sxm", target="1b", draft="0.5b", batch_sizes=[32], prompt_tokens=prompt_tokens,
        output_tokens=64, acceptance=acceptance, temperature=temperature,
    )  # fmt: skip
    assert whole_run(config, GOODPUT) >= least * whole_run(config, PolicyChoice())
