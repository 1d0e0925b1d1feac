"""Rows whose completions a function of the user judges (``--rollout``): turns, attempts, and what was noted.

A row's sample goes from its first request through turns and attempts to its result, whose random numbers
depend on (seed, row, sample, attempt, turn) alone. Every completion and every answer of the function is noted
in the shard's log before it counts, so that a replica that goes on takes the same steps again from the notes:
nothing is generated or asked twice but what was under way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from specdist.config.generate import GenerateConfig
from specdist.data.formats.batches import Chat
from specdist.data.formats.prompts import RowError
from specdist.data.run.parts import PartLog
from specdist.data.stats.rows import RowResult
from specdist.engine.request import Completion, Request
from specdist.job.rollouts.pool import RolloutPool
from specdist.job.rows.row_requests import RowRequests
from specdist.job.rows.row_results import error_result, result_of, with_turns
from specdist.rollout import Answer

# Of a completion, what a note has beside the answer to it.
NOTED = (
    "token_ids", "text", "finish_reason", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens",
)  # fmt: skip
# Calls that may wait for a process before no more rows begin: else a slow function would let one replica
# begin all rows of the run.
MOST_WAITING = 512


@dataclass(eq=False)
class Chain:
    """A row's sample on its way to a completion that the function accepts.

    Attributes:
        row: what the function is told of it.
        prompt: the messages before the first completion.
        first: the request of the first turn of the first attempt.
        notes: of an earlier process, by attempt and turn: the completion, and the answer to it.
        request: of the turn that runs or is judged; done: the completions of this attempt; messages: they and
            what came before and between.
    """

    row: dict[str, Any]
    prompt: list[dict[str, Any]]
    first: Request
    notes: Mapping[tuple[int, int], dict[str, Any]]
    request: Request = field(init=False)
    done: tuple[Completion, ...] = ()
    messages: list[dict[str, Any]] = field(default_factory=list)
    num_rejected_tokens: int = 0

    def begin_attempt(self, attempt: int) -> Request:
        self.done, self.messages = (), list(self.prompt)
        return replace(self.first, attempt=attempt)


class Judged(NamedTuple):
    """The function's answer to the last completion of a chain, and the seconds that it took."""

    chain: Chain
    answer: Answer
    seconds: float

    @property
    def request(self) -> Request:
        return self.chain.request


