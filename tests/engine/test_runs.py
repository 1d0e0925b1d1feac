"""Drafts of recorded runs, after which the policy is asked, as on a GPU: those of single steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdist.engine.draft.steps import draft_loop
from specdist.engine.draft.steps.draft_runs import RunLengths
from specdist.models.passes.acceleration import Acceleration
from specdist.policies import FixedLength, Goodput, LengthPolicy
from specdist.policies.costs import CostModel, Curve
from specdist.policies.lengths.thresholds import ConfidenceThreshold, SpecDecPlusPlus
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness, llama_pair, requests_for
from tests.engine.heads import random_head
from tests.engine.test_greedy import prompts_of_lengths
from tests.models.families import VOCAB_SIZE
from tests.models.tape import TapeCapturer

CAP = 4
COSTS = CostModel(Curve([1, 401], [2000, 2400]), Curve([1, 101], [20, 60]))
POLICIES: dict[str, Callable[[], LengthPolicy]] = {
    "fixed": lambda: FixedLength(CAP),
    "confidence": lambda: ConfidenceThreshold(stop_probability=0.4, max_draft_tokens=CAP),
    "goodput": lambda: Goodput(costs=COSTS, is_coupled=False, max_draft_tokens=CAP),
    "specdecpp": lambda: SpecDecPlusPlus(stop_threshold=0.7, max_draft_tokens=CAP),
}


@pytest.mark.parametrize(
    ("policy", "is_coupled"),
    [("fixed", False), ("confidence", False), ("goodput", False), ("goodput", True), ("specdecpp", True)],
)
def test_rows_and_drafts_are_those_of_single_steps(
    policy: str, is_coupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows end within a run, and some policies stop there; padding takes no part."""
    target, draft = llama_pair()
    settings = SamplingSettings(temperature=0.9, top_k=20, top_p=0.95, is_coupled=is_coupled)

    def generated(acceleration: Acceleration | None) -> tuple[object, ...]:
        replica = Harness(
            target, draft, settings=settings, policy=POLICIES[policy](), num_draft_tokens=CAP,
            head=random_head(draft, uses_features=True) if policy == "specdecpp" else None,
            max_new_tokens=24, max_num_seqs=3, eos=range(0, VOCAB_SIZE, 9), acceleration=acceleration,
        )  # fmt: skip
        found = [
            (one.token_ids, one.finish_reason)
            for one in replica.generate(requests_for(prompts_of_lengths(20, 9, 14, 5, 11)))
        ]
        stats = replica.stats_recorder.close_shard(0)
        return found, stats.draft_length_histogram, stats.num_draft_tokens

    expected = generated(None)
    capturer = TapeCapturer()
    monkeypatch.setattr(draft_loop, "waits_after_each_step", lambda *_: False)
    monkeypatch.setattr(RunLengths, "next", lambda *_: 3)
    assert generated(Acceleration(is_static=True, capturer=capturer)) == expected
    assert capturer.num_replays > 10
