"""``--preview``: the first rows as a run would generate them, and what all would take. Nothing is written."""

from __future__ import annotations

import reprlib
from collections import deque
from dataclasses import replace
from datetime import timedelta
from typing import Any

from specdist.data.stats.rows import RowResult
from specdist.data.stats.shard import Stats
from specdist.engine.request import Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.detokenizer import Detokenizer
from specdist.engine.schedule.stopping import StopRules
from specdist.job.replica.plan import ReplicaPlan
from specdist.job.replica.replica import Replica
from specdist.job.rows.row_requests import RowRequests
from specdist.job.rows.row_results import count_rows
from specdist.job.totals.spending import S_PER_HOUR
from specdist.policies.payoff import Learned, RoundChooser

# A few lines of a screen: the beginning and the end of a text.
SCREEN = reprlib.Repr()
SCREEN.maxstring = 480


def prompt_line(request: Request, detokenizer: Detokenizer) -> str:
    """A run's first prompt as the model gets it, special tokens too."""
    text = SCREEN.repr(detokenizer.decode(request.prompt_ids, False))
    return f"prompt      row {request.row_id}, {len(request.prompt_ids):,} tokens: {text}"


def first_rows(
    num_rows: int, rows: RowRequests, stop_rules: StopRules, replica: Replica
) -> tuple[list[RowResult], Stats]:
    """The first rows, with the special tokens of their prompts, and what they add up to. On rank 0, while the
    other ranks serve."""
    waiting, ended, recorder = deque[Any](), list[Any](), StatsRecorder()
    for row in range(num_rows):
        for found in rows.begin(row, range(rows.num_samples(row)), 0):
            (waiting if isinstance(found, Request) else ended).append(found)
    # None where nothing waits: another turn may follow from what runs.
    requests = iter(lambda: waiting.popleft() if waiting else None, ...)
    for completion in replica.engine(requests, stop_rules, recorder).run():
        following = rows.end(completion)
        if isinstance(following, Request):
            waiting.append(following)
        elif following is not None:
            text = stop_rules.detokenizer.decode(completion.request.prompt_ids, False)
            ended.append(replace(following, prompt=text))
    stats = recorder.close_shard(0)
    count_rows(stats, ended)
    return sorted(ended, key=lambda row: (row.row_id, row.sample_index)), stats


def row_text(row: RowResult) -> str:
    """A row for people."""
    name = f"row {row.row_id}, sample {row.sample_index}: {row.num_prompt_tokens:,} tokens of prompt"
    ended = f"{row.num_completion_tokens:,} tokens, finish_reason {row.finish_reason}"
    return "\n".join(
        (name, row.prompt or "", f"{ended}: {row.error}" if row.error else ended, row.completion)
    )


def of_all(stats: Stats, plan: ReplicaPlan, replica: Replica) -> str:
    """The speed of rows, and what all would take: as many tokens for each, at this speed times what measured
    costs say of a whole batch."""
    config, num_all, costs = plan.config, plan.workload.num_rows or 0, replica.costs
    num_new, num_read, number = stats.num_completion_tokens, stats.num_prompt_tokens, stats.num_completions
    if not num_new or costs is None:
        return "speed       unknown: no row has a completion"
    accepted = sum(stats.num_accepted_tokens_per_pos[:1]) / max(1, stats.num_drafts)
    learned = Learned(accepted, accepted, prompts=(num_read - stats.num_shared_prompt_tokens) / num_new)
    chooser = RoundChooser(costs, max_draft_tokens=max(1, config.policy_choice.max_draft_tokens))
    kinds = slice(config.policy == "fixed", None if plan.is_asynchronous else 1 + config.uses_draft)
    num_seqs = round(stats.num_row_steps / stats.num_rounds) or 1
    most_seqs = plan.workload.rows_at_a_time(replica.num_slots)
    few, many = (
        chooser.rates_of(each, (num_read + num_new / 2) / number, learned)[kinds].max()
        for each in (num_seqs, most_seqs)
    )
    rate = stats.summary()["tokens_per_s"]
    seconds = num_all * num_new / number / (rate * many / few)
    price = seconds / S_PER_HOUR * (config.gpu_price or 0) * plan.topology.world_size
    told = f", for {price:.3g} at --gpu_price {config.gpu_price:g}" if price else ""
    return (
        f"speed       {rate:,.1f} tokens/s, about {num_seqs} of these sequences at a time\n"
        f"all rows    about {timedelta(seconds=round(seconds))} (h:mm:ss) after the start{told}: {num_all:,} "
        f"completions of {num_new / number:,.0f} tokens at {rate * many / few:,.1f} tokens/s, extrapolated "
        f"from these {number}, and from measured costs to {most_seqs} sequences at a time"
    )
