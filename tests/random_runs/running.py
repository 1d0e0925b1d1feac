"""Runs a case with the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from specdist.data.stats.shard import Stats
from specdist.engine.assembly import Assembly
from specdist.engine.draft.client import Draft, InProcess
from specdist.engine.messages.interfaces import Proposer, Target
from specdist.engine.request import Completion, Request
from specdist.engine.schedule.detokenizer import Detokenizer
from specdist.engine.schedule.stopping import StopRules
from specdist.models.passes.hidden import HiddenStateHead
from specdist.policies import LengthPolicy
from specdist.policies.costs import CostModel, Curve
from specdist.policies.payoff import RoundChooser, RoundShape
from specdist.policies.registry import POLICIES
from specdist.sampling.constraints.constraint import Constraint
from specdist.sampling.constraints.masker import RowRule
from specdist.sampling.distributions import SamplingSettings
from specdist.sampling.processing.row_table import Processing, TokenOptions
from tests.engine.harness import PAGE_SIZE, Harness
from tests.engine.heads import random_head
from tests.engine.markov import MarkovModel
from tests.engine.sliced import SlicedMarkovReplica
from tests.random_runs.case import HEADS, Case, Row
from tests.random_runs.models import decode_of, pair_of, special_ids_of
from tests.sampling.constraints.letters import letters_masker

# Costs with which rounds of every kind are worth their time, in batches of up to twenty sequences.
COSTS = CostModel(Curve([1, 41], [100, 150]), Curve([1, 41], [10, 30]))


@dataclass(frozen=True)
class Run:
    """Completions in the order of their requests, and the statistics."""

    completions: list[Completion]
    stats: Stats


def run(case: Case, replica: Harness | None = None) -> Run:
    """``replica``: instead of a new one in this process. Raises whatever the engine raises, and
    AssertionError for pages that were not given back."""
    replica = replica or new_replica(case)
    completions = replica.generate(requests_of(case))
    return Run(completions, replica.stats_recorder.close_shard(0))


def requests_of(case: Case) -> list[Request]:
    return [
        Request(
            row_id=index,
            sample_index=sample,
            prompt_ids=list(row.prompt),
            max_new_tokens=row.max_new_tokens,
            seed=row.seed,
            stop=row.stop,
            options=None if row.options is None else _token_options(row.options),
            constraint=_rule(case.regex_of(row)),
        )
        for index, row in enumerate(case.rows)
        for sample in range(case.num_samples)
    ]


def new_replica(case: Case) -> Harness:
    """In this process."""
    return SlicedReplica(case) if case.placement == "threads" else LocalReplica(case)


class RandomReplica(Harness):
    """The harness with a case's settings."""

    def __init__(self, case: Case) -> None:
        self.case = case
        target, draft = pair_of(case)
        policy = policy_of(case)
        has_model = case.draft in ("noisy", "same")
        forced_room = case.forced_room if case.regex is not None else 0
        block = (policy.max_draft_tokens if case.draft != "none" else 0) + forced_room + 1
        needed = max(-(-case.longest_of(row) // PAGE_SIZE) for row in case.rows)
        super().__init__(
            target,
            draft if has_model else None,
            policy=policy,
            num_ahead_tokens=case.num_ahead_tokens,
            num_branches=case.num_branches,
            shapes=_shapes(case),
            settings=settings_of(case),
            eos=case.eos,
            max_new_tokens=case.max_new_tokens,
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=block + case.room,
            max_seq_len=case.max_seq_len,
            num_pages=needed + case.spare_pages,
            seed=case.seed,
            is_traced=case.is_traced,
            head=head_of(case, target) if has_model else None,
            trusts_draft=case.trusts_draft,
            ngrams=case.draft == "ngram",
            masker=letters_masker if case.regex is not None else None,
            forced_room=forced_room,
        )
        detokenizer = Detokenizer(partial(decode_of, case), special_ids_of(case))
        self.stop_rules = StopRules(detokenizer, frozenset(case.eos), tuple(case.stop))

    @property
    def assembly(self) -> Assembly:
        assembly = super().assembly
        if not self.case.has_chooser:
            return assembly
        counts = range(self.case.num_branches + 1)
        chooser = RoundChooser(COSTS, max_draft_tokens=self.policy.max_draft_tokens, branch_counts=counts)
        return replace(assembly, chooser=chooser)


class LocalReplica(RandomReplica):
    def proposer(self) -> Proposer:
        if not self.case.has_chooser:
            return super().proposer()
        worker = self.assembly.draft_worker(self.runners[1], self.policy)
        return Draft(InProcess(worker), max_missed_tokens=20)


class SlicedReplica(LocalReplica):
    """The target's vocabulary is in slices."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._model = cast(MarkovModel, pair_of(case)[0])

    def target(self) -> Target:
        return SlicedMarkovReplica.target(cast(SlicedMarkovReplica, self))


def policy_of(case: Case) -> LengthPolicy:
    """A new one: some learn. It may stop earlier or later than its defaults would."""
    kind: Any = POLICIES[case.policy]
    cap, threshold = case.cap, case.threshold
    first = {"num_draft_tokens": min(2, cap), "max_draft_tokens": cap}
    options: dict[str, dict[str, Any]] = {
        "fixed": {"num_draft_tokens": cap},
        "hf_heuristic": first,
        "confidence": {"max_draft_tokens": cap, "stop_probability": threshold},
        "draft_verify": {"max_draft_tokens": cap, "stop_probability": threshold},
        "svip": {"max_draft_tokens": cap, "stop_root_entropy": 2 * threshold},
        "adaedl": {"max_draft_tokens": cap, "stop_bound": threshold},
        "gammatune": first,
        "gammatune_plus": {**first, "stop_probability": threshold},
        "specdecpp": {"max_draft_tokens": cap, "stop_threshold": threshold},
        "sprinter": {"max_draft_tokens": cap, "verifier_threshold": threshold},
        "goodput": {
            "max_draft_tokens": cap,
            "costs": COSTS,
            "is_coupled": not settings_of(case).is_random,
        },
    }
    policy: LengthPolicy = kind(**options[case.policy])
    return policy


def head_of(case: Case, target: Any) -> HiddenStateHead | None:
    """Of a transformer; a Markov model has its own."""
    return random_head(target, offset=0.7) if case.policy in HEADS and not case.is_markov else None


def settings_of(case: Case) -> SamplingSettings:
    temperature = max(case.temperature_of(row) for row in (*case.rows, Row()))
    processing = None
    if case.has_processing:
        processing = Processing(
            defaults=_token_options(case.options_of(Row())),
            logit_bias=case.logit_bias,
            bad_words=case.bad_words,
            suppressed_ids=case.suppressed_ids,
            min_new_tokens=case.min_new_tokens,
            end_ids=case.eos,
            has_masks=case.regex is not None,
        )
    return SamplingSettings(
        temperature=temperature,
        top_k=int(case.default.get("top_k", 0)),
        top_p=case.default.get("top_p", 1.0),
        is_coupled=case.acceptance == "gumbel",
        processing=processing,
        num_logprobs=case.num_logprobs,
        num_prompt_logprobs=case.num_prompt_logprobs,
    )


def _shapes(case: Case) -> Sequence[RoundShape]:
    return [
        RoundShape(drafts_now=bool(now), num_ahead=ahead, num_branches=branches, num_rounds_alone=alone)
        for now, ahead, branches, alone in (() if case.has_chooser else case.shapes)
    ]


def _token_options(options: Any) -> TokenOptions:
    return TokenOptions(**options)


def _rule(regex: str | None) -> str:
    return RowRule(Constraint("regex", regex).grammar).text if regex else ""
