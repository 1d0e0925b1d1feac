"""Speculative generation from Python, on one device and without a run folder.

    from specdist import SamplingOptions, SpeculativeLLM

    llm = SpeculativeLLM(target="runs/demo/pair/target", draft="runs/demo/pair/draft")
    for result in llm.generate(["The capital of France is"], SamplingOptions(max_new_tokens=32)):
        print(result.completion)

It runs the job's :class:`specdist.job.replica.replica.Replica` with one rank, so that the same prompts,
options and seed give the tokens of ``jobs/generate.py``, where a seed fixes them: see
:data:`specdist.config.seeds.WHEN_TOKENS`. For several ranks, large data sets and restarts use the job.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import logging
import reprlib
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from os import PathLike
from typing import Any, Literal, TypeAlias, overload

import torch
from tqdm.auto import tqdm

from specdist.config.calls import SamplingOptions, check_constructor, check_types, plain_values
from specdist.config.constraints import OF_ALL_ROWS, OF_CALLS
from specdist.config.generate import GenerateConfig
from specdist.data.formats.prompts import RowError
from specdist.data.stats.shard import Stats
from specdist.engine.request import Completion, FinishReason, PromptLogprobs, Request, TokenLogprobs
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.stopping import StopRules
from specdist.job.models.model_plan import plan_models
from specdist.job.ranks.restart import is_out_of_memory
from specdist.job.ranks.topology import Topology, local_device
from specdist.job.replica.plan import ReplicaPlan
from specdist.job.replica.replica import build_replica
from specdist.job.rows.call_prompts import Prompt, call_warnings, listed_prompts, prompt_ids
from specdist.job.rows.row_requests import prompt_encoder
from specdist.job.run.workload import Workload
from specdist.job.texts.constraints import RunConstraints
from specdist.job.texts.tokens import load_tokenizer
from specdist.models.files.generation import default_options, unused_settings
from specdist.utils.errors import UserError, short_text

Prompts: TypeAlias = Prompt | Sequence[Prompt]
# One for all prompts, or one for each; None: the model's default.
Sampling: TypeAlias = SamplingOptions | Sequence[SamplingOptions] | None
# For options of the job that are not used here: no files are read or written.
NO_PATH = "(none)"
# Tokens before a measured pass, since the prompts are not known yet.
TYPICAL_CONTEXT_TOKENS = 256
# The text of measured passes, where they depend on it, for the same reason.
TYPICAL_TEXT = (
    "A ferry leaves the harbour at 7:40 every morning, except on Sundays. It carries 120 people and 30 cars, "
    "and a ticket costs $6.50; children under five travel free. How much does a family pay? Let us think "
    "step by step.\n\n```python\ndef total(adults, ages):\n    return 6.5 * (adults + len(ages))"
    "\n```\n\nBecause nobody knew the captain's name, they called him Herr Kapitän, and he smiled."
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GeneratedText:
    """One completion of one prompt.

    Attributes:
        prompt_index, sample_index: index of the prompt, and of the completion among those of the prompt.
        finish_reason: ``stop``, ``length``, ``repetition`` or ``error``.
        completion: without the stop token or string.
        completion_ids: its tokens, including a stop token.
        error: why there is no completion; otherwise None.
        num_spec_steps: target passes with draft tokens of this sequence.
        num_draft_tokens, num_accepted_draft_tokens: drafted candidates, and the accepted ones.
        logprobs: of every token, with ``SamplingOptions(logprobs=N)``; otherwise None.
        prompt_logprobs: of every token of the prompt, with ``SamplingOptions(prompt_logprobs=N)``.
    """

    prompt_index: int
    sample_index: int
    _: KW_ONLY
    finish_reason: FinishReason
    completion: str = ""
    completion_ids: list[int] = field(default_factory=list)
    error: str | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def row_id(self) -> int:
        """``prompt_index``, as the column of a run is called."""
        return self.prompt_index


Results: TypeAlias = Generator[GeneratedText]


class Completions(Iterator[GeneratedText]):
    """The results of :meth:`SpeculativeLLM.generate` with ``as_completed``, as they finish.

    Work goes on only while the next one is asked for. Leaving a loop over them, by ``break`` or an error,
    ends them, as :meth:`close` does: what is not finished is lost, and another call may follow.
    """

    def __init__(self, results: Results) -> None:
        self._results = results

    def __iter__(self) -> Iterator[GeneratedText]:
        # Of the loop alone, so that it ends with the loop, though there may be a name for all of this.
        yield from self._results

    def __next__(self) -> GeneratedText:
        return next(self._results)

    def close(self) -> None:
        """End them."""
        self._results.close()


class SpeculativeLLM:
    """A target and a draft on one device.

    Args:
        target: hub id or folder of the model whose distribution the output follows.
        draft: of the model that proposes tokens; None generates with the target alone.
        policy: how many tokens to draft; by default ``goodput``, which measures what pays.
        options: any other option of ``jobs/generate.py`` that concerns models, speculation, batch or memory,
            by its name there: ``dtype``, ``device``, ``acceptance``, ``num_draft_tokens``, ``max_num_seqs``,
            ``max_seq_len``, ``cache_memory``, ``json_schema``, ``regex``, ...

    Attributes:
        default_sampling: what :meth:`generate` uses when it is called without; with
            ``generation_config="model"`` the settings of the target's generation_config.json.

    Raises :class:`specdist.utils.errors.UserError` (a ValueError) for what the job would refuse.
    """

    def __init__(
        self,
        target: str | PathLike[str],
        draft: str | PathLike[str] | None = None,
        *,
        policy: str | None = None,
        **options: Any,
    ) -> None:
        check_constructor(options)
        policy = policy or ("fixed" if draft is None else "auto")
        self._options = plain_values({"target": target, "draft": draft, "policy": policy, **options})
        check_types(GenerateConfig, self._options)
        config = self._config(SamplingOptions())
        config.check_world(1)
        models = plan_models(config, may_read_states=True)
        self.default_sampling = SamplingOptions()
        if config.generation_config == "model":
            self.default_sampling = SamplingOptions(**default_options(models.target))
            config = self._config(self.default_sampling)
            if (unused := unused_settings(models.target, None)) is not None:
                logger.warning(unused)
        tokenizer = load_tokenizer(models.target)
        # What chat templates that ask for the date are told, in all calls.
        self._now, self._models = config.chat_format.now, models
        topology = Topology(
            rank=0,
            world_size=1,
            tp_size=1,
            uses_draft=config.uses_draft_model,
            device=local_device(config.device),
        )
        work = Workload(
            num_context_tokens=min(TYPICAL_CONTEXT_TOKENS, models.max_seq_len // 2),
            text_ids=tuple(tokenizer(TYPICAL_TEXT)["input_ids"]) if models.has_experts else (),
        )
        self._replica = build_replica(
            ReplicaPlan(config=config, models=models, topology=topology, workload=work)
        )
        self._stats, self._is_closed = Stats(), False
        self._constraints: RunConstraints | None = None
        self._open = weakref.WeakSet[Results]()

    @property
    def statistics(self) -> dict[str, Any]:
        """Statistics of the last call of :meth:`generate`, with the names of a run's ``stats/*.json``."""
        return self._stats.summary()

    @overload
    def generate(
        self, prompts: Prompts, sampling: Sampling = None, *, as_completed: Literal[True], **others: Any
    ) -> Completions: ...
    @overload
    def generate(self, prompts: Prompts, sampling: Sampling = None, **others: Any) -> list[GeneratedText]: ...
    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling = None,
        *,
        as_completed: bool = False,
        use_tqdm: bool = True,
        **others: Any,
    ) -> list[GeneratedText] | Completions:
        """Complete every prompt ``sampling.num_samples`` times, in the order of the prompts.

        Args:
            prompts: texts, lists of token ids, or lists of chat messages (``{"role": ..., "content": ...}``);
                a text alone is one prompt.
            sampling: by default :attr:`default_sampling`, temperature 1 and 256 tokens; to change a part of
                it, ``dataclasses.replace(llm.default_sampling, max_new_tokens=64)``. A list has one for each
                prompt: those with the same options are generated together, after each other.
            as_completed: return an iterator of the same results as they finish (:class:`Completions`), which
                has to end before the next call.
            use_tqdm: show a progress bar.

        A prompt that cannot be used (empty, or too long) has a result with ``finish_reason`` ``error``.
        Raises :class:`UserError` where memory runs out: a smaller ``max_num_seqs`` needs less.
        """
        for name in others:
            raise UserError(
                f"{name} is not an argument of generate(): options are in SamplingOptions, the second"
            )
        items = listed_prompts(prompts)
        if self._is_closed:
            raise UserError("this SpeculativeLLM is closed: make another one")
        if any(inspect.getgeneratorstate(each) != inspect.GEN_CLOSED for each in self._open):
            raise UserError(
                "the results of the last call are not at their end: go through them first, or close() them"
            )
        sampling = self.default_sampling if sampling is None else sampling
        every = list(sampling) if isinstance(sampling, (list, tuple)) else [sampling] * len(items)
        if len(every) != len(items):
            raise UserError(f"{len(every)} SamplingOptions are too few or too many for {len(items)} prompts")
        parts: dict[str, tuple[SamplingOptions, dict[int, Prompt]]] = {}
        for index, (prompt, options) in enumerate(zip(items, every, strict=True)):
            if not isinstance(options, SamplingOptions):
                raise UserError(f"sampling is {options!r}, but must be SamplingOptions, or a list of them")
            parts.setdefault(repr(options), (options, {}))[1][index] = prompt
        # What is wrong with any of them is told before the first is generated.
        groups = [self._group(each, options, use_tqdm) for options, each in parts.values()]
        self._stats, results = Stats(), (result for group in groups for result in group)
        self._open.add(results)
        if as_completed:
            return Completions(results)
        return sorted(results, key=lambda result: (result.prompt_index, result.sample_index))

    def _group(self, items: Mapping[int, Prompt], sampling: SamplingOptions, use_tqdm: bool) -> Results:
        """The results of prompts, by their index, that all have these options, which are checked at once."""
        config = self._config(sampling)
        constraints = self._models.constraints
        rule = constraints.of_all_rows
        if sampling.constraint:
            # What the constraints of all calls need is made once.
            self._constraints = constraints = self._constraints or RunConstraints(config, self._models.target)
            rule = _rule(constraints, sampling.constraint)
        target, stops = self._models.target, tuple(config.stop or ())
        for warning in call_warnings(target, items.values(), stops, config.continue_final_message):
            logger.warning(warning)
        encoder = prompt_encoder(config, self._models, now=self._now)
        stop_rules = StopRules(encoder.detokenizer, target.stop_token_ids(), stops, config.stop_repeats)
        requests, failed = list[Request](), list[GeneratedText]()
        for index, prompt in items.items():
            samples = range(config.num_samples)
            try:
                ids = prompt_ids(prompt, encoder, self._models)
                requests += [Request(row_id=index, sample_index=k, prompt_ids=ids, **rule) for k in samples]
            except RowError as error:
                of_prompt = partial(GeneratedText, index, finish_reason="error", error=str(error))
                failed += map(of_prompt, samples)

        def results() -> Results:
            yield from failed
            self._replica.resample(config, constraints)
            recorder = StatsRecorder()
            engine = self._replica.engine(iter(requests), stop_rules, recorder)
            bar = tqdm(total=len(requests), unit="completion", disable=not use_tqdm)
            try:
                with bar, closing(engine.run()) as completions:
                    for completion in completions:
                        bar.update()
                        yield _result(completion)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise UserError(
                    f"memory ran out ({short_text(error)}): make another SpeculativeLLM with a smaller "
                    "max_num_seqs or max_num_batched_tokens"
                ) from error
            finally:
                self._stats.add(recorder.close_shard(0))

        return results()

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling: Sampling = None,
        *,
        use_tqdm: bool = True,
        **others: Any,
    ) -> list[GeneratedText]:
        """:meth:`generate` the answer to a conversation, or to each of several: lists of messages
        (``{"role": ..., "content": ...}``) for the target's chat template."""
        given: list[Any] = list(messages)
        conversations = [given] if given and isinstance(given[0], Mapping) else given
        for each in conversations:
            is_list = isinstance(each, Sequence) and not isinstance(each, str)
            if not is_list or not all(isinstance(message, Mapping) for message in each):
                raise UserError(f"chat() takes lists of messages, and this is none: {reprlib.repr(each)}")
        return self.generate(conversations, sampling, use_tqdm=use_tqdm, **others)

    def close(self) -> None:
        """Give the memory of the models and of their caches back, and end results that are still to come.
        Leaving a ``with`` block does it, too."""
        self._is_closed = True
        for results in list(self._open):
            results.close()
        self.__dict__.pop("_replica", None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> SpeculativeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _config(self, sampling: SamplingOptions) -> GenerateConfig:
        options = self._options | dataclasses.asdict(sampling)
        for name in OF_ALL_ROWS:
            options[name] = None if sampling.constraint else self._options.get(name)
        column = OF_CALLS if sampling.constraint else None
        return GenerateConfig(prompts=[NO_PATH], output=NO_PATH, constraint_column=column, **options)


def _rule(constraints: RunConstraints, given: dict[str, Any]) -> dict[str, Any]:
    """A call's constraint as those of rows are. Raises :class:`UserError`."""
    try:
        return constraints.given(next(iter(given)), given)
    except RowError as error:
        raise UserError(str(error)) from error


def _result(completion: Completion) -> GeneratedText:
    return GeneratedText(
        prompt_index=completion.request.row_id,
        sample_index=completion.request.sample_index,
        completion=completion.text,
        completion_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        error=completion.error,
        num_prompt_tokens=len(completion.request.prompt_ids),
        num_completion_tokens=len(completion.token_ids),
        num_spec_steps=completion.num_spec_steps,
        num_draft_tokens=completion.num_draft_tokens,
        num_accepted_draft_tokens=completion.num_accepted_draft_tokens,
        logprobs=completion.logprobs,
        prompt_logprobs=completion.prompt_logprobs,
    )