class RolloutRows(RowRequests):
    """The requests of a run with a function; ``options``: as of :class:`RowRequests`."""

    def __init__(self, pool: RolloutPool, *, max_attempts: int, max_turns: int, **options: Any) -> None:
        super().__init__(**options)
        self._pool, self._max_attempts, self._max_turns = pool, max_attempts, max_turns
        self._chains: dict[tuple[int, int], Chain] = {}

    @property
    def num_waiting(self) -> int:
        return self._pool.num_waiting

    @property
    def may_begin(self) -> bool:
        return self.num_waiting < MOST_WAITING

    def close(self) -> None:
        self._pool.close()

    def begin(
        self, row_id: int, samples: Sequence[int], shard: int, log: PartLog | None = None
    ) -> Iterator[Request | RowResult]:
        """Without a log, requests that are not judged."""
        for found in super().begin(row_id, samples, shard):
            if log is None or isinstance(found, RowResult):
                yield found
            elif (following := self._begun(found, log)) is not None:
                yield following

    def _begun(self, request: Request, log: PartLog) -> Request | RowResult | None:
        key = request.row_id, request.sample_index
        notes: dict[tuple[int, int], dict[str, Any]] = {}
        for note in log.notes.get(key, ()):
            notes.setdefault((note["attempt"], note["turn"]), {}).update(note)
        try:
            row = self._prompts.values_of(request.row_id)
        except RowError as error:
            return error_result(*key, request.prompt, error.reason)
        row |= {"row_id": key[0], "sample_index": key[1]}
        prompt = self._prompts.prompt(request.row_id)
        messages = prompt.messages if isinstance(prompt, Chat) else prompt
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        chain = self._chains[key] = Chain(row, messages, request, notes)
        return self._go_on(chain, chain.begin_attempt(0))

    def end(self, completion: Completion, log: PartLog | None = None) -> RowResult | Request | None:
        """None: the function is asked, or the completion is one of an earlier holder of the shard."""
        assert log is not None
        request = completion.request
        chain = self._chains.get((request.row_id, request.sample_index))
        if chain is None or chain.request is not request:
            return None
        if completion.error is not None:
            return self._failed(chain, f"turn {len(request.earlier) + 1}: {completion.error}")
        self._note(chain, log, {"completion": {name: getattr(completion, name) for name in NOTED}})
        self._ask(chain, completion)
        return None

    def answers(self, wait_s: float = 0.0) -> list[Judged]:
        """What the function has answered since; waits so many seconds for the first."""
        found = self._pool.poll(wait_s)
        return [
            Judged(chain, answer, seconds) for chain, answer, seconds in found if isinstance(chain, Chain)
        ]

    def answered(self, judged: Judged, log: PartLog) -> RowResult | Request | None:
        """What follows from an answer; nothing from one to an earlier holder of the shard."""
        chain = judged.chain
        if self._chains.get((chain.first.row_id, chain.first.sample_index)) is not chain:
            return None
        self._note(chain, log, {"answer": judged.answer.to_json()})
        return self._go_on(chain, self._follows(chain, judged.answer))

    def _go_on(self, chain: Chain, found: Request | RowResult) -> Request | RowResult | None:
        """What is found, or what follows from it by the notes."""
        while isinstance(found, Request):
            chain.request = found
            note = chain.notes.get((found.attempt, len(found.earlier)))
            if note is None:
                return found
            completion = Completion(request=found, **note["completion"])
            if "answer" not in note:
                self._ask(chain, completion)
                return None
            self._add(chain, completion)
            found = self._follows(chain, Answer.from_json(note["answer"]))
        return found

    def _note(self, chain: Chain, log: PartLog, content: Mapping[str, Any]) -> None:
        request = chain.request
        place = {"attempt": request.attempt, "turn": len(request.earlier)}
        log.note(request.row_id, request.sample_index, {**place, **content})

    def _add(self, chain: Chain, completion: Completion) -> None:
        chain.done = (*chain.done, completion)
        chain.messages.append(self._answer(completion))

    def _ask(self, chain: Chain, completion: Completion) -> None:
        self._add(chain, completion)
        self._pool.submit(chain, chain.row, chain.messages)

    def _follows(self, chain: Chain, answer: Answer) -> Request | RowResult:
        """The next request, or the row's result."""
        reason = answer.reason
        if answer.kind == "accept":
            return self._accepted(chain, answer)
        if answer.kind == "messages":
            if len(chain.done) < self._max_turns:
                return self._next_turn(chain, answer.messages)
            reason = f"it had no end within --max_turns {self._max_turns}"
        elif answer.kind != "reject":
            said = "the rollout function gave up: " if answer.kind == "give_up" else ""
            return self._failed(chain, f"{said}{reason}")
        attempt = chain.request.attempt + 1
        if attempt == self._max_attempts:
            return self._failed(
                chain, f"none of --max_attempts {attempt} was accepted; of the last: {reason}"
            )
        chain.num_rejected_tokens += _num_tokens(chain)
        return chain.begin_attempt(attempt)

    def _next_turn(self, chain: Chain, messages: list[dict[str, Any]]) -> Request | RowResult:
        if not self._prompts.is_chat:
            return self._failed(
                chain,
                "the rollout function answered with messages, which a plain prompt has no place for: give "
                "chats in --messages_column, or --chat with --prompt_template",
            )
        chain.messages += messages
        try:
            conversation = self._prompts.with_tools(chain.first.row_id, chain.messages)
            rendered = self._encoder.rendered(conversation)
            prompt_ids = self._encoder.token_ids(rendered)
        except RowError as error:
            return self._failed(chain, f"turn {len(chain.done) + 1}: {error.reason}")
        return replace(chain.request, prompt_ids=prompt_ids, prompt=rendered.text, earlier=chain.done)

    def _accepted(self, chain: Chain, answer: Answer) -> RowResult:
        columns = json.dumps(answer.columns, ensure_ascii=False) if answer.columns else None
        result = result_of(chain.done[-1], self._thinking)
        return self._ended(chain, replace(result, rollout_score=answer.score, rollout_columns=columns))

    def _failed(self, chain: Chain, reason: str) -> RowResult:
        chain.num_rejected_tokens += _num_tokens(chain)
        request = chain.request
        return self._ended(chain, error_result(request.row_id, request.sample_index, request.prompt, reason))

    def _ended(self, chain: Chain, result: RowResult) -> RowResult:
        del self._chains[result.row_id, result.sample_index]
        return replace(
            with_turns(result, chain.done),
            rollout_attempts=chain.request.attempt + 1,
            rollout_rejected_tokens=chain.num_rejected_tokens,
            rollout_messages=json.dumps(chain.messages, ensure_ascii=False),
        )


def rollout_rows(config: GenerateConfig, options: Mapping[str, Any]) -> RolloutRows | None:
    """The requests of a run with a function; None without one. ``options``: of :class:`RowRequests`."""
    if config.rollout is None:
        return None
    pool = RolloutPool(
        config.rollout, num_workers=config.num_rollout_workers, timeout_s=config.rollout_timeout
    )
    return RolloutRows(pool, max_attempts=config.max_attempts, max_turns=config.max_turns, **options)


def _num_tokens(chain: Chain) -> int:
    return sum(len(turn.token_ids) for turn in chain.done)
