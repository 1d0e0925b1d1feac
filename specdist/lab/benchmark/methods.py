"""The methods to generate: specdist's, with both models in one process or two, and transformers'."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from transformers import GenerationConfig

from specdist.data.stats.shard import Stats
from specdist.engine.messages.interfaces import Proposer
from specdist.engine.request import Request
from specdist.job.texts.tokens import load_tokenizer
from specdist.lab.benchmark.pair import DraftOrder, PagedPair, Pair
from specdist.sampling.distributions import SamplingSettings

# Padding is masked on the left and cut off on the right, so any token will do.
PAD_TOKEN_ID = 0


@dataclass(frozen=True)
class Row:
    """One completion to generate."""

    prompt_ids: list[int]
    max_new_tokens: int


def shortened(rows: Sequence[Row], max_new_tokens: int) -> list[Row]:
    """The same prompts, with completions of at most this many tokens."""
    return [dataclasses.replace(row, max_new_tokens=min(row.max_new_tokens, max_new_tokens)) for row in rows]


@dataclass(frozen=True)
class Generated:
    """Token ids per row, in the order of the rows; and of specdist alone the statistics, and of each row of a
    run the blocks that were verified and the draft tokens accepted in them."""

    completions: list[list[int]]
    stats: Stats | None = None
    accepted: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.completions))


class Specdist:
    """specdist's engine with both models in this process; without draft tokens it is the target alone."""

    def __init__(self, paged: PagedPair, order: DraftOrder) -> None:
        self.name = f"specdist, {order.choice.label}"
        self.batch_size = order.num_slots
        self.order = order
        self._paged = paged

    def prepare(self) -> None:
        """What is not part of the measured time."""
        self._paged.pair.use_specdist_attention()

    def generate(self, rows: Sequence[Row]) -> Generated:
        return self._run(rows, self._paged.local_draft(self.order))

    def _run(self, rows: Sequence[Row], proposer: Proposer) -> Generated:
        requests = [Request(row_id=index, sample_index=0, **vars(row)) for index, row in enumerate(rows)]
        engine, stats_recorder = self._paged.engine(requests, self.order, proposer)
        finished = {completion.request.row_id: completion for completion in engine.run()}
        ordered = [finished[index] for index in range(len(rows))]
        return Generated(
            [completion.token_ids for completion in ordered],
            stats_recorder.close_shard(0),
            [(completion.num_spec_steps, completion.num_accepted_draft_tokens) for completion in ordered],
        )


class TransformersGenerate:
    """``generate`` of the target alone, on batches padded on the left.

    A batch runs until its longest row ends; tokens after a row's own end are not counted.
    """

    name = "transformers generate"
    order = None

    def __init__(self, pair: Pair, settings: SamplingSettings, *, batch_size: int, seed: int) -> None:
        self.batch_size = batch_size
        self._pair = pair
        self._settings = settings
        self._seed = seed
        self._assistance: dict[str, Any] = {}

    def prepare(self) -> None:
        self._pair.use_transformers_attention()
        torch.manual_seed(self._seed)

    def generate(self, rows: Sequence[Row]) -> Generated:
        completions = []
        for begin in range(0, len(rows), self.batch_size):
            completions += self._generate_batch(rows[begin : begin + self.batch_size])
        return Generated(completions)

    def _generate_batch(self, rows: Sequence[Row]) -> list[list[int]]:
        width = max(len(row.prompt_ids) for row in rows)
        padding = [width - len(row.prompt_ids) for row in rows]
        token_ids = torch.tensor(
            [[PAD_TOKEN_ID] * pad + row.prompt_ids for pad, row in zip(padding, rows, strict=True)]
        )
        mask = torch.arange(width) >= torch.tensor(padding)[:, None]
        output = self._pair.target.generate(
            token_ids.to(self._pair.device),
            attention_mask=mask.long().to(self._pair.device),
            generation_config=self._generation_config(max(row.max_new_tokens for row in rows)),
            **self._assistance,
        )
        return [
            self._useful(row, generated)
            for row, generated in zip(rows, output[:, width:].tolist(), strict=True)
        ]

    def _generation_config(self, max_new_tokens: int) -> GenerationConfig:
        sampling: dict[str, Any] = {"do_sample": not self._settings.is_greedy}
        if not self._settings.is_greedy:
            # In transformers an unset top_k is 50.
            sampling |= {name: getattr(self._settings, name) for name in ("temperature", "top_k", "top_p")}
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(self._pair.stop_token_ids) or None,
            pad_token_id=PAD_TOKEN_ID,
            **sampling,
        )

    def _useful(self, row: Row, generated: list[int]) -> list[int]:
        kept = generated[: row.max_new_tokens]
        ends = [index for index, token in enumerate(kept) if token in self._pair.stop_token_ids]
        return kept[: ends[0] + 1] if ends else kept


class TransformersAssisted(TransformersGenerate):
    """Assisted generation with a constant number of candidates; transformers has it for single rows only."""

    name = "transformers assisted"

    def __init__(self, pair: Pair, settings: SamplingSettings, *, num_draft_tokens: int, seed: int) -> None:
        super().__init__(pair, settings, batch_size=1, seed=seed)
        # Without a confidence threshold every round drafts the same number, as --policy fixed does.
        pair.draft.generation_config = GenerationConfig(
            num_assistant_tokens=num_draft_tokens,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        self._assistance = {"assistant_model": pair.draft}
        if pair.target_checkpoint.vocab_width != pair.draft_checkpoint.vocab_width:
            # transformers takes logits of different widths for different tokenizers, and requires them.
            self._assistance["tokenizer"] = pair.tokenizer
            self._assistance["assistant_tokenizer"] = load_tokenizer(pair.draft_checkpoint)


class PeerMethod(Protocol):
    """A method of another engine: see :mod:`specdist.lab.benchmark.peers.engines`."""

    name: str
    batch_size: int
    order: None

    def prepare(self) -> None: ...

    def generate(self, rows: Sequence[Row]) -> Generated: ...


# One way to generate at one batch size. ``order`` is specdist's draft, and None for others.
Method: TypeAlias = Specdist | TransformersGenerate | PeerMethod
