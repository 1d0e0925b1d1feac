"""The options of the length policies: which policy takes which, its defaults, and what a value may be.

An option of another policy is refused: it would have no effect. The defaults are the papers' where they name
one; SpecDec++'s threshold is the one that was best over all of its sets. GammaTune's paper names none: its
threshold is that of the heuristic which it says it takes over, its bonus the growth of transformers'
heuristic, its rate half way. Of AdaEDL the first threshold is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from specdist.utils.errors import UserError


@dataclass(frozen=True)
class PolicyOption:
    """``defaults`` by policy; a value outside of what ``holds`` breaks the ``rule``."""

    defaults: Mapping[str, float]
    holds: Callable[[float], bool]
    rule: str


def _count(defaults: Mapping[str, float]) -> PolicyOption:
    return PolicyOption(defaults, lambda value: value >= 1, "must be at least 1")


def _share(defaults: Mapping[str, float]) -> PolicyOption:
    return PolicyOption(defaults, lambda value: 0 <= value <= 1, "must be in [0, 1]")


def _amount(defaults: Mapping[str, float]) -> PolicyOption:
    return PolicyOption(defaults, lambda value: 0 <= value < math.inf, "must be 0 or a number above")


HeadKind = Literal["acceptance", "verifier"]

TARGET_ONLY = "none"
GAMMATUNES = ("gammatune", "gammatune_plus")
FIRST_LENGTHS = dict.fromkeys(("hf_heuristic", *GAMMATUNES), 5)
# They read a trained head, which --head names; and those that may.
HEAD_POLICIES = ("specdecpp", "sprinter")
HEAD_KINDS: Mapping[str, HeadKind] = {
    "specdecpp": "acceptance",
    "sprinter": "verifier",
    "goodput": "acceptance",
}
CAPS = dict.fromkeys(
    ("hf_heuristic", "confidence", "svip", "adaedl", "goodput", *GAMMATUNES, *HEAD_POLICIES), 20
)

POLICY_OPTIONS = {
    "num_draft_tokens": _count({"fixed": 5, **FIRST_LENGTHS}),
    "max_draft_tokens": _count(CAPS),
    "min_draft_tokens": _count(dict.fromkeys(GAMMATUNES, 1)),
    "stop_probability": _share({"confidence": 0.4, "gammatune_plus": 0.4}),
    "stop_root_entropy": _amount({"svip": 0.3}),
    "stop_threshold": _share({"specdecpp": 0.7}),
    "verifier_threshold": _share({"sprinter": 0.5}),
    "stop_bound": _share({"adaedl": 0.4}),
    "stop_bound_step": _share({"adaedl": 0.01}),
    "stop_bound_momentum": _share({"adaedl": 0.9}),
    "entropy_factor": _amount({"adaedl": 0.2}),
    "target_acceptance": _share({"adaedl": 0.9}),
    "acceptance_momentum": _share({"adaedl": 0.5}),
    "length_bonus": _amount(dict.fromkeys(GAMMATUNES, 2.0)),
    "length_rate": _share(dict.fromkeys(GAMMATUNES, 0.5)),
}


def check_ranges(given: Mapping[str, float]) -> None:
    """Raises :class:`UserError` for a value that its option cannot have, whatever the policy."""
    for name, value in given.items():
        if not POLICY_OPTIONS[name].holds(value):
            raise UserError(f"--{name} {value!r} {POLICY_OPTIONS[name].rule}")


def resolve_policy_options(policy: str, given: Mapping[str, float]) -> dict[str, float]:
    """The options in force. Raises :class:`UserError` for one of another policy, or two that exclude each
    other. A default that the given limits exclude is moved to the nearer limit.
    """
    if policy == TARGET_ONLY:
        return {}
    for name, value in given.items():
        owners = POLICY_OPTIONS[name].defaults
        if policy not in owners:
            raise UserError(
                f"--{name} {value} has no effect with --policy {policy}: leave it out, or choose a policy "
                f"that takes it ({', '.join(owners)})"
            )
    defaults = {
        name: option.defaults[policy] for name, option in POLICY_OPTIONS.items() if policy in option.defaults
    }
    options = {**defaults, **given}
    fewest, most = options.get("min_draft_tokens", 1), options.get("max_draft_tokens", math.inf)
    if "num_draft_tokens" not in given and "num_draft_tokens" in options:
        options["num_draft_tokens"] = max(fewest, min(options["num_draft_tokens"], most))
    for low, high in (("min_draft_tokens", "max_draft_tokens"), ("min_draft_tokens", "num_draft_tokens"),
                      ("num_draft_tokens", "max_draft_tokens")):  # fmt: skip
        if low in options and high in options and options[low] > options[high]:
            raise UserError(
                f"--{low} {options[low]} is more than --{high} {options[high]}: lower the one or raise the "
                "other"
            )
    return options


def needs_costs(policy: str) -> bool:
    """Whether it decides by what passes cost, which is then measured before the run."""
    return policy == "goodput"


def most_draft_tokens(options: Mapping[str, float]) -> int:
    """Most tokens of one block under resolved options; 0 for a target alone."""
    return int(options.get("max_draft_tokens", options.get("num_draft_tokens", 0)))


@dataclass(frozen=True)
class PolicyChoice:
    """A policy with all of its options in force; by default no draft at all. ``reads_head``: one that can do
    without a head has one."""

    policy: str = TARGET_ONLY
    options: Mapping[str, float] = field(default_factory=dict)
    reads_head: bool = False

    @staticmethod
    def of(policy: str, **given: float) -> PolicyChoice:
        """With defaults for what is not given. Raises :class:`UserError` as the main job does."""
        check_ranges(given)
        return PolicyChoice(policy, resolve_policy_options(policy, given))

    @property
    def max_draft_tokens(self) -> int:
        return most_draft_tokens(self.options)

    @property
    def first_length(self) -> int | None:
        """Tokens of a row's first block where the options say them; of ``fixed``, of every block."""
        length = self.options.get("num_draft_tokens")
        return None if length is None else int(length)

    @property
    def family(self) -> str:
        """The policy, and what is not default in it but lengths."""
        lengths = ("num_draft_tokens", "max_draft_tokens")
        changed = [
            f"{name}={value:g}"
            for name, value in self.options.items()
            if name not in lengths and value != POLICY_OPTIONS[name].defaults[self.policy]
        ]
        return " ".join([self.policy, *changed])

    @property
    def label(self) -> str:
        """What tables call it."""
        if self.policy == TARGET_ONLY:
            return "target only"
        if self.policy == "fixed":
            return f"K = {self.first_length}"
        label = f"{self.family} with head" if self.reads_head else self.family
        return label if self.first_length is None else f"{label} from {self.first_length}"
