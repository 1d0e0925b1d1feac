"""A case of the random runs: everything that decides a run of the engine, as plain values.

The defaults are the plainest run that there is: one row of a Markov pair, greedy, a block at a time, with
room for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Tokens of the Markov pair are letters, and pairs of letters; that of an end is the first.
MARKOV = ("markov", "repetitive")
# Policies that read a trained head.
HEADS = ("specdecpp", "sprinter")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt and its options.

    ``options``: fields of :class:`specdist.sampling.processing.row_table.TokenOptions`; ``regex``: its
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
