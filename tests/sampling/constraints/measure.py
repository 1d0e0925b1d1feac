"""Measures constrained generation: ``python -m tests.sampling.constraints.measure --target T --draft D ...``.

Of every schema in ``schemas/``: whether all completions that ended by themselves are instances of it, and
tokens per second of processor time beside those of the same prompts without a constraint, in turns with it.
With one thread (OMP_NUM_THREADS=1), so that other processes matter little; only ratios of one run are
reported: the machine is not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema

from specdist.config.groups import CompletionOptions
from specdist.data.stats.shard import Stats
from specdist.engine.request import Completion, Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.stopping import StopRules
from specdist.job.texts.tokens import detokenizer_of
from specdist.llm import SpeculativeLLM

SCHEMAS = sorted(Path(__file__).with_name("schemas").glob("*.json"))
PROMPTS = [
    f"{what} {number}:" for number in range(64) for what in ("The review of order", "A letter about case")
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--num_prompts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3, help="0 = no times, only whether all is valid")
    parser.add_argument("--num_samples", type=int, default=1)
    parser.add_argument("--max_new_tokens", type=int, default=300)
    parser.add_argument("--max_num_seqs", type=int, default=8)
    given = parser.parse_args()
    common: dict[str, Any] = {
        "policy": "fixed", "num_draft_tokens": 4, "device": "cpu", "dtype": "float32",
        "max_num_seqs": given.max_num_seqs,
    }  # fmt: skip
    free = SpeculativeLLM(given.target, given.draft, **common)
    prompts = PROMPTS[: given.num_prompts]
    tables = []
    for path in SCHEMAS:
        schema = json.loads(path.read_text(encoding="utf-8"))
        bound = SpeculativeLLM(given.target, given.draft, json_schema=str(path), **common)
        rule = bound._models.constraints.of_all_rows
        table: dict[str, Any] = {"num_completions": 0, "num_stopped": 0, "num_valid": 0}
        ratios, rounds = [], []
        for repeat in range(max(1, given.repeats)):
            sampling = CompletionOptions(
                max_new_tokens=given.max_new_tokens, num_samples=given.num_samples, seed=repeat
            )
            ids = [bound._tokenizer(prompt)["input_ids"] for prompt in prompts]
            requests = [
                Request(row_id=row, sample_index=sample, prompt_ids=prompt_ids, **rule)
                for row, prompt_ids in enumerate(ids)
                for sample in range(given.num_samples)
            ]
            found, time_s, stats = timed(bound, requests, sampling, bound._models.target.stop_token_ids())
            stopped = [each for each in found if each.finish_reason == "stop"]
            table["num_completions"] += len(found)
            table["num_stopped"] += len(stopped)
            table["num_valid"] += sum(is_instance(each.text, schema) for each in stopped)
            table["forced_share"] = round(stats.num_forced_draft_tokens / stats.num_draft_tokens, 3)
            table["acceptance"] = round(stats.num_accepted_tokens / stats.num_draft_tokens, 3)
            if given.repeats:
                # As long as these, so that the batch drains alike.
                like = [
                    replace(each.request, constraint="", max_new_tokens=len(each.token_ids)) for each in found
                ]
                same, free_s, stats = timed(free, like, sampling, frozenset())
                assert sum(len(each.token_ids) for each in same) == sum(len(each.token_ids) for each in found)
                ratios.append(free_s / time_s)
                rounds.append(stats.num_accepted_tokens / stats.num_draft_tokens)
        if ratios:
            table["throughput_over_unconstrained"] = round(statistics.median(ratios), 3)
            table["acceptance_unconstrained"] = round(statistics.median(rounds), 3)
        tables.append((path.stem, table))
        print(path.stem, table, flush=True)  # noqa: T201
    totals = {
        name: sum(table[name] for _, table in tables)
        for name in ("num_completions", "num_stopped", "num_valid")
    }
    every = [
        table["throughput_over_unconstrained"]
        for _, table in tables
        if "throughput_over_unconstrained" in table
    ]
    document = {
        "command": " ".join(["python -m tests.sampling.constraints.measure", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "settings": {**common, "temperature": 1.0},
        "totals": totals
        | ({"median_throughput_over_unconstrained": statistics.median(every)} if every else {}),
        "schemas": dict(tables),
    }
    Path(given.output).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def timed(
    llm: SpeculativeLLM, requests: list[Request], sampling: CompletionOptions, stop_token_ids: frozenset[int]
) -> tuple[list[Completion], float, Stats]:
    """Completions with their texts, the seconds of processor time, and the statistics."""
    llm._replica.resample(llm._config(sampling))
    rules, recorder = StopRules(detokenizer_of(llm._tokenizer), stop_token_ids), StatsRecorder()
    engine = llm._replica.engine(iter(requests), rules, recorder)
    began = time.process_time()
    found = list(engine.run())
    return found, time.process_time() - began, recorder.close_shard(0)


def is_instance(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


if __name__ == "__main__":
    main()
