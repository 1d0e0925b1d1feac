"""The checks of test_waits.py; each runs in a process with a fake device."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np

from specdist.engine.draft.steps.draft_runs import RunLengths
from specdist.policies import Goodput, LengthPolicy, RoundContext
from tests.engine.harness import Harness, requests_for
from tests.engine.heads import random_head
from tests.gpu.check_engine import ALL_POLICIES, HEAD_POLICIES, POLICIES
from tests.gpu.engine_runs import GPU, RULES, SIZES, Pair, prompts
from tests.gpu.waits import RoundWaits, counted_waits
from tests.models.families import VOCAB_SIZE, noisy_copy, tiny_model

LENGTHS = (20, 9, 14)
NUM_NEW_TOKENS = 16
LATE_POLICIES = [name for name, new in POLICIES.items() if new().uses_features] + list(HEAD_POLICIES)


class Rounds:
    """A replica whose passes are recorded once, for several runs."""

    def __init__(self, *, has_head: bool) -> None:
        target = tiny_model("llama").bfloat16()
        draft = noisy_copy(target)
        options: dict[str, Any] = SIZES | {"max_new_tokens": NUM_NEW_TOKENS}
        if has_head:
            options["head"] = random_head(draft, uses_features=True)
        self._replica = Harness(target, draft, device=GPU, **options)

    def waits(self, rule: str, policy: str) -> RoundWaits:
        """In the steady rounds of a run, after one that has recorded its passes."""
        for _ in range(2):
            self._replica.settings, self._replica.policy = RULES[rule], ALL_POLICIES[policy]()
            with counted_waits() as found:
                self._replica.generate(requests_for(prompts(LENGTHS)))
        assert found.draft, "no steady round"
        return found


def check_waits(policy: str) -> None:
    """Under each rule one for what the draft has drawn; two or less on average if the policy may go on after
    a run of steps, or decides for a batch of which it must know the next tokens."""
    rounds = Rounds(has_head=policy in HEAD_POLICIES)
    # How tokens are filtered does not depend on the policy: once for each kind of policy.
    has_filters = policy in ("fixed", "confidence", "goodput", "specdecpp")
    for rule in RULES if has_filters else ("greedy", "rejection", "gumbel"):
        found = rounds.waits(rule, policy)
        waits, most = (found.mean_of_draft, 2) if policy in LATE_POLICIES else (found.most_of_draft, 1)
        assert waits <= most, f"{rule}: {found.report()}"
        assert found.most_of_target <= 1, f"{rule}: {found.report()}"


def check_runs(num_steps: int) -> None:
    """However many steps are run before the policy is asked, the rows are those of a CPU, and a policy that
    decides for the whole batch gets the same questions: none for a sequence that has ended. Policies meet one
    rule after a step, and the other after three."""
    target = tiny_model("llama", seed=3).bfloat16()
    draft = noisy_copy(target)
    head = random_head(draft, uses_features=True)
    stops = range(0, VOCAB_SIZE, 9)
    options = {"max_new_tokens": NUM_NEW_TOKENS, "eos": stops}
    pairs = {True: Pair(target, draft, {**options, "head": head}), False: Pair(target, draft, options)}
    with patch.object(RunLengths, "next", lambda *_: num_steps):
        for place, name in enumerate((*LATE_POLICIES, "fixed")):
            rule = ("top_k", "gumbel")[(place + num_steps // 2) % 2]
            asked: list[list[Any]] = []
            pair = pairs[name != "fixed"]
            pair.check(RULES[rule], lambda name=name, asked=asked: _noting(ALL_POLICIES[name](), asked))
            assert len(asked) != 2 or asked[0] == asked[1] != [], (rule, name)
            drafted = [replica.stats_recorder.close_shard(0) for replica in (pair.on_gpu, pair.on_cpu)]
            # No token is kept that the policy did not ask for.
            assert drafted[0].num_draft_tokens == drafted[1].num_draft_tokens > 0, (rule, name)


def _noting(policy: LengthPolicy, asked: list[list[Any]]) -> LengthPolicy:
    """A policy for the batch notes its questions in a list of its own."""
    if isinstance(policy, Goodput):
        questions: list[Any] = []
        asked.append(questions)
        plan = policy._sequences_that_pay

        def noted(
            round: RoundContext, slots_A: np.ndarray, survival_A: np.ndarray, length: int
        ) -> np.ndarray:
            questions.append((length, slots_A.tolist()))
            return plan(round, slots_A, survival_A, length)

        policy._sequences_that_pay = noted  # type: ignore[method-assign]
    return policy
