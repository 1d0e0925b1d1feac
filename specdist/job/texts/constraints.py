"""The constraints of a run: checked before any model is loaded, and each row's own with its prompt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from specdist.config.constraints import OF_CALLS
from specdist.config.generate import GenerateConfig
from specdist.data.formats.prompts import Prompts, RowError
from specdist.job.texts.tokens import ids_within, load_tokenizer
from specdist.models.files.checkpoint import Checkpoint
from specdist.sampling.constraints.compiling import CompilingProcess
from specdist.sampling.constraints.constraint import Constraint, ConstraintError
from specdist.sampling.constraints.masker import THINKING, RowMasker, RowRule, ThinkingMarkers
from specdist.sampling.constraints.matcher import grammars_of
from specdist.utils.errors import UserError
from specdist.utils.packages import check_installed

# Options whose value is a file that holds the constraint.
FILES = ("json_schema", "grammar")


class RunConstraints:
    """The constraints of a run with these options. Raises :class:`UserError` for a constraint of all rows
    that cannot be used, with its place, and where the target cannot be constrained."""

    def __init__(self, config: GenerateConfig, target: Checkpoint) -> None:
        self._column = config.constraint_column
        self._of_all_rows = config.constraint_of_all_rows
        self._target = target
        self._is_constrained, self._has_grammars = config.is_constrained, config.has_grammars
        self._masker: RowMasker | None = None
        self._compiling = CompilingProcess()
        self.grammar = ""
        self._max_thinking_tokens = config.max_thinking_tokens
        self._markers: ThinkingMarkers | None = None
        if config.splits_thinking:
            option = "max_thinking_tokens" if config.max_thinking_tokens is not None else "split_thinking"
            self._markers = thinking_markers(target, config.end_of_thinking, option)
        if not config.has_grammars:
            return
        check_installed("llguidance", self._option, "leave it out")
        if not load_tokenizer(target).is_fast:
            raise UserError(
                f"{self._option} needs a fast tokenizer (tokenizer.json), and that of --target {target.name} "
                "is not one: convert the tokenizer"
            )
        if not target.stop_token_ids():
            raise UserError(
                f"{self._option} needs an end token, which says that a completion is complete, and --target "
                f"{target.name} has none: add eos_token_id to its generation_config.json"
            )
        if self._of_all_rows is not None:
            self.grammar = self._compiled(*self._of_all_rows)

    @property
    def _option(self) -> str:
        if self._column == OF_CALLS:
            return "a constraint"
        return f"--{self._of_all_rows[0] if self._of_all_rows else 'constraint_column'}"

    def _compiled(self, name: str, value: Any) -> str:
        shown = f"--{name} {value}"
        if name in FILES:
            try:
                value = Path(value).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{shown} cannot be read: {error}") from error
        try:
            return self._compiling.grammar(Constraint(name, value))
        except ConstraintError as error:
            raise UserError(f"{shown} cannot be used: {error}") from error

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The constraints in the manifest; nothing in a run without them."""
        found = {
            "constraint": self.grammar or None,
            "constraint_column": self._column,
            "max_thinking_tokens": self._max_thinking_tokens,
            "split_thinking": None if self._markers is None else True,
            "end_of_thinking": None if self._markers is None else list(self._markers.end_ids),
        }
        return {name: value for name, value in found.items() if value is not None}

    def check_column(self, prompts: Prompts) -> None:
        """Raises :class:`UserError` if the rows do not have it."""
        if self._column is not None:
            prompts.check_column("--constraint_column", self._column)

    @property
    def markers(self) -> ThinkingMarkers | None:
        """The markers of a run that tells the thinking from the answer."""
        return self._markers

    @property
    def of_all_rows(self) -> dict[str, Any]:
        """The rule of a row without one of its own, as the argument of a
        :class:`specdist.engine.request.Request`."""
        return {"constraint": RowRule(self.grammar, self._max_thinking_tokens).text}

    def of_row(self, prompts: Prompts, row: int) -> dict[str, Any]:
        """The row's constraint, as :attr:`of_all_rows`. Raises :class:`RowError` for a row's own that cannot
        be used."""
        value = None if self._column is None else prompts.value(self._column, row)
        return self.of_all_rows if value is None else self.given(f"{self._column}", value)

    def given(self, name: str, value: object) -> dict[str, Any]:
        """A constraint as rows have it, from the place of this name. Raises as :meth:`of_row` does."""
        try:
            grammar = self._compiling.grammar(Constraint.parse(value))
        except ConstraintError as error:
            raise RowError(f"{name} cannot be used: {error}") from error
        return {"constraint": RowRule(grammar, self._max_thinking_tokens).text}

    def new_masker(self, vocab_size: int) -> Callable[[], RowMasker] | None:
        """Gives the masker of this process, which both sides share if both are here: the target finds masks
        that the draft has asked for. None in a run without constraints."""
        return partial(self._masker_of_process, vocab_size) if self._is_constrained else None

    def _masker_of_process(self, vocab_size: int) -> RowMasker:
        if self._masker is not None:
            return self._masker
        numbers: dict[str, Any] = {
            "vocab_size": vocab_size,
            "stop_token_ids": self._target.stop_token_ids(),
        }
        grammars = grammars_of(load_tokenizer(self._target), **numbers) if self._has_grammars else None
        self._masker = RowMasker(grammars, markers=self._markers, **numbers)
        return self._masker


def thinking_markers(target: Checkpoint, end_of_thinking: str | None, option: str) -> ThinkingMarkers:
    """The markers in the target's tokens. Raises :class:`UserError`, which names the ``option``, if it has
    none."""
    tokenizer = load_tokenizer(target)
    vocabulary = tokenizer.get_vocab()
    text = end_of_thinking or next((end for end in THINKING if end in vocabulary), None)
    if text is None:
        raise UserError(
            f"--{option} needs the text that ends the thinking, and the tokenizer of --target "
            f"{target.name} has no token {' or '.join(THINKING)}: name it with --end_of_thinking"
        )

    def ids_of(marker: str) -> tuple[int, ...]:
        known = vocabulary.get(marker)
        return tuple(ids_within(tokenizer, marker)) if known is None else (known,)

    return ThinkingMarkers(ids_of(THINKING.get(text, "")), ids_of(text))
