"""The checks of test_waits.py; each runs in a process with a pretended device."""

from __future__ import annotations

from tests.engine.harness import Harness, requests_for
from tests.gpu.check_engine import POLICIES
from tests.gpu.engine_runs import GPU, MAX_DRAFT_TOKENS, RULES, SIZES, prompts
from tests.gpu.waits import RoundWaits, counted_waits
from tests.models.families import noisy_copy, tiny_model

LENGTHS = (20, 9, 14)
NUM_NEW_TOKENS = 40
POLICIES_WITH_FEATURES = [name for name, new in POLICIES.items() if new().uses_features]


def waits_of(rule: str, policy: str) -> RoundWaits:
    """In the steady rounds of a run whose passes have been recorded before."""
    target = tiny_model("llama").bfloat16()
    options = SIZES | {"max_new_tokens": NUM_NEW_TOKENS}
    replica = Harness(target, noisy_copy(target), device=GPU, settings=RULES[rule], **options)
    for _ in range(2):
        replica.policy = POLICIES[policy]()
        with counted_waits() as found:
            replica.generate(requests_for(prompts(LENGTHS)))
    return found


def check_waits(policy: str) -> None:
    """Under every rule."""
    for rule in RULES:
        found = waits_of(rule, policy)
        assert found.draft, "no steady round"
        # The next tokens' draws, where there are any, and what the draft has drawn.
        allowed = 1 + RULES[rule].is_random + (policy in POLICIES_WITH_FEATURES) * MAX_DRAFT_TOKENS
        assert found.most_of_draft <= allowed, f"{rule}: {found.report()}"
        assert found.most_of_target <= 1, f"{rule}: {found.report()}"
