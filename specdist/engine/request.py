"""A request, its sequence while it runs, and the completion that it becomes. No tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from specdist.data.stats.traces import TracedToken
from specdist.sampling.processing.row_table import TokenOptions

FinishReason = Literal["stop", "length", "repetition", "error"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to generate: of the data set's row ``row_id``, the sample ``sample_index``.

    ``prompt``: the text that its tokens are of. ``shard``: whose statistics its work belongs to.
    ``max_new_tokens``, ``seed``, ``stop``, ``stop_repeats``, and ``options`` where logits are processed: this
    request's own; None: the run's. ``constraint``: what a
    :class:`specdist.sampling.processing.processors.TokenMasker` is told of it. ``earlier``: completions of
    the turns before it, of a conversation; ``attempt``: how often the row was rejected before.
    """

    row_id: int
    sample_index: int
    prompt_ids: list[int]
    prompt: str = ""
    shard: int = 0
    max_new_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    stop_repeats: int | None = None
    options: TokenOptions | None = None
    constraint: str = ""
    earlier: tuple[Completion, ...] = ()
    attempt: int = 0


# None: nothing is to begin now, which may have changed when asked again.
Requests = Iterator[Request | None]


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of every token of a completion: see :class:`specdist.sampling.logprobs.Logprobs`."""

    raw: list[float]
    processed: list[float]
    top_ids: list[list[int]]
    top_raw: list[list[float]]


@dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of every token of a prompt, as far as the target's own distribution goes; None of the
    first."""

    raw: list[float | None]
    top_ids: list[list[int] | None]
    top_raw: list[list[float] | None]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request.

    ``token_ids`` ends with the stop token, if one ended it; ``text`` does not contain it. ``error``: why it
    could not be finished; its tokens are then those generated before the error.
    """

    request: Request
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    trace: tuple[TracedToken, ...] = ()
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None


class Counters(NamedTuple):
    """A sequence's totals. ``num_drafts`` counts target passes with candidates, ``num_misses`` how often what
    was drafted has been dropped for another next token."""

    num_misses: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0


NOTHING_COUNTED = Counters()


class _BlockStart(NamedTuple):
    """The state to which a preemption goes back: after the next token, before the block's candidates."""

    length: int
    num_candidates: int
    counters: Counters
    num_traced: int


@dataclass(eq=False)
class Sequence:
    """The state of a running request.

    ``token_ids`` holds prompt and committed tokens. A round first appends the *next token* (the recovered or
    bonus token of the last pass), then the accepted ones of the candidates after it.

    Attributes:
        order: admission order; the youngest is preempted first.
        slot: its place in the batch and in the page table, while it runs.
        num_shared: leading tokens whose pages it shared when it was admitted.
        num_prefilled, context_length: how much of its context (the prompt, or everything committed before a
            preemption) has been run.
        runs_whole_prompt: its prompt is to be scored, and is not yet: it shares no pages.
        num_reserved: tokens that its pages have room for.
        num_candidates, num_accepted: of the last pass, whose next token is still to be sampled.
        forced_next_token, num_redraft: of a preempted sequence, the next token, which was sampled already,
            and how many candidates followed it.
        error: why it cannot be finished; has_nonfinite_logits: the target's logits were not finite.
        loops_from: how many tokens there are, at least, where it first ends in a loop.
        num_blocks: blocks so far; trace: their drafted tokens, if the run is traced.
    """

    request: Request
    order: int
    stream_key: int
    max_length: int
    token_ids: list[int]
    counters: Counters = NOTHING_COUNTED
    slot: int = -1
    num_shared: int = 0
    runs_whole_prompt: bool = False
    num_prefilled: int = 0
    num_reserved: int = 0
    context_length: int = 0
    num_candidates: int = 0
    num_accepted: int = 0
    forced_next_token: int | None = None
    num_redraft: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    has_nonfinite_logits: bool = False
    text: str = ""
    loops_from: int = 0
    num_blocks: int = 0
    trace: list[TracedToken] = field(default_factory=list)
    # A preempted sequence repeats its block exactly: its random numbers depend on position and misses alone.
    _block_start: _BlockStart | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_prefilled < self.context_length

    def admit(self, slot: int, num_shared: int) -> None:
        """Start in ``slot``, with the first ``num_shared`` tokens already in shared pages."""
        self.slot = slot
        self.num_shared = self.num_prefilled = num_shared
        self.num_reserved = 0
        self.context_length = len(self.token_ids)

    def begin_block(self, next_token_id: int, num_candidates: int, *, missed: bool) -> None:
        """Commit the next token; a preemption goes back to here. ``missed``: drafted tokens were dropped."""
        self.forced_next_token = None
        self.num_redraft = 0
        self.num_candidates = num_candidates
        self.token_ids.append(next_token_id)
        # Others' keys and values would be overwritten, which nothing else would notice.
        assert len(self.token_ids) + num_candidates <= self.num_reserved, "a block is longer than its pages"
        if missed:
            self.counters = self.counters._replace(num_misses=self.counters.num_misses + 1)
        self.num_blocks += 1
        self._block_start = _BlockStart(len(self.token_ids), num_candidates, self.counters, len(self.trace))

    def drop_candidates(self, num_draft_tokens: int) -> None:
        """The next token ended the sequence: the candidates after it are discarded, but count as drafted."""
        num_draft_tokens += self.counters.num_draft_tokens
        self.counters = self.counters._replace(num_draft_tokens=num_draft_tokens)

    def end_block(self, accepted_ids: list[int], num_draft_tokens: int) -> None:
        """Commit the accepted candidates of a verified block."""
        self.token_ids += accepted_ids
        self.num_accepted = len(accepted_ids)
        num_misses, num_drafts, num_drafted, num_accepted = self.counters
        self.counters = Counters(
            num_misses,
            num_drafts + (num_draft_tokens > 0),
            num_drafted + num_draft_tokens,
            num_accepted + len(accepted_ids),
        )

    def rewind(self, *, keeps_block: bool = False) -> None:
        """Give up the slot: forget the current block, and that any token has been run. ``keeps_block``: only
        the latter."""
        start = None if keeps_block else self._block_start
        if start is not None:
            del self.token_ids[start.length :], self.trace[start.num_traced :]
            self.num_redraft, self.counters = start.num_candidates, start.counters
            self.num_blocks -= 1
            self.forced_next_token = self.token_ids.pop()
        self._block_start = None
        self.loops_from = 0
        self.slot = -1
        self.num_candidates = self.num_accepted = self.num_prefilled = self.context_length = 0

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            request=self.request,
            token_ids=self.token_ids[self.num_prompt_tokens :],
            text=self.text,
            finish_reason=self.finish_reason,
            num_spec_steps=self.counters.num_drafts,
            num_draft_tokens=self.counters.num_draft_tokens,
            num_accepted_draft_tokens=self.counters.num_accepted,
            trace=tuple(self.trace),
            error=self.error,
        )
