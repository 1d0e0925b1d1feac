"""Two ranks, target and draft, start with one option after the other, measure their costs and generate.

Run by test_measured_starts.py: folders of the target and of the draft.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from specdist.config.generate import GenerateConfig
from specdist.config.speculation import ASYNCHRONOUS
from specdist.engine.request import Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.stopping import StopRules
from specdist.job.costs import measuring, round_times
from specdist.job.costs.kept_costs import FOLDER_VARIABLE, OFF
from specdist.job.costs.pass_times import always
from specdist.job.models.model_plan import plan_models
from specdist.job.ranks.topology import Topology
from specdist.job.replica.plan import ReplicaPlan
from specdist.job.replica.replica import build_replica
from tests.ranks import join, leave

SAMPLED: dict[str, Any] = {"temperature": 0.7}
GREEDY: dict[str, Any] = {"temperature": 0.0}
AHEAD: dict[str, Any] = {"overlap": ASYNCHRONOUS}
FORCED: dict[str, Any] = {"regex": "[ab](the end ){3}"}
STARTS: list[dict[str, Any]] = [
    SAMPLED | {**AHEAD, "num_branches": 2, "acceptance": "gumbel"},
    SAMPLED | {"prompt_logprobs": 1, "trace": True},
    GREEDY | {**AHEAD, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    SAMPLED | FORCED,
    GREEDY | FORCED | {**AHEAD, "logprobs": 0},
    SAMPLED | {"policy": "adaedl", **AHEAD, "bad_words": ["the"], "stop": ["a"], "trace": True},
    SAMPLED | {"max_num_seqs": 1, "max_num_batched_tokens": 64, "min_p": 0.1, **AHEAD},
]  # fmt: skip


asked: list[int] = []


def noting(*arguments: Any, **options: Any) -> Any:
    """Note how many rounds of each kind were measured."""
    found = measured_rounds(*arguments, **options)
    asked.append(len(found))
    return found


measured_rounds = round_times._asked


def start(topology: Topology, target: str, draft: str, options: dict[str, Any]) -> None:
    config = GenerateConfig(prompts="", output="", target=target, draft=draft, device="cpu", **options)
    models = plan_models(config)
    asked.clear()
    replica = build_replica(ReplicaPlan(config=config, models=models, topology=topology))
    # Synchronous and asynchronous rounds on the draft's rank, and messages to it on the target's.
    assert config.overlap == "synchronous" or len(asked) >= (1 if topology.is_rank0 else 4), options
    assert all(asked), options
    if not topology.is_rank0:
        replica.serve()
        return
    requests = [
        Request(row_id=row, sample_index=0, prompt_ids=[5, 6, 7], max_new_tokens=12,
                **models.constraints.of_all_rows)
        for row in range(3)
    ]  # fmt: skip
    rules = StopRules(NO_TEXT, models.target.stop_token_ids())
    completions = list(replica.engine(iter(requests), rules, StatsRecorder()).run())
    assert [each.error for each in completions] == [None] * 3, options
    costs = replica.costs
    assert (costs is not None) == config.needs_costs, options
    if costs is not None and config.overlap != "synchronous":
        assert min(costs.target.ns) > 0 and min(costs.draft.ns) > 0 and min(costs.message.ns) > 0, options


def main() -> None:
    os.environ[FOLDER_VARIABLE] = OFF
    measuring.LEAST_BUDGET_S, round_times._asked = 0.2, noting
    # All kinds of rounds, however busy this machine is.
    drafting_curves = measuring.drafting_curves
    measuring.drafting_curves = lambda *all_of_it, **options: drafting_curves(
        *all_of_it, **options | {"fits": always}
    )
    topology = join(tp_size=1)
    for options in STARTS:
        start(topology, *sys.argv[1:], options)
    leave()


if __name__ == "__main__":
    main()
