"""The checks of test_waits.py; each runs in a process with a pretended device."""

from __future__ import annotations

from unittest.mock import patch

from specdist.engine import draft_lookahead
from tests.engine.harness import Harness, requests_for
from tests.gpu.check_engine import POLICIES
from tests.gpu.engine_runs import GPU, MAX_DRAFT_TOKENS, RULES, SIZES, Pair, prompts
from tests.gpu.waits import RoundWaits, Waits, counted_waits
from tests.models.families import noisy_copy, tiny_model

LENGTHS = (20, 9, 14)
NUM_NEW_TOKENS = 16
POLICIES_WITH_FEATURES = [name for name, new in POLICIES.items() if new().uses_features]


class Rounds:
    """A replica whose passes are recorded once, for several runs."""

    def __init__(self) -> None:
        target = tiny_model("llama").bfloat16()
        options = SIZES | {"max_new_tokens": NUM_NEW_TOKENS}
        self._replica = Harness(target, noisy_copy(target), device=GPU, **options)

    def waits(self, rule: str, policy: str) -> RoundWaits:
        """In the steady rounds of a run, after one that has recorded its passes."""
        for _ in range(2):
            self._replica.settings, self._replica.policy = RULES[rule], POLICIES[policy]()
            with counted_waits() as found:
                self._replica.generate(requests_for(prompts(LENGTHS)))
        assert found.draft, "no steady round"
        return found


def check_waits(policy: str) -> None:
    """Under every rule: for the next tokens' draws, where there are any, and for what the draft has drawn."""
    rounds = Rounds()
    for rule in RULES:
        found = rounds.waits(rule, policy)
        assert found.most_of_draft <= 1 + RULES[rule].is_random, f"{rule}: {found.report()}"
        assert found.most_of_target <= 1, f"{rule}: {found.report()}"
        # A policy that looks at every token is asked while the next step runs.
        num_looks = max(waits.total() for waits in found.at_work)
        assert num_looks <= (MAX_DRAFT_TOKENS - 1) * POLICIES[policy]().uses_features


def check_lookahead(num_steps: int) -> None:
    """However late the policy's answers come, the rows are those of a CPU; with as many steps ahead as a
    block may have, the host waits for the draws once."""
    target = tiny_model("llama", seed=3).bfloat16()
    pair = Pair(target, noisy_copy(target), {"max_new_tokens": NUM_NEW_TOKENS})
    with patch.object(draft_lookahead, "NUM_STEPS_AHEAD", num_steps):
        for rule in ("top_k", "gumbel"):
            for policy in POLICIES_WITH_FEATURES:
                pair.check(RULES[rule], POLICIES[policy])
                drafted = [replica.stats_recorder.close_shard(0) for replica in (pair.on_gpu, pair.on_cpu)]
                # No token is kept that the policy did not ask for.
                assert drafted[0].num_draft_tokens == drafted[1].num_draft_tokens > 0, (rule, policy)
        if num_steps >= MAX_DRAFT_TOKENS:
            found = Rounds().waits("rejection", "svip")
            assert found.most_of_draft <= 2 and not sum(found.at_work, Waits()), found.report()
