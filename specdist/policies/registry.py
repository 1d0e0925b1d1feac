"""All length policies by name, with their options: what is declared and given, and the object built from it.

A new policy is a class in ``lengths/``, and a line in :data:`POLICIES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from specdist.policies.base import HeadKind, LengthPolicy
from specdist.policies.costs import CostModel
from specdist.policies.lengths.counted import (
    LEVIATHAN_2023,
    FixedLength,
    GammaTune,
    GammaTunePlus,
    HfHeuristic,
)
from specdist.policies.lengths.goodput import Goodput
from specdist.policies.lengths.thresholds import (
    AdaEdl,
    ConfidenceThreshold,
    DraftVerify,
    SpecDecPlusPlus,
    Sprinter,
    Svip,
)
from specdist.policies.options import OptionInfo, options_of
from specdist.utils.errors import UserError
from specdist.utils.rules import RULE, Rule

CHEN_2023 = (
    "Chen, Borgeaud, Irving, Lespiau, Sifre, Jumper (2023). *Accelerating Large Language Model Decoding "
    "with Speculative Sampling*. [arXiv:2302.01318](https://arxiv.org/abs/2302.01318)"
)
DALIRI_2024 = (
    "Daliri, Musco, Suresh (2024). *Coupling without Communication and Drafter-Invariant Speculative "
    "Decoding*. [arXiv:2408.07978](https://arxiv.org/abs/2408.07978)"
)
# The papers of every run with a draft, and in addition of each --acceptance.
OF_SPECULATION = (LEVIATHAN_2023, CHEN_2023)
OF_ACCEPTANCE: dict[str, tuple[str, ...]] = {"rejection": (), "gumbel": (DALIRI_2024,)}
TARGET_ONLY = "none"
# The name for what is as good as any without tuning: goodput.
AUTO = "auto"
# Every class takes its options as keyword arguments.
POLICIES: Mapping[str, Any] = {
    policy.name: policy
    for policy in (
        FixedLength,
        HfHeuristic,
        ConfidenceThreshold,
        DraftVerify,
        Svip,
        AdaEdl,
        GammaTune,
        GammaTunePlus,
        SpecDecPlusPlus,
        Sprinter,
        Goodput,
    )
}
if TYPE_CHECKING:
    PolicyName = str
else:
    # The values of --policy.
    PolicyName = Literal[(AUTO, *POLICIES, TARGET_ONLY)]

OPTIONS: Mapping[str, Mapping[str, OptionInfo]] = {
    name: options_of(policy) for name, policy in POLICIES.items()
}
OPTION_NAMES = tuple(dict.fromkeys(option for options in OPTIONS.values() for option in options))
# The kind of trained head that the policies that need one read.
HEAD_KINDS: Mapping[str, HeadKind] = {
    name: policy.head_kind for name, policy in POLICIES.items() if policy.head_kind
}


def owners_of(option: str) -> dict[str, OptionInfo]:
    """The policies that have this option, with its declaration in each."""
    return {name: options[option] for name, options in OPTIONS.items() if option in options}


def option_help(option: str) -> str:
    """The option's meaning and default for every policy that has it, for ``--help``."""
    groups: dict[tuple[str, str, float], list[str]] = {}
    for policy, info in owners_of(option).items():
        groups.setdefault((info.help, info.symbol, info.default), []).append(policy)
    parts = []
    for (text, symbol, default), policies in groups.items():
        names = "all but fixed" if len(policies) == len(POLICIES) - 1 else ", ".join(policies)
        parts.append(f"{names}: {text} ({symbol + ', ' if symbol else ''}default {default:g})")
    return "; ".join(parts)


def needs_costs(policy: str) -> bool:
    """Whether it uses the costs of passes, which are then measured before the run."""
    return policy != TARGET_ONLY and bool(POLICIES[policy].needs_costs)


def uses_features(policy: str) -> bool:
    """Whether the draft must compute the features of every token."""
    return policy != TARGET_ONLY and bool(POLICIES[policy].uses_features)


def papers_of(policy: str, acceptance: str) -> list[str]:
    """The papers of a run's methods, each a line of Markdown; none for the target alone."""
    if policy == TARGET_ONLY:
        return []
    return list(dict.fromkeys([*OF_SPECULATION, *POLICIES[policy].papers, *OF_ACCEPTANCE[acceptance]]))


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
