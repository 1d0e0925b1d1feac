"""The options of constraints: what every completion must match as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from specdist.config.arguments import option
from specdist.utils.rules import Refusals

# The options that constrain every row.
OF_ALL_ROWS = ("json_schema", "regex", "grammar", "choices")
# In the place of a column: calls from Python have constraints of their own.
OF_CALLS = "(of the call)"
# Forced tokens of a block at most: runs of JSON schemas are seldom longer.
FORCED_TOKENS = 16
NO_STOP = (
    "exclude each other: a stop string could end a completion before it matches its constraint; leave --stop "
    "out: the constraint says where a completion ends"
)


@dataclass(kw_only=True)
class ConstraintOptions:
    """Which completions are allowed. The draft is constrained too, so acceptance does not suffer."""

    _argument_group_name = "Constraints"

    json_schema: str | None = option(None, help="file of a JSON schema that every completion must match")
    regex: str | None = option(None, help="regular expression that every completion must match as a whole")
    grammar: str | None = option(
        None, help="file of a grammar that every completion must match, in llguidance's form of Lark"
    )
    choices: list[str] | None = option(
        None, action="extend", help="texts of which every completion must be one"
    )
    constraint_column: str | None = option(
        None,
        help='column with each row\'s own constraint, as {"json_schema": ...}, {"regex": ...}, '
        '{"grammar": ...} or {"choices": [...]}, in JSON or a struct; null = that of all rows, if any',
    )
    max_thinking_tokens: int | None = option(
        None, at_least=0, note="0 allows no thinking",
        help="of a model that thinks before its answer: after this many tokens of a completion the end of "
        "thinking is forced; constraints are then those of the answer alone; 0 = no thinking",
    )  # fmt: skip
    split_thinking: bool = option(
        False,
        help="write the thinking and the answer of every completion in columns of their own, too, as "
        "--max_thinking_tokens does; constraints are then those of the answer alone",
    )
    end_of_thinking: str | None = option(
        None,
        help="the text that ends the thinking (default: </think> or [/THINK], whichever is a token of the "
        "target's tokenizer)",
    )

    _refusals: ClassVar[Refusals] = (
        ("end_of_thinking", lambda o: not o.splits_thinking,
         "has no effect without --max_thinking_tokens or --split_thinking: give one of them, or leave it "
         "out"),
        ("json_schema regex grammar choices", lambda o: len(o._given) > 1,
         "and --{o._given[1][0]} exclude each other: a completion has one constraint; give one of them, or "
         "each row its own in --constraint_column"),
        ("stop", lambda o: o._given, f"and --{{o._given[0][0]}} {NO_STOP}"),
        ("stop", lambda o: o.constraint_column is not None, f"and --constraint_column {NO_STOP}"),
    )  # fmt: skip

    @property
    def _given(self) -> list[tuple[str, Any]]:
        return [(name, value) for name in OF_ALL_ROWS if (value := getattr(self, name)) is not None]

    @property
    def constraint_of_all_rows(self) -> tuple[str, Any] | None:
        """Name and value of the option that constrains all rows, if one does."""
        return next(iter(self._given), None)

    @property
    def splits_thinking(self) -> bool:
        """Whether there are columns of the thinking and of the answer."""
        return self.split_thinking or self.max_thinking_tokens is not None

    @property
    def is_constrained(self) -> bool:
        """Whether any row may have a constraint, or a budget for its thinking."""
        return self.has_grammars or self.max_thinking_tokens is not None

    def forced_room(self, num_drawn: int, num_tokens_per_row: int) -> int:
        """Most tokens of a block that a grammar may force on top of those that a draft model draws, where a
        pass has so many tokens for each row: no row waits for them."""
        if not (self.is_constrained and num_drawn):
            return 0
        return max(0, min(FORCED_TOKENS, num_tokens_per_row - num_drawn - 1))

    @property
    def has_grammars(self) -> bool:
        return self.constraint_of_all_rows is not None or self.constraint_column is not None
