"""What need not be done before the next pass is done while it runs, and is not lost with it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdist.engine.draft.ahead import branches
from specdist.engine.draft.ahead.draft_ahead import AheadDrafter
from specdist.engine.draft.steps import draft_loop
from specdist.engine.draft.steps.draft_loop import DraftLoop
from specdist.engine.engine import Engine
from specdist.engine.messages.interfaces import VerifyInput
from specdist.engine.request import Request
from specdist.engine.rounds.verify import Verifier
from specdist.engine.target.local_target import FullDistributions
from specdist.models.batch.flat import FlatBatch
from specdist.policies.payoff import ALONE, LISTEN, SYNCHRONOUS, RoundShape
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness, ScriptedChooser, requests_for
from tests.engine.markov import markov_pair
from tests.lab.emulation.device import EmulatedDevice

# The first of two sequences ends after three tokens.
REQUESTS = (
    Request(row_id=0, sample_index=0, prompt_ids=[1, 2], max_new_tokens=3),
    Request(row_id=1, sample_index=0, prompt_ids=[3, 1, 2], max_new_tokens=12),
)


@pytest.fixture
def replica() -> Harness:
    return Harness(markov_pair()[0], None, max_num_seqs=2)


def engine_of(replica: Harness, events: list[str], requests: Sequence[Request] = REQUESTS) -> Engine:
    def asked_for() -> Iterator[Request]:
        for request in requests:
            events.append(f"request {request.row_id}")
            yield request

    return replica.assembly.engine(
        asked_for(), target=replica.target(), proposer=replica.proposer(),
        stats_recorder=replica.stats_recorder,
    )  # fmt: skip


def watch_passes(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Note when a pass is begun, and when its outcome is asked for."""
    verify, numbers = Verifier.verify, itertools.count(1)

    def begun(self: Verifier, *arguments: object) -> Callable[[], object]:
        number, outcome = next(numbers), verify(self, *arguments)  # type: ignore[arg-type]
        events.append(f"pass {number} begins")

        def waited() -> object:
            events.append(f"pass {number} is waited for")
            return outcome()

        return waited

    monkeypatch.setattr(Verifier, "verify", begun)


