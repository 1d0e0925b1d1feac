"""Options that shape distributions beyond temperature, top-k and top-p, for the run and for single rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specdist.config.arguments import option
from specdist.utils.errors import UserError

# What a number must be, and how the rule is said; of the run's options and of the rows' own.
RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: 0 <= value < math.inf, "must be 0 (greedy) or a number above"),
    "top_k": (lambda value: value >= 0, "must not be negative; 0 keeps every token"),
    "top_p": (lambda value: 0 < value <= 1, "must be in (0, 1]; 1 keeps every token"),
    "min_p": (lambda value: 0 <= value < 1, "must be in [0, 1); 0 keeps every token"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "must be a number above 0; 1 penalises none"),
    "presence_penalty": (math.isfinite, "must be a finite number; 0 penalises none"),
    "frequency_penalty": (math.isfinite, "must be a finite number; 0 penalises none"),
    "seed": (lambda value: 0 <= value < 2**63, "must be in [0, 2**63)"),
    "max_new_tokens": (lambda value: value >= 1, "must be at least 1"),
    "num_samples": (lambda value: value >= 1, "must be at least 1"),
    "min_new_tokens": (lambda value: value >= 0, "must not be negative; 0 sets no least length"),
}
WHOLE_NUMBERS = frozenset({"top_k", "seed", "max_new_tokens", "min_new_tokens", "num_samples"})
# Of one text these would take every character.
TEXT_LISTS = ("logit_bias", "bad_words")
# Of these every position of a pass has numbers of its own.
DISTRIBUTION_OPTIONS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
# A struct column of any of the others.
STRUCT = "options"
ROW_OPTIONS = (*DISTRIBUTION_OPTIONS, "seed", "max_new_tokens", "stop", "num_samples")


@dataclass(kw_only=True)
class ProcessingOptions:
    """What happens to logits before temperature, top-k and top-p, alike for target and draft."""

    _argument_group_name = "Logits processing"

    min_p: float = option(
        0.0, help="leave out tokens with less than this part of the likeliest token's probability; 0 = none"
    )
    repetition_penalty: float = option(
        1.0, help="divide positive logits of tokens in prompt or completion by it, multiply negative ones"
    )
    presence_penalty: float = option(
        0.0, help="subtract it from the logits of tokens that the completion has (as OpenAI and vLLM)"
    )
    frequency_penalty: float = option(
        0.0, help="subtract it from them once for every time that the completion has the token"
    )
    logit_bias: list[str] | None = option(
        None, help="TOKEN_ID=NUMBER pairs: numbers to add to the logits of tokens", action="extend"
    )
    bad_words: list[str] | None = option(
        None, help="texts whose tokens must not follow one another, with or without a space before",
        action="extend",
    )  # fmt: skip
    suppress_tokens: list[int] | None = option(
        None, help="ids of tokens that are never drawn", action="extend"
    )
    min_new_tokens: int = option(
        0, help="fewest tokens of a completion: before them none of the target's end tokens is drawn"
    )

    @property
    def biases(self) -> dict[int, float]:
        """``logit_bias`` by token id, from Python also a mapping. Raises :class:`UserError`."""
        found: dict[int, float] = {}
        given: Any = self.logit_bias or []
        if isinstance(given, Mapping):
            given = [f"{token_id}={number}" for token_id, number in given.items()]
        for pair in given:
            token_id, _, number = pair.partition("=")
            try:
                found[int(token_id)] = float(number)
            except ValueError:
                number = "nan"
            if not math.isfinite(float(number)) or int(token_id) < 0:
                raise UserError(
                    f"--logit_bias {pair} is not a token id and a finite number: write it like 198=-2.5"
                )
        return found

    def check_processing(self) -> None:
        """Raises :class:`UserError` for a value out of its range."""
        for name in TEXT_LISTS:
            value = getattr(self, name)
            if isinstance(value, str):
                raise UserError(f"{name} is a list of texts, not the text {value!r}: write [{value!r}]")
        for name, (holds, rule) in RULES.items():
            value = getattr(self, name)
            if not holds(value):
                raise UserError(f"--{name} {value!r} {rule}")
        _ = self.biases
        if not all(word.strip() for word in self.bad_words or []):
            raise UserError("--bad_words must not contain an empty text; leave the option out instead")
        if min(self.suppress_tokens or [0]) < 0:
            raise UserError(f"--suppress_tokens {min(self.suppress_tokens or [])} is not a token id")

    @property
    def processes_logits(self) -> bool:
        """Whether any of these options changes a logit."""
        neutral = ProcessingOptions()
        return any(getattr(self, name) != value for name, value in vars(neutral).items())


@dataclass(kw_only=True)
class LogprobOptions:
    """What is written of the target's distributions."""

    _argument_group_name = "Log-probabilities"

    logprobs: int | None = option(
        None,
        help="write the target's log-probability of every emitted token, before and after processing, and "
        "those of this many likeliest tokens",
    )

    prompt_logprobs: int | None = option(
        None,
        help="write the prompts' token ids, the target's log-probability of each after those before it, and "
        "those of this many likeliest tokens in its place; prompts then share no pages of the cache",
    )

    def check_logprobs(self, *, is_exact: bool) -> None:
        """Raises :class:`UserError`."""
        if self.prompt_logprobs is not None and self.prompt_logprobs < 0:
            raise UserError(
                f"--prompt_logprobs {self.prompt_logprobs} must not be negative; 0 = of the prompts' tokens "
                "alone"
            )
        if self.logprobs is None:
            return
        if self.logprobs < 0:
            raise UserError(f"--logprobs {self.logprobs} must not be negative; 0 = of emitted tokens alone")
        if not is_exact:
            raise UserError(
                f"--logprobs {self.logprobs} needs the target's distribution at every token, which a lossy "
                "run does not compute: leave it out, or use --verify all"
            )


@dataclass(kw_only=True)
class RowOptions:
    """Which columns of the input are options of single rows."""

    _argument_group_name = "Options of single rows"

    row_options: list[str] | None = option(
        None,
        help="columns whose values are a row's own options, where they are not null, instead of the run's: "
        f"{', '.join(ROW_OPTIONS)}; or {STRUCT}, a struct of any of these",
        action="extend",
    )

    def check_row_options(self) -> None:
        """Raises :class:`UserError` for a column that is not an option."""
        self.row_options = list(dict.fromkeys(self.row_options or []))
        for name in self.row_options:
            if name not in (*ROW_OPTIONS, STRUCT):
                raise UserError(
                    f"--row_options {name} is not an option that a row can have: use "
                    f"{', '.join(ROW_OPTIONS)}, or {STRUCT}"
                )

    def may_vary(self, *names: str) -> bool:
        """Whether any of these options may be a row's own."""
        return any(name in (self.row_options or []) for name in (*names, STRUCT))
