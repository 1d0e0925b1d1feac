"""The option of conversations of several turns."""

from __future__ import annotations

from dataclasses import dataclass

from specdist.config.arguments import option
from specdist.config.groups import PromptOptions
from specdist.utils.errors import UserError

# Options whose columns describe one completion.
OF_ONE_COMPLETION = ("trace", "logprobs", "prompt_logprobs")


@dataclass(kw_only=True)
class TurnOptions(PromptOptions):
    """Prompts, and conversations of which the input has the user's side alone."""

    _argument_group_name = "Prompts"

    turns_column: str | None = option(
        None,
        help="column of lists of user messages: each is answered in turn, with the answers before it, in the "
        "chat template",
    )

    def check_prompts(self) -> None:
        """Fill in the column: that of turns is one of messages. Raises :class:`UserError`."""
        if self.turns_column is not None:
            self._check_turns(self.turns_column)
            self.messages_column = self.turns_column
        super().check_prompts()

    def _check_turns(self, column: str) -> None:
        for name in ("prompt_column", "messages_column"):
            given = getattr(self, name)
            if given not in (None, column):
                raise UserError(
                    f"--turns_column {column} and --{name} {given} exclude each other: name the "
                    "one that has the prompts"
                )
        for name in OF_ONE_COMPLETION:
            if getattr(self, name) not in (None, False):
                raise UserError(
                    f"--{name} describes one completion of a row, and with --turns_column "
                    f"{column} a row has several: leave one of them out, or give whole "
                    "conversations in --messages_column"
                )
