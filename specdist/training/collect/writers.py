"""Writing the texts of the verifier's prefixes: by the draft alone, and by both in turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from specdist.data.formats.prompts import Prompts
from specdist.engine.request import Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.stopping import StopRules
from specdist.job.models.model_plan import ModelPlan
from specdist.job.replica.replica import Replica
from specdist.job.texts.tokens import PromptEncoder
from specdist.training.collect.config import CollectConfig
from specdist.training.collect.ranks import Conductor
from specdist.training.collect.texts import (
    DRAFT_SAMPLE,
    MIXED_SAMPLE,
    NUM_STRETCHES,
    Text,
    stretch_lengths,
    verifier_texts,
)


@dataclass
class _Mixed:
    """An unfinished mixed completion: lengths of its stretches, its tokens, and which the draft wrote."""

    lengths: list[int]
    token_ids: list[int] = field(default_factory=list)
    by_draft: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class TextWriter:
    """Writes the texts of the verifier's prefixes, for the rows of a shard."""

    config: CollectConfig
    models: ModelPlan
    prompts: Prompts
    replica: Replica
    conductor: Conductor
    encoder: PromptEncoder

    @cached_property
    def _stop_rules(self) -> StopRules:
        return StopRules(self.encoder.detokenizer, self.models.target.stop_token_ids())

    def prompt_ids(self, row_id: int) -> list[int]:
        """The prompt's tokens, as in the run of the responses."""
        return self.encoder.prompt_ids(self.prompts.prompt(row_id))

    def texts(self, responses: Mapping[int, list[int]]) -> list[Text]:
        """The texts of all four kinds for each row with a response."""
        prompts = {row_id: self.prompt_ids(row_id) for row_id in responses}
        drafted = self.conductor.complete_by_draft(
            [
                Request(row_id=row_id, sample_index=DRAFT_SAMPLE, prompt_ids=prompt_ids)
                for row_id, prompt_ids in prompts.items()
            ]
        )
        mixed = self._mixed(prompts)
        return [
            text
            for row_id, prompt_ids in prompts.items()
            for text in verifier_texts(
                row_id,
                prompt_ids,
                draft_ids=drafted[row_id],
                target_ids=responses[row_id],
                mixed_ids=mixed[row_id].token_ids,
                by_draft=mixed[row_id].by_draft,
                seed=self.config.seed,
                max_seq_len=self.models.max_seq_len,
                stop_token_ids=self._stop_rules.token_ids,
            )
        ]

    def _mixed(self, prompts: Mapping[int, list[int]]) -> dict[int, _Mixed]:
        """Stretch by stretch for all rows at a time; the draft begins, as in a round."""
        mixed = {
            row_id: _Mixed(
                stretch_lengths(
                    row_id,
                    seed=self.config.seed,
                    max_new_tokens=min(self.config.max_new_tokens, self.models.max_seq_len - len(prompt_ids)),
                )
            )
            for row_id, prompt_ids in prompts.items()
        }
        for stretch in range(NUM_STRETCHES):
            requests = [
                Request(
                    row_id=row_id,
                    sample_index=MIXED_SAMPLE,
                    prompt_ids=prompts[row_id] + text.token_ids,
                    max_new_tokens=text.lengths[stretch],
                )
                for row_id, text in mixed.items()
                if text.lengths[stretch] and not self._has_ended(text)
            ]
            is_draft = stretch % 2 == 0
            written = (
                self.conductor.complete_by_draft(requests) if is_draft else self._complete_by_target(requests)
            )
            for row_id, token_ids in written.items():
                mixed[row_id].token_ids += token_ids
                mixed[row_id].by_draft += [is_draft] * len(token_ids)
        return mixed

    def _has_ended(self, text: _Mixed) -> bool:
        return bool(text.token_ids) and text.token_ids[-1] in self._stop_rules.token_ids

    def _complete_by_target(self, requests: list[Request]) -> dict[int, list[int]]:
        self.conductor.begin_generation()
        engine = self.replica.engine(iter(requests), self._stop_rules, StatsRecorder())
        return {completion.request.row_id: completion.token_ids for completion in engine.run()}
