"""One completion on its way: what was asked, what has been committed, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from specdist.data.traces import TracedToken

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to generate. ``shard`` says whose statistics its work belongs to.

    ``max_new_tokens`` is this request's own limit; None stands for the scheduler's.
    """

    row_id: int
    sample_index: int
    prompt_ids: list[int]
    shard: int = 0
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request. ``token_ids`` ends with the stop token, if one ended it; ``text`` is without it.
    ``error``: why it could not be finished; then it has no text, and its tokens are a beginning."""

    request: Request
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    trace: tuple[TracedToken, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Counters:
    """What the row has cost. Drafts are target passes with candidates; misses are dropped chains of them."""

    num_misses: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0

    def after_step(self, *, num_draft_tokens: int, num_accepted: int) -> Counters:
        return Counters(
            self.num_misses,
            self.num_drafts + (num_draft_tokens > 0),
            self.num_draft_tokens + num_draft_tokens,
            self.num_accepted + num_accepted,
        )


@dataclass(eq=False)
class Sequence:
    """The state of a running request.

    ``token_ids`` holds prompt and committed tokens. A round first appends the *decision* (the recovered or
    bonus token of the last pass), then has the candidates after it verified; those accepted are appended.

    Attributes:
        order: admission order; the youngest is preempted first.
        slot: its row of the page table while it runs.
        num_shared: leading tokens that it found in shared pages when it was admitted.
        num_prefilled, context_length: how much of its context (the prompt, or what had been committed before
            a preemption) the models have seen.
        num_candidates, num_accepted: of the last pass, whose next token is still to be drawn.
        forced_next_token, num_redraft: the next token of a preempted sequence, which was drawn before, and
            how many candidates it had then.
        error: why it cannot be finished; has_nonfinite_logits: because the target's logits were not finite.
        num_blocks: blocks so far; trace: their drafted tokens, where the run is traced.
    """

    request: Request
    order: int
    stream_key: int
    max_length: int
    token_ids: list[int]
    counters: Counters = Counters()
    slot: int = -1
    num_shared: int = 0
    num_prefilled: int = 0
    context_length: int = 0
    num_candidates: int = 0
    num_accepted: int = 0
    forced_next_token: int | None = None
    num_redraft: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    has_nonfinite_logits: bool = False
    text: str = ""
    num_blocks: int = 0
    trace: list[TracedToken] = field(default_factory=list)
    # Where the current block began. A preempted sequence goes back there and repeats the block exactly,
    # because its random numbers depend on position and misses alone.
    _block: tuple[int, int, Counters, int] | None = None

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
        self.context_length = len(self.token_ids)

    @property
    def is_resumed(self) -> bool:
        """It has been preempted, and its next token is known."""
        return self.forced_next_token is not None

    def begin_block(self, decision: int, num_candidates: int, *, missed: bool) -> None:
        """Commit the next token; a preemption goes back to here. ``missed``: a chain was dropped for it."""
        self.forced_next_token = None
        self.num_redraft = 0
        self.num_candidates = num_candidates
        self.token_ids.append(decision)
        self.counters = replace(self.counters, num_misses=self.counters.num_misses + missed)
        self.num_blocks += 1
        self._block = (len(self.token_ids), num_candidates, self.counters, len(self.trace))

    def drop_candidates(self, num_draft_tokens: int) -> None:
        """The decision ended the sequence: what was drafted after it is discarded, but was drafted."""
        self.counters = replace(
            self.counters, num_draft_tokens=self.counters.num_draft_tokens + num_draft_tokens
        )

    def end_block(self, accepted_ids: list[int], num_draft_tokens: int) -> None:
        """Commit the accepted candidates of a verified block."""
        self.token_ids += accepted_ids
        self.num_accepted = len(accepted_ids)
        self.counters = self.counters.after_step(
            num_draft_tokens=num_draft_tokens, num_accepted=len(accepted_ids)
        )

    def rewind(self) -> None:
        """Give up the slot: forget the current block and what the models have seen."""
        if self._block is not None:
            length, self.num_redraft, self.counters, num_traced = self._block
            del self.token_ids[length:], self.trace[num_traced:]
            self.num_blocks -= 1
            self.forced_next_token = self.token_ids.pop()
        self._block = None
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
