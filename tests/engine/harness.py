"""An engine on tiny random models, in this process.

With ``num_ahead_tokens`` the draft works ahead between two requests, as on a rank of its own, and prepares
``num_branches`` of every row. Without a ``policy`` every block has ``num_draft_tokens``. A ``head`` reads the
draft's hidden states; with ``trusts_draft`` only the last token of a block is verified. With ``ngrams`` the
candidates are from a row's own tokens, all of them or those that pay by these costs. With ``is_windowed`` the
target's windowed layers have pages of their own.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import cast

import torch
from transformers import PreTrainedModel

from specdist.data.stats.shard import Stats
from specdist.engine.assembly import Assembly
from specdist.engine.draft.client import Draft, InProcess
from specdist.engine.messages.interfaces import Proposer, Target
from specdist.engine.request import Completion, Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.detokenizer import Detokenizer
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.engine.schedule.stopping import StopRules
from specdist.models.attention.rope import recomputed_from, rope_borders
from specdist.models.cache.key_value import KeyValueCache
from specdist.models.cache.windowed_pages import WindowedLayers, longest_window
from specdist.models.families.adapters import use_paged_attention
from specdist.models.files.checkpoint import keeps_states
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.hidden import HiddenStateHead
from specdist.models.passes.runner import ModelRunner
from specdist.policies import FixedLength, LengthPolicy
from specdist.policies.costs import CostModel, Curve
from specdist.policies.payoff import RoundChooser, RoundShape
from specdist.sampling.distributions import SamplingSettings
from specdist.sampling.processing.processors import TokenMasker
from tests.engine.markov import MarkovModel, MarkovRunner
from tests.models.families import noisy_copy, tiny_model

CPU = torch.device("cpu")
PAGE_SIZE = 4


def page_bytes(runner: ModelRunner, page_size: int) -> int:
    """What a page of keys and values of a runner's model takes, in bytes, as a cache of one page holds it."""
    cache = KeyValueCache(
        runner._shapes.shapes,
        num_pages=1,
        page_size=page_size,
        dtype=runner.dtype,
        device=runner.device,
        is_float8=runner._acceleration.has_float8_cache,
    )
    held = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    return sum(each.nbytes for tensors in held for each in tensors.values())


def paged_runner(
    model: PreTrainedModel | MarkovModel,
    acceleration: Acceleration | None = None,
    head: HiddenStateHead | None = None,
    device: torch.device = CPU,
    *,
    reads_head: bool = False,
) -> ModelRunner:
    if isinstance(model, MarkovModel):
        return cast(ModelRunner, MarkovRunner(model, has_head=reads_head))
    model = copy.deepcopy(model).to(device)
    use_paged_attention(model)
    return ModelRunner(model, device, acceleration, head=copy.deepcopy(head))


