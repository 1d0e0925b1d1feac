"""From input rows to requests, and from their completions to rows of the output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from specdist.config.generate import GenerateConfig
from specdist.data.formats.batches import Chat
from specdist.data.formats.messages import TOOLS
from specdist.data.formats.prompts import Prompts, RowError
from specdist.data.run.parts import PartLog
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.rows import RowResult
from specdist.engine.request import Completion, Request
from specdist.engine.rounds.faults import too_large
from specdist.job.models.model_plan import ModelPlan
from specdist.job.rows.output_columns import ThinkingColumns
from specdist.job.rows.row_options import RowOptionReader
from specdist.job.rows.row_results import error_result, result_of, with_turns
from specdist.job.texts.constraints import RunConstraints
from specdist.job.texts.template_clock import CLOCK, run_clock
from specdist.job.texts.tokens import AFTER_ASSISTANT, PromptEncoder, load_tokenizer
from specdist.job.totals.status import error_kind
from specdist.utils.errors import UserError

# Reasons that are shown where no row can be used.
MAX_KINDS = 3
# Rows that are looked at for what a chat template leaves out: the first, and some spread over all.
NUM_FIRST, NUM_SPREAD = 2**12, 2**5
# Columns of data sets of chats.
CHAT_COLUMNS = (
    "messages", "conversations", "conversation", "system", TOOLS, "functions", "images", "videos", "audios",
    "chosen", "rejected",
)  # fmt: skip


def prompt_encoder(
    config: GenerateConfig, models: ModelPlan, folder: RunFolder | None = None, now: datetime | None = None
) -> PromptEncoder:
    """The encoder of prompts with these options, ``now`` or, of a run in a ``folder``, at the time of its
    start."""
    chat_format = replace(config.chat_format, now=now) if now is not None else config.chat_format
    if folder is not None and CLOCK in folder.manifest.info:
        chat_format = replace(chat_format, now=run_clock(folder))
    return PromptEncoder(
        load_tokenizer(models.target),
        max_prompt_tokens=models.max_seq_len - 1,
        chat_format=chat_format,
        vocab_size=models.vocab_size,
    )


def chat_warnings(config: GenerateConfig, prompts: Prompts, encoder: PromptEncoder) -> list[str]:
    """What is to be known of a run's chats, and of the template that gets them. Raises :class:`UserError` for
    a template that leaves out something of the rows; of a batch, that is the request's own error."""
    spread = range(0, prompts.num_rows, max(1, prompts.num_rows // NUM_SPREAD))
    rows = sorted({*range(min(prompts.num_rows, NUM_FIRST)), *spread})
    after_assistant: list[int] = []
    left_out: dict[str, int] = {}
    is_meant = False
    for row in rows if prompts.is_chat else ():
        try:
            prompt = prompts.prompt(row)
        except RowError:
            continue
        assert not isinstance(prompt, str)
        what, is_meant = encoder.left_out(prompt)
        left_out = dict.fromkeys(what, row) | left_out
        if encoder.begins_after_assistant(prompt):
            after_assistant.append(row)
    own = [prompts.column] if prompts.template is None else prompts.template.columns.values()
    read = {*own, config.constraint_column, *((TOOLS,) if prompts.has_tools else ())}
    unread = [name for name in CHAT_COLUMNS if name in prompts.schema.names and name not in read]
    found = []
    if unread:
        found.append(
            f"columns of --prompts {prompts.files[0]} that look like parts of chats are no part of the "
            f"prompts, which are those of {prompts.column}: {', '.join(unread)}"
        )
    if left_out and (is_meant or prompts.batch is None):
        told = (
            f"the chat template of --target {config.target} leaves out {', '.join(left_out)}, which row "
            f"{min(left_out.values())} of --prompts {prompts.files[0]} has"
        )
        if not is_meant:
            raise UserError(
                f"{told}: take them out of the rows (rename a column), choose another model, or write a "
                "template that shows them into chat_template.jinja in a copy of this one"
            )
        found.append(f"{told}: it shows the end of conversations alone")
    if after_assistant:
        found.append(
            f"{len(after_assistant)} of {len(rows)} rows looked at, such as row {after_assistant[0]}, "
            f"{AFTER_ASSISTANT}"
        )
    return found


def check_any_usable(prompts: Prompts, encoder: PromptEncoder, constraints: RunConstraints) -> None:
    """Raises :class:`UserError` if no row can be used, with the reasons. The rows up to the first that can be
    used are read."""
    rows = RowRequests(prompts, encoder, constraints=constraints)
    firsts: dict[str, tuple[int, str]] = {}
    kinds = Counter[str]()
    for row in range(prompts.num_rows):
        [found] = rows.begin(row, [0], 0)
        if isinstance(found, Request):
            return
        reason = str(found.error)
        kinds[error_kind(reason)] += 1
        firsts.setdefault(error_kind(reason), (row, reason))
    shown = "; ".join(
        f"{count} of {prompts.num_rows}, such as row {firsts[kind][0]}: {firsts[kind][1]}"
        for kind, count in kinds.most_common(MAX_KINDS)
    )
    raise UserError(
        f"no row of --prompts {prompts.files[0]} can be used ({shown}): change the options or the rows"
    )


class RowRequests:
    """The requests of one run."""

    def __init__(
        self,
        prompts: Prompts,
        encoder: PromptEncoder,
        *,
        num_samples: int = 1,
        constraints: RunConstraints | None = None,
        row_options: RowOptionReader | None = None,
        thinking: ThinkingColumns | None = None,
        too_large: Collection[tuple[int, int]] = (),
    ) -> None:
        """
        Args:
            thinking: of a run that writes the thinking and the answer in columns of their own.
            too_large: rows and samples for which memory was not enough.
        """
        self._num_samples = num_samples
        self._prompts = prompts
        self._encoder = encoder
        self._constraints = constraints
        self._row_options = row_options
        self._thinking = thinking
        self._too_large = too_large

    def num_samples(self, row: int) -> int:
        """Completions of a row."""
        own = None if self._row_options is None else self._row_options.num_samples
        return self._num_samples if own is None else own[row]

    def num_completions(self, rows: Iterable[int]) -> int:
        return sum(map(self.num_samples, rows))

    def begin(
        self, row_id: int, samples: Sequence[int], shard: int, log: PartLog | None = None
    ) -> Iterator[Request | RowResult]:
        """A request for each of a row's samples, or the row with its error. ``shard``: see
        :class:`Request`; ``log``: the shard's, for steps on the way to a result."""
        text: str | None = None
        try:
            rendered = self._encoder.rendered(self._prompts.prompt(row_id))
            text = rendered.text
            prompt_ids = self._encoder.token_ids(rendered)
            rule = self._constraints.of_row(self._prompts, row_id) if self._constraints else {}
        except RowError as error:
            yield from (error_result(row_id, sample, text, error.reason) for sample in samples)
            return
        options = rule if self._row_options is None else rule | self._row_options.of(row_id)
        for sample in samples:
            if (row_id, sample) in self._too_large:
                reason = too_large("memory ran out in a replica that was generating it alone")
                yield error_result(row_id, sample, text, reason)
                continue
            yield Request(
                row_id=row_id, sample_index=sample, prompt_ids=prompt_ids, prompt=text, shard=shard, **options
            )

    def end(self, completion: Completion, log: PartLog | None = None) -> RowResult | Request | None:
        """The row that a completion becomes, or the request of the next turn of its conversation; None if
        that is still to be known."""
        result = result_of(completion, self._thinking)
        if not self._prompts.has_turns:
            return result
        earlier, row_id = completion.request.earlier, completion.request.row_id
        number = len(earlier) + 1
        if completion.error is not None:
            return with_turns(replace(result, error=f"turn {number}: {completion.error}"), earlier)
        done = (*earlier, completion)
        if number == self._prompts.num_turns(row_id):
            return with_turns(result, done)
        text: str | None = None
        try:
            rendered = self._encoder.rendered(self._conversation(row_id, done))
            text = rendered.text
            prompt_ids = self._encoder.token_ids(rendered)
        except RowError as error:
            reason = f"turn {number + 1}: {error.reason}"
            return with_turns(error_result(result.row_id, result.sample_index, text, reason), done)
        return replace(completion.request, prompt_ids=prompt_ids, prompt=text, earlier=done)

    def _conversation(self, row_id: int, done: tuple[Completion, ...]) -> list[dict[str, Any]] | Chat:
        """The conversation up to the first turn that has not been answered. Raises :class:`RowError` for one
        that is none."""
        messages: list[dict[str, Any]] = []
        for index, completion in enumerate(done):
            text = self._prompts.turn(row_id, index)
            messages += [{"role": "user", "content": text}, self._answer(completion)]
        messages.append({"role": "user", "content": self._prompts.turn(row_id, len(done))})
        return self._prompts.with_tools(row_id, messages)

    def _answer(self, completion: Completion) -> dict[str, Any]:
        """A completion as a message."""
        answer = {"role": "assistant", "content": completion.text}
        if self._thinking is not None:
            # A template that shows the thinking of earlier turns reads it by this name.
            found = self._thinking.of(completion)
            answer["content"] = found["completion_answer"]
            if found["completion_thinking"] is not None:
                answer["reasoning_content"] = found["completion_thinking"]
        return answer
