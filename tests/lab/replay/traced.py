"""A live engine on tiny models, and the exhaustive trace of what it generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from specdist.engine.assembly import Assembly
from specdist.engine.draft.channels import InProcess
from specdist.engine.interfaces import Proposer
from specdist.engine.request import Completion
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.engine.schedule.stopping import StopRules
from specdist.lab.replay import ExhaustiveTrace
from specdist.lab.tune.collect import TraceCollector, TracedCompletion
from specdist.policies import (
    AdaEdl,
    ConfidenceThreshold,
    FixedLength,
    GammaTune,
    GammaTunePlus,
    Goodput,
    HfHeuristic,
    LengthPolicy,
    SpecDecPlusPlus,
    Sprinter,
    Svip,
    reads_head,
)
from specdist.policies.costs import CostModel, Curve
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import PAGE_SIZE, Harness, paged_runner
from tests.engine.heads import constant_head, random_head

CAP = 6
MAX_NEW_TOKENS = 24
EOS = 7
HEAD, DRAWING_HEAD = 1, 2
# Under which blocks of all lengths come up.
COSTS = CostModel(Curve([1, 401], [2000, 4400]), Curve([1, 101], [150, 600]))


def make_policy(name: str, *, is_coupled: bool = True) -> LengthPolicy:
    """A new one, whose thresholds matter on tiny random models."""
    gammas = {
        "num_draft_tokens": 3,
        "min_draft_tokens": 1,
        "max_draft_tokens": CAP,
        "length_bonus": 2.0,
        "length_rate": 0.5,
    }
    policies: dict[str, LengthPolicy] = {
        "fixed": FixedLength(4),
        "hf_heuristic": HfHeuristic(num_draft_tokens=3, max_draft_tokens=CAP),
        "confidence": ConfidenceThreshold(max_draft_tokens=CAP, stop_probability=0.4),
        "svip": Svip(max_draft_tokens=CAP, stop_root_entropy=1.0),
        "adaedl": AdaEdl(
            max_draft_tokens=CAP,
            stop_bound=0.4,
            stop_bound_step=0.1,
            stop_bound_momentum=0.5,
            entropy_factor=0.2,
            target_acceptance=0.7,
            acceptance_momentum=0.5,
        ),
        "gammatune": GammaTune(**gammas),
        "gammatune_plus": GammaTunePlus(**gammas, stop_probability=0.4),
        "specdecpp": SpecDecPlusPlus(max_draft_tokens=CAP, stop_threshold=0.6),
        "sprinter": Sprinter(max_draft_tokens=CAP, verifier_threshold=0.5),
        "goodput": Goodput(max_draft_tokens=CAP, costs=COSTS, is_coupled=is_coupled),
        "goodput with head": Goodput(
            max_draft_tokens=CAP, costs=COSTS, is_coupled=is_coupled, reads_head=True
        ),
    }
    return policies[name]


POLICY_NAMES = (
    "fixed", "hf_heuristic", "confidence", "svip", "adaedl", "gammatune", "gammatune_plus", "specdecpp",
    "sprinter", "goodput", "goodput with head",
)  # fmt: skip


class AskedReplica(Harness):
    """Its draft is asked in every round, as in a replay, even where ``goodput`` would let it rest."""

    def proposer(self) -> Proposer:
        return self.assembly.draft(InProcess(self.assembly.draft_worker(self.runners[1], self.policy)))


def live_replica(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    policy: LengthPolicy,
    *,
    settings: SamplingSettings,
    max_num_seqs: int,
    seed: int = 0,
    is_drawing: bool = False,
    **options: Any,
) -> Harness:
    head = random_head(draft, uses_features=True, hidden_state="drawing" if is_drawing else "own")
    return AskedReplica(
        target,
        draft,
        policy=policy,
        settings=settings,
        eos=[EOS],
        max_new_tokens=MAX_NEW_TOKENS,
        max_num_seqs=max_num_seqs,
        seed=seed,
        head=head if reads_head(policy) else None,
        **options,
    )


def trace_of(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    completions: Sequence[Completion],
    *,
    settings: SamplingSettings,
    seed: int = 0,
) -> ExhaustiveTrace:
    assembly = Assembly(
        settings=settings,
        vocab_size=target.config.vocab_size,
        stop_rules=StopRules(NO_TEXT, frozenset([EOS])),
        scheduling=SchedulerSettings(
            max_num_seqs=1,
            max_num_batched_tokens=CAP + 1,
            max_draft_tokens=CAP,
            max_new_tokens=MAX_NEW_TOKENS,
            max_seq_len=96,
            seed=seed,
        ),
        num_pages=0,
        page_size=PAGE_SIZE,
    )
    # The last two heads are those that live_replica() may have.
    heads = [constant_head(draft, 0.0), random_head(draft, uses_features=True)]
    heads.append(random_head(draft, uses_features=True, hidden_state="drawing"))
    collector = TraceCollector(paged_runner(target), paged_runner(draft), assembly, heads)
    return ExhaustiveTrace(
        [
            collector.collect(
                TracedCompletion(
                    row_id=completion.request.row_id,
                    prompt_ids=completion.request.prompt_ids,
                    completion_ids=completion.token_ids,
                    max_new_tokens=MAX_NEW_TOKENS,
                )
            )
            for completion in completions
        ]
    )
