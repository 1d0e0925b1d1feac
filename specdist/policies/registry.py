"""All length policies by name, and tables derived from their declarations.

A new policy is a class in ``lengths/``, and a line in :data:`POLICIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from specdist.policies.base import HeadKind
from specdist.policies.lengths.counted import FixedLength, GammaTune, GammaTunePlus, HfHeuristic
from specdist.policies.lengths.goodput import Goodput
from specdist.policies.lengths.heads import SpecDecPlusPlus, Sprinter
from specdist.policies.lengths.thresholds import AdaEdl, ConfidenceThreshold, DraftVerify, Svip
from specdist.policies.options import OptionInfo, options_of
from specdist.policies.references import OF_ACCEPTANCE, OF_SPECULATION, Reference

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


def papers_of(policy: str, acceptance: str) -> list[Reference]:
    """The papers of a run's methods; none for the target alone."""
    if policy == TARGET_ONLY:
        return []
    return list(dict.fromkeys([*OF_SPECULATION, *POLICIES[policy].papers, *OF_ACCEPTANCE[acceptance]]))
