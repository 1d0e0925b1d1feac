"""Twenty combinations of options, drawn by a seed: of a run, of some of its rows besides, and a grammar."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from specdist.engine.request import Request
from specdist.sampling.constraints.constraint import Constraint
from specdist.sampling.constraints.masker import RowRule
from specdist.sampling.distributions import SamplingSettings
from specdist.sampling.processing.row_table import Processing, TokenOptions
from tests.sampling.constraints.letters import END

NUM_COMBINATIONS = 20
# Of an end that comes late, and with tokens that are forced on the way.
GRAMMARS = ["((ab|d)c?){3,9}", "[abcd]{6,30}", "(ddd[abc]|ab|[bc]d){2,9}a"]


@dataclass(frozen=True)
class Combination:
    """``grammar``: a regular expression, or none; ``of_rows``: options of every third sample."""

    processing: Processing
    of_rows: TokenOptions
    grammar: str | None

    def settings(self, *, is_coupled: bool = False) -> SamplingSettings:
        temperature = self.processing.defaults.temperature
        return SamplingSettings(temperature=temperature, is_coupled=is_coupled, processing=self.processing)

    def requests(self, requests: list[Request]) -> list[Request]:
        rule = "" if self.grammar is None else RowRule(Constraint("regex", self.grammar).grammar).text
        return [
            replace(each, options=self.of_rows if each.sample_index % 3 == 2 else None, constraint=rule)
            for each in requests
        ]


def combination(seed: int) -> Combination:
    """Each option is in about half of them."""
    rng = random.Random(seed)

    def options() -> TokenOptions:
        values = {
            "temperature": rng.uniform(0.6, 1.5),
            "top_k": rng.randint(3, 6),
            "top_p": rng.uniform(0.7, 0.98),
            "min_p": rng.uniform(0.01, 0.1),
            "repetition_penalty": rng.choice([0.7, 1.3, 1.8]),
            "presence_penalty": rng.uniform(-0.5, 0.8),
            "frequency_penalty": rng.uniform(-0.3, 0.6),
        }
        return TokenOptions(**{name: value for name, value in values.items() if rng.random() < 0.5})  # type: ignore[arg-type]

    grammar = rng.choice([None, *GRAMMARS])
    words: dict[str, object] = {"logit_bias": ((rng.randint(1, 6), rng.uniform(-2, 2)),)}
    if grammar is None:
        # With a grammar they could leave no token.
        first, second, third = rng.sample(range(1, 7), 3)
        words |= {
            "bad_words": ((first, second), (second, second, third)),
            "min_new_tokens": rng.randint(2, 9),
        }
        words |= {"suppressed_ids": (third,)}
    chosen = {name: value for name, value in words.items() if rng.random() < 0.5}
    processing = Processing(
        defaults=options(),
        end_ids=(END,),
        has_masks=grammar is not None,
        **chosen,  # type: ignore[arg-type]
    )
    return Combination(processing, options(), grammar)
