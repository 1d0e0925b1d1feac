"""A request, and the completion that it becomes. No tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specdist.data.stats.traces import TracedToken
from specdist.sampling.processing.options import TokenOptions

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to generate: of the data set's row ``row_id``, the sample ``sample_index``.

    ``prompt``: the text that its tokens are of. ``shard``: whose statistics its work belongs to.
    ``max_new_tokens``, ``seed``, ``stop``, and ``options`` where logits are processed: this request's own;
    None: the run's. ``constraint``: what a :class:`specdist.sampling.processing.processors.TokenMasker` is
    told of it. ``earlier``: completions of the turns before it, of a conversation.
    """

    row_id: int
    sample_index: int
    prompt_ids: list[int]
    prompt: str = ""
    shard: int = 0
    max_new_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    options: TokenOptions | None = None
    constraint: str = ""
    earlier: tuple[Completion, ...] = ()


# None: nothing is to begin now, which may have changed when asked again.
Requests = Iterator[Request | None]


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Of every token of a completion: see :class:`specdist.sampling.logprobs.Logprobs`."""

    raw: list[float]
    processed: list[float]
    top_ids: list[list[int]]
    top_raw: list[list[float]]


@dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """Of every token of a prompt, as far as the target's own distribution goes; None of the first."""

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
