"""A policy with its options: given values, defaults, and the object built from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdist.policies.base import LengthPolicy
from specdist.policies.costs import CostModel
from specdist.policies.lengths.counted import FixedLength
from specdist.policies.registry import (
    OPTION_NAMES,
    OPTIONS,
    POLICIES,
    TARGET_ONLY,
    needs_costs,
    option_help,
    owners_of,
)
from specdist.utils.errors import UserError
from specdist.utils.rules import RULE, Rule


def resolve_policy_options(policy: str, given: Mapping[str, float]) -> dict[str, float]:
    """All options of the policy, with defaults. A default above the given limit is lowered to it.

    Raises :class:`UserError` for an option of another policy, or for two that contradict each other.
    """
    if policy == TARGET_ONLY:
        return {}
    for name, value in given.items():
        if name not in OPTIONS[policy]:
            raise UserError(
                f"--{name} {value} has no effect with --policy {policy}: leave it out, or choose a policy "
                f"that takes it ({', '.join(owners_of(name))})"
            )
    options = {**{name: info.default for name, info in OPTIONS[policy].items()}, **given}
    first, most = (options.get(name) for name in ("num_draft_tokens", "max_draft_tokens"))
    if first is not None and most is not None and first > most:
        if "num_draft_tokens" in given:
            raise UserError(
                f"--num_draft_tokens {first} is more than --max_draft_tokens {most}: lower the one or raise "
                "the other"
            )
        options["num_draft_tokens"] = most
    return options


def most_draft_tokens(options: Mapping[str, float]) -> int:
    """Most tokens of one block under resolved options; 0 without a draft."""
    return int(options.get("max_draft_tokens", options.get("num_draft_tokens", 0)))


@dataclass(frozen=True)
class PolicyChoice:
    """A policy with all of its options; by default no draft."""

    policy: str = TARGET_ONLY
    options: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(policy: str, **given: float) -> PolicyChoice:
        """The choice with defaults for the other options. Raises :class:`UserError` as the main job does."""
        for name, value in given.items():
            rule_of(name).check(name, value)
        return PolicyChoice(policy, resolve_policy_options(policy, given))

    @property
    def max_draft_tokens(self) -> int:
        return most_draft_tokens(self.options)

    @property
    def first_length(self) -> int | None:
        """Tokens of a sequence's first block, if an option says it; of ``fixed``, of every block."""
        length = self.options.get("num_draft_tokens")
        return None if length is None else int(length)


def build_policy(choice: PolicyChoice, costs: CostModel | None, *, is_coupled: bool) -> LengthPolicy:
    """A new policy object, which has learned nothing yet.

    Args:
        costs: of passes, for a policy that uses them.
        is_coupled: target and draft draw with the same noise, or without noise (greedy).
    """
    if choice.policy == TARGET_ONLY:
        return FixedLength(0)
    extra: dict[str, Any] = {}
    if needs_costs(choice.policy):
        assert costs is not None
        extra = {"costs": costs, "is_coupled": is_coupled}
    policy: LengthPolicy = POLICIES[choice.policy](**choice.options, **extra)
    return policy


def rule_of(name: str) -> Rule:
    """The range of an option, the same for all policies that have it."""
    return next(iter(owners_of(name).values())).rule


def _argument(name: str) -> tuple[str, Any, Any]:
    """The option as a field of a configuration; None if it is not given."""
    value_type: Any = type(next(iter(owners_of(name).values())).default)
    metadata = {"help": option_help(name), RULE: rule_of(name)}
    return name, value_type | None, dataclasses.field(default=None, metadata=metadata)


if TYPE_CHECKING:

    class PolicyArguments:
        """See below."""

else:
    # The options of all policies, as a part of a configuration.
    PolicyArguments = dataclasses.make_dataclass(
        "PolicyArguments",
        [_argument(name) for name in OPTION_NAMES],
        kw_only=True,
        namespace={"__module__": __name__, "_argument_group_name": "Options of single policies"},
    )
