"""Which length policies ``--policies`` asks for. No tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from specdist.policies.choice import PolicyChoice
from specdist.policies.registry import HEAD_KINDS, HEAD_POLICIES, OPTIONS, owners_of
from specdist.policies.registry import POLICIES as ALL_POLICIES
from specdist.utils.errors import UserError

ALL = "all"
# Those that need no trained head, which are what ``all`` stands for.
POLICIES = tuple(name for name in ALL_POLICIES if name not in HEAD_POLICIES)
# After a policy that reads a head if it is given one.
WITH_HEAD = "+head"
READERS = tuple(policy if policy in HEAD_POLICIES else policy + WITH_HEAD for policy in HEAD_KINDS)
# GammaTune's tables (Gautam et al. 2025, section 6) average over 1 to 8, 12, 16, 20 and 24.
INITIAL_LENGTHS = (1, 2, 3, 5, 8, 12, 16, 24)


def policy_choices(
    names: Sequence[str], initial_lengths: Sequence[int] | None, max_draft_tokens: int | None
) -> list[PolicyChoice]:
    """What is to be measured, each setting once.

    Args:
        names: ``all``, a policy, or a policy with options of its own: ``svip:stop_root_entropy=0.5``;
            ``goodput+head`` is goodput with the head.
        initial_lengths: for every policy that takes ``num_draft_tokens`` and is not given one; None: those of
            :data:`INITIAL_LENGTHS` that are possible.
        max_draft_tokens: of every policy that takes it; None: the default, or the longest of these lengths.

    Raises :class:`UserError` for what the main job would refuse too.
    """
    entries = [_parse(entry) for name in names for entry in (POLICIES if name == ALL else (name,))]
    needs_lengths = any(_wants_lengths(policy, given) for policy, given, _ in entries)
    if initial_lengths is not None and not needs_lengths:
        raise UserError(f"--initial_lengths has no effect with --policies {' '.join(names)}: leave it out")
    lengths = list(initial_lengths or INITIAL_LENGTHS) if needs_lengths else []
    if max_draft_tokens is None:
        cap = int(max(*(info.default for info in owners_of("max_draft_tokens").values()), *lengths))
    else:
        if not any(takes(policy, "max_draft_tokens") for policy, _, _ in entries):
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


def takes(policy: str, option: str) -> bool:
    """Whether the option has an effect with the policy."""
    return option in OPTIONS[policy]


def _wants_lengths(policy: str, given: Mapping[str, float]) -> bool:
    return takes(policy, "num_draft_tokens") and "num_draft_tokens" not in given


def _choices_of(
    policy: str, given: Mapping[str, float], initial_lengths: Sequence[int], cap: int
) -> Iterator[PolicyChoice]:
    limit = {"max_draft_tokens": cap} if takes(policy, "max_draft_tokens") else {}
    if not _wants_lengths(policy, given):
        yield PolicyChoice.of(policy, **given, **limit)
        return
    for length in initial_lengths:
        yield PolicyChoice.of(policy, **given, **limit, num_draft_tokens=length)


def _parse(entry: str) -> tuple[str, dict[str, float], bool]:
    """A policy, the options that it is given, and whether it is given a head that it could do without."""
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
    if not takes(policy, name):
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
