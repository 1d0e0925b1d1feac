"""The length policies that ``--policies`` of the emulation names. No tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from specdist.config.arguments import option
from specdist.policies.choice import PolicyChoice
from specdist.policies.registry import HEAD_KINDS, HEAD_POLICIES, OPTIONS, owners_of
from specdist.policies.registry import POLICIES as ALL_POLICIES
from specdist.utils.errors import UserError

ALL = "all"
# What ``all`` stands for: the policies that need no trained head.
POLICIES = tuple(name for name in ALL_POLICIES if name not in HEAD_POLICIES)
# Suffix of a policy that can do without a head, and is to read one.
WITH_HEAD = "+head"
READERS = tuple(policy if policy in HEAD_POLICIES else policy + WITH_HEAD for policy in HEAD_KINDS)
# GammaTune's tables (Gautam et al. 2025, section 6) average over 1 to 8, 12, 16, 20 and 24.
INITIAL_LENGTHS = (1, 2, 3, 5, 8, 12, 16, 24)


@dataclass(kw_only=True)
class PolicyOptions:
    """Which policies are compared."""

    policies: list[str] | None = option(
        None,
        help="length policies to compare with the target alone: all, or names, optionally with options: "
        "svip:stop_root_entropy=0.5 (default: fixed and goodput)",
        action="extend",
    )
    initial_lengths: list[int] | None = option(
        None,
        help="draft tokens in the first round, for policies that have --num_draft_tokens (default: "
        f"{' '.join(map(str, INITIAL_LENGTHS))}; emulated: 5)",
        action="extend",
        at_least=1,
    )
    max_draft_tokens: int | None = option(
        None,
        help="maximum draft tokens per round, not for fixed (default: 20, or more for a longer first round)",
        at_least=1,
    )


def policy_choices(
    names: Sequence[str], initial_lengths: Sequence[int] | None, max_draft_tokens: int | None
) -> list[PolicyChoice]:
    """The settings to measure, each once.

    Args:
        names: ``all``, a policy, or a policy with options of its own: ``svip:stop_root_entropy=0.5``;
            ``goodput+head`` is goodput with the head.
        initial_lengths: for every policy that takes ``num_draft_tokens`` and is not given one; by default
            those of :data:`INITIAL_LENGTHS` that ``max_draft_tokens`` allows.
        max_draft_tokens: of every policy that takes it; by default its default, or the longest of these
            lengths.

    Raises :class:`UserError` as the main job does.
    """
    entries = [_parse(entry) for name in names for entry in (POLICIES if name == ALL else (name,))]
    needs_lengths = any(_wants_lengths(policy, given) for policy, given, _ in entries)
    if initial_lengths is not None and not needs_lengths:
        raise UserError(f"--initial_lengths has no effect with --policies {' '.join(names)}: leave it out")
    lengths = sorted(set(initial_lengths or INITIAL_LENGTHS)) if needs_lengths else []
    if max_draft_tokens is None:
        cap = int(max(*(info.default for info in owners_of("max_draft_tokens").values()), *lengths))
    else:
        if not any(_takes(policy, "max_draft_tokens") for policy, _, _ in entries):
            raise UserError(
                f"--max_draft_tokens has no effect with --policies {' '.join(names)}: leave it out"
            )
        cap = max_draft_tokens
        if initial_lengths is not None and max(lengths, default=0) > cap:
            raise UserError(
                f"--initial_lengths {max(lengths)} is more than --max_draft_tokens {cap}: lower the first or "
                "raise the second"
            )
        lengths = [length for length in lengths if length <= cap]
    choices = [
        dataclasses.replace(choice, reads_head=reads_head)
        for policy, given, reads_head in entries
        for choice in _choices_of(policy, given, lengths, cap)
    ]
    return list({choice.label: choice for choice in choices}.values())


def _takes(policy: str, option: str) -> bool:
    return option in OPTIONS[policy]


def _wants_lengths(policy: str, given: Mapping[str, float]) -> bool:
    return _takes(policy, "num_draft_tokens") and "num_draft_tokens" not in given


def _choices_of(
    policy: str, given: Mapping[str, float], initial_lengths: Sequence[int], cap: int
) -> Iterator[PolicyChoice]:
    if _takes(policy, "max_draft_tokens"):
        given = {**given, "max_draft_tokens": cap}
    if not _wants_lengths(policy, given):
        yield PolicyChoice.of(policy, **given)
        return
    for length in initial_lengths:
        yield PolicyChoice.of(policy, **given, num_draft_tokens=length)


def _parse(entry: str) -> tuple[str, dict[str, float], bool]:
    """A policy, its given options, and whether it reads a head that it could do without."""
    name, _, settings = entry.partition(":")
    policy = name.removesuffix(WITH_HEAD)
    reads_head = name in READERS and name != policy
    if policy not in (*POLICIES, *HEAD_POLICIES) or (name != policy and not reads_head):
        raise UserError(
            f"--policies {entry!r} is not a length policy: choose from {ALL}, {', '.join(POLICIES)}, with "
            f"--head {', '.join(READERS)} (the target alone is always measured)"
        )
    given = dict(_setting(entry, policy, item) for item in settings.split(",")) if settings else {}
    return policy, given, reads_head


def _setting(entry: str, policy: str, item: str) -> tuple[str, float]:
    name, _, value = item.partition("=")
    if name == "max_draft_tokens":
        raise UserError(f"--policies {entry}: use --max_draft_tokens, which applies to all policies")
    if not _takes(policy, name):
        known = [name for name in OPTIONS[policy] if name != "max_draft_tokens"]
        raise UserError(
            f"--policies {entry}: {name!r} is not an option of {policy}, which takes "
            f"{', '.join(known) or 'none'}"
        )
    kind = type(OPTIONS[policy][name].default)
    try:
        return name, kind(value)
    except ValueError as error:
        raise UserError(f"--policies {entry}: {name} takes {kind.__name__}, not {value!r}") from error
