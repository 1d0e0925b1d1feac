"""A case of the random runs: everything that decides a run of the engine, as plain values.

The defaults are the plainest run that there is: one row of a Markov pair, greedy, a block at a time, with
room for all. A case is written as what differs from them, so a small case is a short line.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Tokens of the Markov pair are letters, and pairs of letters; that of an end is the first.
MARKOV = ("markov", "repetitive")


# Policies that read a trained head.
HEADS = ("specdecpp", "sprinter")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt and its options.

    ``options``: fields of :class:`specdist.sampling.processing.options.TokenOptions`; ``regex``: its
    constraint; the empty string: none.
    """

    prompt: tuple[int, ...] = (1,)
    max_new_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    options: Mapping[str, float] | None = None
    regex: str | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        model: ``markov``, ``repetitive`` (a Markov model whose texts repeat), or a family of transformers.
        draft: ``noisy`` (of the target), ``same``, ``ngram`` or ``none``.
        placement: ``local``: one process; ``threads``: the target's vocabulary in slices, one per thread;
            ``ranks``: real processes.
        tp_size, has_draft_rank: with ranks, how many share the target, and whether the draft has its own.
        difference: of the draft's logits from the target's.
        policy, cap, threshold: its name, the longest block, and where it stops.
        acceptance: ``rejection`` or ``gumbel``; a temperature of 0 is greedy with either.
        num_ahead_tokens, num_branches: with ``--overlap asynchronous``, and the most with ``auto``.
        shapes: of rounds with ``--overlap auto``, one after the other: drafts now, tokens ahead, branches,
            rounds alone; ``has_chooser``: they are chosen by costs.
        default: options of rows without their own.
        spare_pages: of the cache, beyond what the longest row needs.
        room: tokens of a pass, beyond one row's block.
        regex: constraint of rows without their own. ``forced_room``: of tokens that it forces.
    """

    model: str = "markov"
    model_seed: int = 1
    spread: float = 1.0
    difference: float = 2.0
    draft: str = "noisy"
    placement: str = "local"
    tp_size: int = 1
    has_draft_rank: bool = False
    policy: str = "fixed"
    cap: int = 3
    threshold: float = 0.5
    trusts_draft: bool = False
    acceptance: str = "gumbel"
    temperature: float = 0.0
    seed: int = 0
    num_ahead_tokens: int = 0
    num_branches: int = 0
    shapes: tuple[tuple[int, int, int, int], ...] = ()
    has_chooser: bool = False
    rows: tuple[Row, ...] = (Row(),)
    num_samples: int = 1
    default: Mapping[str, float] = field(default_factory=dict)
    max_new_tokens: int = 8
    max_seq_len: int = 64
    max_num_seqs: int = 64
    spare_pages: int = 1000
    room: int = 1000
    eos: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    suppressed_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    regex: str | None = None
    forced_room: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    is_traced: bool = False

    @property
    def is_markov(self) -> bool:
        return self.model in MARKOV

    @property
    def is_rejection(self) -> bool:
        """Tokens are not fixed by the target and the seed alone."""
        return self.acceptance == "rejection" and any(self.temperature_of(row) > 0 for row in self.rows)

    @property
    def has_processing(self) -> bool:
        """Beyond one temperature, top-k and top-p."""
        own = any(row.options is not None or row.regex is not None for row in self.rows)
        words = self.logit_bias or self.bad_words or self.suppressed_ids or self.min_new_tokens
        plain = {"temperature", "top_k", "top_p"}
        return bool(own or words or self.regex is not None or self.default.keys() - plain)

    @property
    def is_valid(self) -> bool:
        """Whether there is such a run: a case that is made smaller may lose what an option of it needs."""
        has_model = self.draft in ("noisy", "same")
        ahead = [self.num_ahead_tokens, *(shape[1] for shape in self.shapes)]
        branches = [self.num_branches, *(shape[2] for shape in self.shapes)]
        vocab_size = 7 if self.is_markov else 96
        needs = [
            (self.shapes or self.has_chooser or self.num_branches, self.num_ahead_tokens > 0),
            (self.num_ahead_tokens, has_model),
            (self.policy != "fixed", has_model),
            (self.trusts_draft, self.draft == "same"),
            (self.regex is not None, self.is_markov and self.eos == (0,)),
            (any(row.regex is not None for row in self.rows), self.regex is not None),
            (self.placement != "local", self.is_markov),
            (self.has_draft_rank, has_model and self.placement == "ranks"),
            (not self.is_markov, not self.is_rejection),
            (True, max(ahead) == ahead[0] <= self.cap + 1 and max(branches) == branches[0]),
        ]
        return (
            all(holds for is_needed, holds in needs if is_needed)
            and bool(self.rows)
            and all(0 < len(row.prompt) < self.max_seq_len for row in self.rows)
            and all(max(row.prompt) < vocab_size for row in self.rows)
        )

    def options_of(self, row: Row) -> dict[str, float]:
        """All that are not the default of :class:`TokenOptions`."""
        default = {"temperature": self.temperature, **self.default}
        return dict(default if row.options is None else row.options)

    def temperature_of(self, row: Row) -> float:
        return self.options_of(row).get("temperature", 1.0)

    def regex_of(self, row: Row) -> str | None:
        return self.regex if row.regex is None else row.regex

    def longest_of(self, row: Row) -> int:
        """Tokens of prompt and completion, at most."""
        limit = self.max_new_tokens if row.max_new_tokens is None else row.max_new_tokens
        return min(len(row.prompt) + limit, self.max_seq_len)

    def line(self) -> str:
        """What differs from the defaults, as JSON: see :func:`from_line`."""
        return json.dumps(_differences(self), separators=(",", ":"))


def from_line(line: str) -> Case:
    """Raises TypeError for a name that is not a field."""
    values = json.loads(line)
    rows = tuple(Row(**_tuples(row)) for row in values.pop("rows", [{}]))
    return Case(rows=rows, **_tuples(values))


def _differences(value: Case | Row) -> dict[str, Any]:
    found = {}
    for each in dataclasses.fields(value):
        own = getattr(value, each.name)
        default = each.default_factory() if callable(each.default_factory) else each.default
        if own != default:
            found[each.name] = [_differences(row) for row in own] if each.name == "rows" else own
    return found


def _tuples(value: Any) -> Any:
    """Lists as tuples, also within; the keys of a dictionary stay."""
    if isinstance(value, dict):
        return {key: _tuples(each) for key, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
