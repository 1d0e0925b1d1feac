"""How a length policy declares its options: beside the policy, as fields of its own class.

    stop_root_entropy: float = policy_option(0.3, AMOUNT, symbol="h", help="stop after a token whose ...")

The command line, the checks and the tables are derived from these declarations in
:mod:`specdist.policies.registry`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from specdist.policies.base import LengthPolicy
from specdist.utils.rules import Rule, within

COUNT, SHARE = within(at_least=1), within(at_least=0, at_most=1)
AMOUNT = within(at_least=0, below=math.inf, text="must be a finite number of at least 0")


@dataclass(frozen=True, kw_only=True)
class OptionInfo:
    """One option of one policy. ``symbol``: its name in the paper."""

    default: float
    rule: Rule
    help: str
    symbol: str = ""


def policy_option(default: float, rule: Rule, *, help: str, symbol: str = "") -> Any:
    """A dataclass field that is an option of the policy."""
    return shared_option(OptionInfo(default=default, rule=rule, help=help, symbol=symbol))


# The option of policies whose blocks differ in length.
MAX_DRAFT_TOKENS = OptionInfo(default=20, rule=COUNT, help="most draft tokens of a block")
# The option of policies that adapt a first length.
FIRST_DRAFT_TOKENS = OptionInfo(default=5, rule=COUNT, help="draft tokens of a sequence's first block")


def shared_option(info: OptionInfo) -> Any:
    """A dataclass field for an option that several policies share."""
    return dataclasses.field(default=info.default, metadata={"option": info})


class RegisteredPolicy(LengthPolicy):
    """A policy with a name, and what its class declares.

    Attributes:
        name: its ``--policy``.
        drafts: how far it drafts, for tables.
        papers: its sources, each a line of Markdown.
        needs_costs: it uses the costs of passes, which are measured before the run.
        own_options: the options of a class that is not a dataclass.
    """

    name: ClassVar[str]
    drafts: ClassVar[str]
    papers: ClassVar[tuple[str, ...]] = ()
    needs_costs: ClassVar[bool] = False
    own_options: ClassVar[Mapping[str, OptionInfo]] = {}


def options_of(policy_class: Any) -> dict[str, OptionInfo]:
    """A policy's options by name, in the order of their declaration."""
    if not dataclasses.is_dataclass(policy_class):
        return dict(policy_class.own_options)
    fields = dataclasses.fields(policy_class)
    return {field.name: field.metadata["option"] for field in fields if "option" in field.metadata}
