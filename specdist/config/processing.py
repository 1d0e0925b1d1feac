"""Options that shape distributions beyond temperature, top-k and top-p, for the run and for single rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from specdist.config.arguments import option
from specdist.utils.errors import UserError
from specdist.utils.rules import Refusals, Rule, within

FINITE = Rule(math.isfinite, "must be a finite number; 0 penalises none")
# Given one text, these would take every character.
TEXT_LISTS = ("logit_bias", "bad_words")
# Every position of a pass has numbers of its own of these.
DISTRIBUTION_OPTIONS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
# A struct column of any of the others.
STRUCT = "options"
ROW_OPTIONS = (*DISTRIBUTION_OPTIONS, "seed", "max_new_tokens", "stop", "stop_repeats", "num_samples")


@dataclass(kw_only=True)
class ProcessingOptions:
    """What happens to logits before temperature, top-k and top-p, alike for target and draft."""

    _argument_group_name = "Logits processing"

    min_p: float = option(
        0.0, at_least=0, below=1, note="0 keeps every token",
        help="leave out tokens with less than this part of the likeliest token's probability; 0 = none",
    )  # fmt: skip
    repetition_penalty: float = option(
        1.0, rule=within(above=0, below=math.inf, text="must be a number above 0; 1 penalises none"),
        help="divide positive logits of tokens in prompt or completion by it, multiply negative ones",
    )  # fmt: skip
    presence_penalty: float = option(
        0.0, rule=FINITE,
        help="subtract it from the logits of tokens that the completion has (as OpenAI and vLLM)",
    )  # fmt: skip
    frequency_penalty: float = option(
        0.0, rule=FINITE, help="subtract it from them once for every time that the completion has the token"
    )
    logit_bias: list[str] | None = option(
        None, action="extend", help="TOKEN_ID=NUMBER pairs: numbers to add to the logits of tokens"
    )
    bad_words: list[str] | None = option(
        None,
        rule=Rule(lambda word: bool(word.strip()), "must not be an empty text; leave the option out instead"),
        action="extend",
        help="texts whose tokens must not follow one another, with or without a space before",
    )  # fmt: skip
    suppress_tokens: list[int] | None = option(
        None, rule=Rule(lambda token_id: token_id >= 0, "is not a token id"), action="extend",
        help="ids of tokens that are never drawn",
    )  # fmt: skip
    min_new_tokens: int = option(
        0, at_least=0, note="0 sets no least length",
        help="fewest tokens of a completion: before them none of the target's end tokens is drawn",
    )  # fmt: skip

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

    def check_lists(self) -> None:
        """Raises :class:`UserError` for one text in place of a list, and for what is not a bias."""
        for name in TEXT_LISTS:
            value = getattr(self, name)
            if isinstance(value, str):
                raise UserError(f"{name} is a list of texts, not the text {value!r}: write [{value!r}]")
        _ = self.biases

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
        None, at_least=0, note="0 = of emitted tokens alone",
        help="write the target's log-probability of every emitted token, before and after processing, and "
        "those of this many likeliest tokens",
    )  # fmt: skip
    prompt_logprobs: int | None = option(
        None, at_least=0, note="0 = of the prompts' tokens alone",
        help="write the prompts' token ids, the target's log-probability of each after those before it, and "
        "those of this many likeliest tokens in its place; prompts then share no pages of the cache",
    )  # fmt: skip

    _refusals: ClassVar[Refusals] = (
        ("logprobs", lambda o: not o.is_exact,
         "needs the target's distribution at every token, which a lossy run does not compute: leave it "
         "out, or use --verify all"),
    )  # fmt: skip


@dataclass(kw_only=True)
class RowOptions:
    """Which columns of the input are options of single rows."""

    _argument_group_name = "Options of single rows"

    row_options: list[str] | None = option(
        None,
        help="columns whose values are a row's own options, where they are not null, instead of the run's: "
        f"{', '.join(ROW_OPTIONS)}; or {STRUCT}, a struct of any of these",
        rule=Rule(
            lambda name: name in (*ROW_OPTIONS, STRUCT),
            f"is not an option that a row can have: use {', '.join(ROW_OPTIONS)}, or {STRUCT}",
        ),
        action="extend",
    )

    def may_vary(self, *names: str) -> bool:
        """Whether any of these options may be a row's own."""
        return any(name in (self.row_options or []) for name in (*names, STRUCT))