@functools.cache
def llama_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny target, and a draft that agrees with it often; both only to be read."""
    target = tiny_model("llama", seed=3)
    return target, noisy_copy(target)


def decode(token_ids: list[int]) -> str:
    """Text with one letter per token, so that stop strings can be placed exactly."""
    return "".join(chr(ord("A") + token_id) for token_id in token_ids)


DETOKENIZER = Detokenizer(lambda token_ids, _: decode(token_ids))


class Harness:
    """Both models with their caches; ``generate`` may be called again and again."""

    def __init__(
        self,
        target: PreTrainedModel | MarkovModel,
        draft: PreTrainedModel | MarkovModel | None,
        *,
        num_draft_tokens: int = 4,
        policy: LengthPolicy | None = None,
        num_ahead_tokens: int = 0,
        num_branches: int = 0,
        shapes: Sequence[RoundShape] = (),
        settings: SamplingSettings | None = None,
        eos: Sequence[int] = (),
        stop: Sequence[str] = (),
        stop_repeats: int = 0,
        max_new_tokens: int = 20,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_seq_len: int = 96,
        num_pages: int = 512,
        seed: int = 0,
        acceleration: Acceleration | None = None,
        device: torch.device = CPU,
        is_traced: bool = False,
        head: HiddenStateHead | None = None,
        trusts_draft: bool = False,
        ngrams: CostModel | bool = False,
        masker: Callable[[], TokenMasker] | None = None,
        forced_room: int = 0,
        is_windowed: bool = False,
    ) -> None:
        self.ngrams, self.masker = ngrams, masker
        self.settings = settings or SamplingSettings(temperature=0.0)
        self.vocab_size = min(model.config.vocab_size for model in (target, draft) if model is not None)
        self.policy = policy or FixedLength(num_draft_tokens)
        configs = [model.config for model in (target, draft) if isinstance(model, PreTrainedModel)]
        self.scheduling = SchedulerSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_draft_tokens=0
            if draft is None and not ngrams
            else self.policy.max_draft_tokens + forced_room,
            num_ahead_tokens=num_ahead_tokens + forced_room if draft is not None and num_ahead_tokens else 0,
            max_new_tokens=max_new_tokens,
            max_seq_len=max_seq_len,
            seed=seed,
            rope_borders=rope_borders(*configs),
            recomputed_from=recomputed_from(configs[0]) if configs else None,
            target_keeps_states=bool(configs) and keeps_states(target.config),
            draft_keeps_states=len(configs) > 1 and keeps_states(configs[1]),
        )
        self.num_pages = num_pages
        self.stop_rules = StopRules(DETOKENIZER, frozenset(eos), tuple(stop), stop_repeats)
        self.max_seq_len = max_seq_len
        self.runners = [paged_runner(target, acceleration, device=device)]
        if draft is not None:
            self.runners.append(
                paged_runner(draft, acceleration, head, device, reads_head=self.policy.reads_head)
            )
        self.trusts_draft = trusts_draft
        self.is_traced = is_traced
        self.shapes = shapes
        self.ahead = RoundShape(
            num_ahead=num_ahead_tokens if draft is not None else 0, num_branches=num_branches
        )
        self.windowed: WindowedLayers | None = None
        if is_windowed:
            window = longest_window(self.runners[0].windows.values(), max_seq_len)
            assert window is not None
            self.windowed = self.scheduling.windowed_layers(window, PAGE_SIZE)
            assert self.windowed is not None
        self.assembly.allocate(self.runners[0])
        for runner in self.runners[1:]:
            self.assembly.allocate_draft(
                runner,
                num_branch_slots=self.scheduling.num_slots * num_branches,
                max_branch_tokens=self.scheduling.num_ahead_tokens,
            )
        self.stats_recorder = StatsRecorder()

    @property
    def assembly(self) -> Assembly:
        """The assembly for the present settings: tests change them between runs."""
        return Assembly(
            settings=self.settings,
            vocab_size=self.vocab_size,
            stop_rules=self.stop_rules,
            scheduling=self.scheduling,
            num_pages=self.num_pages,
            page_size=PAGE_SIZE,
            ahead=self.ahead,
            chooser=ScriptedChooser(self.shapes) if self.shapes else None,
            is_traced=self.is_traced,
            trusts_draft=self.trusts_draft,
            masker=self.masker,
            windowed=self.windowed,
        )

    def target(self) -> Target:
        return self.assembly.local_target(self.runners[0])

    def proposer(self) -> Proposer:
        if self.ngrams:
            return self.assembly.ngram_draft(None if self.ngrams is True else self.ngrams)
        if len(self.runners) == 1:
            return Draft()
        if not self.shapes:
            return self.assembly.local_draft(self.runners[1], self.policy)
        worker = self.assembly.draft_worker(self.runners[1], self.policy)
        return Draft(InProcess(worker), max_missed_tokens=20)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of their requests."""
        pages = self.assembly.page_table()
        self.stats_recorder = StatsRecorder()
        engine = self.assembly.engine(
            iter(requests),
            target=self.target(),
            proposer=self.proposer(),
            stats_recorder=self.stats_recorder,
            pages=pages,
        )
        self.scheduler = engine.scheduler
        completions = list(engine.run())
        assert pages.num_available == pages.num_pages, "a finished row kept its pages"
        if len(self.runners) > 1 and not self.ahead.num_ahead:
            shards = {request.shard for request in requests}
            check_lemma([self.stats_recorder.shard(shard) for shard in shards], completions)
        order = {(r.row_id, r.sample_index): index for index, r in enumerate(requests)}
        return sorted(completions, key=lambda c: order[c.request.row_id, c.request.sample_index])


def check_lemma(shards: Sequence[Stats], completions: Sequence[Completion]) -> None:
    """SpecDec++'s Lemma 3.1, N_draft + N_target = N + N_discarded, of a synchronous run without repeats."""
    total = Stats()
    for stats in shards:
        total.add(stats)
    if total.num_preemptions or any(c.error for c in completions):
        return
    num_target = total.num_row_steps + total.num_completions
    # One for each completion that ends with a draft token, which no token of the target follows.
    num_unused = num_target + total.num_accepted_tokens - total.num_completion_tokens
    assert 0 <= num_unused <= sum(c.finish_reason != "length" for c in completions)
    num_tokens = total.num_completion_tokens + num_unused
    num_proposed = total.num_draft_row_steps + total.num_forced_draft_tokens
    assert num_proposed + num_target == num_tokens + total.num_discarded


class ScriptedChooser(RoundChooser):
    """Every round has the next of these shapes, whatever pays."""

    def __init__(self, shapes: Sequence[RoundShape]) -> None:
        super().__init__(CostModel(Curve([1], [10]), Curve([1], [1])), max_draft_tokens=1)
        self._shapes = itertools.cycle(shapes)

    def choose(self, num_rows: int, num_context_tokens: float, **sharing: float) -> None:
        assert num_rows > 0 and num_context_tokens >= 0

    def shape(self, num_rows: int, num_context_tokens: float, *, is_pending: bool) -> RoundShape:
        return next(self._shapes)

    def shape_ahead(self, shape: RoundShape, *, is_pending: bool) -> RoundShape:
        return shape


def requests_for(prompts: Sequence[Sequence[int]], num_samples: int = 1) -> list[Request]:
    return [
        Request(row_id=row, sample_index=sample, prompt_ids=list(prompt))
        for row, prompt in enumerate(prompts)
        for sample in range(num_samples)
    ]
