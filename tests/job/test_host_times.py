"""What rounds take beyond their passes, told apart by a clock that only this test moves."""

from collections.abc import Callable
from typing import Any

import pytest

from specdist.engine.draft.client import Draft
from specdist.engine.draft.draft_worker import DraftWorker
from specdist.job.costs import round_times as measured
from specdist.job.costs.round_times import HostTimes, host_times
from specdist.policies.costs import CostModel, Curve
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness
from tests.models.families import tiny_model

NUM_ROWS = 3
# Nanoseconds of a target pass, each of its tokens, a draft pass, every round, and one that drafts.
PASS, TOKEN, STEP, ROUND, DRAFTING, BEYOND_STEP = 1000, 5, 20, 7, 11, 10
COSTS = CostModel(Curve([1, 101], [PASS + TOKEN, PASS + 101 * TOKEN]), Curve([1, NUM_ROWS], [STEP, STEP]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_host_is_told_from_passes_and_rounds_from_drafting_and_steps(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    model = tiny_model("llama")
    harness = Harness(
        model,
        model,
        settings=SamplingSettings(temperature=temperature),
        num_draft_tokens=6,
        max_num_seqs=NUM_ROWS,
        # Neither tokens nor texts may end the rounds.
        eos=range(model.config.vocab_size),
        stop=["A"],
    )
    now = 0

    def taking(call: Callable[..., Any], ns_of: Callable[..., int]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            nonlocal now
            found = call(*arguments)
            now += ns_of(found, *arguments)
            return found

        return timed

    target, draft = harness.runners
    monkeypatch.setattr(measured, "synchronized_ns", lambda device: now)
    monkeypatch.setattr(
        target, "forward", taking(target.forward, lambda _, batch, *rest: PASS + TOKEN * len(batch))
    )
    monkeypatch.setattr(draft, "forward", taking(draft.forward, lambda *_: STEP + BEYOND_STEP))
    monkeypatch.setattr(
        DraftWorker,
        "respond",
        taking(DraftWorker.respond, lambda reply, *_: DRAFTING * bool(reply.num_drafted_R.sum())),
    )
    monkeypatch.setattr(Draft, "propose", taking(Draft.propose, lambda *_: ROUND))
    sizes = [1, NUM_ROWS]
    found = host_times(harness.assembly, target, draft, COSTS, NUM_ROWS)
    assert found == HostTimes(*(Curve(sizes, 2 * [ns]) for ns in (ROUND, DRAFTING, BEYOND_STEP)))
    costs = found.added_to(COSTS)
    assert (costs.draft.ns, costs.message.ns, costs.synchronous.ns) == ([30, 30], [7, 7], [11, 11])
    assert costs.target is COSTS.target