def test_a_completion_is_made_known_and_the_next_prompt_is_read_while_a_pass_runs(
    replica: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes 1 to 4 give the first sequence its three tokens; a third request then takes its place."""
    events: list[str] = []
    watch_passes(monkeypatch, events)
    third = Request(row_id=2, sample_index=0, prompt_ids=[2, 2], max_new_tokens=2)
    for completion in engine_of(replica, events, [*REQUESTS, third]).run():
        events.append(f"completion {completion.request.row_id}")
        stats = replica.stats_recorder.shard(0)
        assert stats.num_completions == sum(event.startswith("completion") for event in events)
        assert stats.num_target_passes == stats.num_rounds - (stats.num_completions > 2)
    for name in ("completion 0", "request 2"):
        before, after = events[: events.index(name)], events[events.index(name) + 1 :]
        last = [event for event in before if event.startswith("pass")][-1]
        following = next(event for event in after if event.startswith("pass"))
        assert last.endswith("begins") and following == last.replace("begins", "is waited for"), events


def test_as_many_prompts_are_read_as_sequences_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four end at once: in the pass that runs then, what takes their places is asked for, and one
    request more."""
    events: list[str] = []
    watch_passes(monkeypatch, events)
    requests = [
        Request(row_id=row, sample_index=0, prompt_ids=[1, 2], max_new_tokens=3 if row else 12)
        for row in range(9)
    ]
    replica = Harness(markov_pair()[0], None, max_num_seqs=4)
    assert len(list(engine_of(replica, events, requests).run())) == 9
    during = events[events.index("pass 4 begins") : events.index("pass 4 is waited for")]
    # The fifth has been waiting since the first pass.
    assert [event for event in during if event.startswith("request")] == [
        "request 5", "request 6", "request 7"
    ], events  # fmt: skip


def test_a_completion_is_not_lost_with_the_round_after_it(
    replica: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an error ends the run, what had been finished before is handed out first."""
    runner, found = replica.runners[0], []
    forward = runner.forward

    def failing(batch: object, index: np.ndarray) -> Tensor:
        # The first pass of the second sequence alone; the round before it has ended the first one.
        if len(replica.scheduler.running) == 1:
            raise RuntimeError("the device is gone")
        logits: Tensor = forward(batch, index)  # type: ignore[arg-type]
        return logits

    monkeypatch.setattr(runner, "forward", failing)
    engine = engine_of(replica, [])
    replica.scheduler = engine.scheduler
    with pytest.raises(RuntimeError, match="the device is gone"):
        found.extend(engine.run())
    assert [completion.request.row_id for completion in found] == [0]
    assert len(found[0].token_ids) == 3 and found[0].text


def test_results_are_fetched_when_they_are_asked_for() -> None:
    """The pass's output is not read before: reading waits."""
    device = EmulatedDevice()
    device.queue(500_000_000)
    tokens = np.arange(3)
    asked = VerifyInput(
        batch=FlatBatch(tokens, np.zeros(3, np.int64), tokens),
        logits_indices_N=tokens,
        stream_keys_N=np.zeros(3, np.int64),
        target_logits_indices_C=np.array([0, 1]),
    )
    logits = device.tensor(torch.eye(5)[[1, 3, 4]])
    output = FullDistributions.of(logits, SamplingSettings(temperature=0.0), asked)
    assert not device.num_waits
    assert output.candidate_probabilities().tolist() == [1.0, 0.0]
    assert device.num_waits == 1
    output.next_distributions(np.array([2]))
    assert device.num_waits == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_device_looks_for_branches_before_the_host_waits_for_the_first_token_ahead(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Else the device would stand still for it. Sequences end with a next token, after which there is no room
    for a token ahead; tokens and branches are those of a loop that waits after every step."""
    events: list[str] = []
    requests = requests_for([[1, 2], [3, 1, 2], [2, 2, 1]])

    def found() -> tuple[list[list[int]], int]:
        replica = Harness(
            *markov_pair(),
            num_draft_tokens=3,
            num_ahead_tokens=4,
            num_branches=2,
            max_new_tokens=40,
            settings=SamplingSettings(temperature=temperature),
        )
        completions = replica.generate(requests)
        return [each.token_ids for each in completions], replica.stats_recorder.shard(0).num_branches

    expected = found()
    for name in ("_launch_steps", "_collect_steps"):
        monkeypatch.setattr(DraftLoop, name, noting(getattr(DraftLoop, name), events))
    monkeypatch.setattr(branches, "likeliest", noting(branches.likeliest, events))
    monkeypatch.setattr(draft_loop, "waits_after_each_step", lambda *_: False)
    assert found() == expected
    assert expected[1] > 20
    # What was collected is followed by an attempt to launch more, of which there is none.
    before = [events[index - 2 : index] for index, event in enumerate(events) if event == "likeliest"]
    assert before.count(["_launch_steps", "_launch_steps"]) > 0.6 * len(before) > 10


@pytest.mark.parametrize("waits", [True, False])
def test_a_round_that_works_ahead_is_chosen_while_its_first_token_ahead_is_drafted(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Whatever the choice is, that token is verified like any other: all are the target's own."""
    ahead, wide = RoundShape(num_ahead=4, num_branches=2), RoundShape(num_ahead=3, num_branches=1)
    chosen = itertools.cycle([ahead, ahead, SYNCHRONOUS, ahead, ALONE, wide, ahead, LISTEN, wide])
    events: list[str] = []
    monkeypatch.setattr(DraftLoop, "_launch_steps", noting(DraftLoop._launch_steps, events))
    monkeypatch.setattr(DraftLoop, "_collect_steps", noting(DraftLoop._collect_steps, events))
    monkeypatch.setattr(AheadDrafter, "_choose", noting(AheadDrafter._choose, events))
    monkeypatch.setattr(ScriptedChooser, "shape_ahead", lambda *_, **__: next(chosen))
    monkeypatch.setattr(draft_loop, "waits_after_each_step", lambda *_: waits)
    settings = SamplingSettings(temperature=1.0, is_coupled=True)
    requests = requests_for([[1, 2], [3, 1, 2], [2, 2, 1]])
    about: dict[str, Any] = {"settings": settings, "max_new_tokens": 40}
    target, draft = markov_pair()
    replica = Harness(
        target, draft, num_draft_tokens=3, num_ahead_tokens=4, num_branches=2, shapes=[ahead, wide], **about
    )
    found = [each.token_ids for each in replica.generate(requests)]
    assert found == [each.token_ids for each in Harness(target, None, **about).generate(requests)]
    assert replica.stats_recorder.shard(0).num_accepted_tokens > 20
    orders = [events[index - 1 : index + 2] for index, event in enumerate(events) if event == "_choose"]
    assert orders.count(["_launch_steps", "_choose", "_collect_steps"]) > 0.4 * len(orders) > 10


def noting(function: Callable[..., Any], events: list[str]) -> Callable[..., Any]:
    """The function, which then notes its name."""

    @functools.wraps(function)
    def noted(*arguments: Any, **options: Any) -> Any:
        events.append(function.__name__)
        return function(*arguments, **options)

    return noted


def test_a_request_that_follows_from_the_last_completion_is_still_served(replica: Harness) -> None:
    """As the next turn of a conversation does, when no other sequence runs."""
    asked = [REQUESTS[0]]

    def next_request() -> Request | None:
        return asked.pop() if asked else None

    engine = engine_of(replica, [])
    engine.scheduler._requests = iter(next_request, 0)  # type: ignore[arg-type]
    rows = []
    for completion in engine.run():
        rows.append(completion.request.row_id)
        asked += [REQUESTS[1]] * (len(rows) == 1)
    assert rows == [0, 1]
