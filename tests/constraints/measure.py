"""Measures constrained generation: ``python -m tests.constraints.measure --target T --draft D ...``.

Of every schema in ``schemas/``: whether all completions that ended by themselves are instances of it, and
tokens per second beside those of the same prompts without a constraint, in turns with it. Only ratios of one
run are reported: the machine is not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema

from specdist.api.llm import GeneratedText, SpeculativeLLM
from specdist.config.groups import CompletionOptions
from specdist.engine.request import Request
from specdist.engine.stats_recorder import StatsRecorder
from specdist.engine.stopping import StopRules
from specdist.stats.shard import Stats

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
        table: dict[str, Any] = {"num_completions": 0, "num_stopped": 0, "num_valid": 0}
        ratios, rounds = [], []
        for repeat in range(max(1, given.repeats)):
            sampling = CompletionOptions(
                max_new_tokens=given.max_new_tokens, num_samples=given.num_samples, seed=repeat
            )
            began = time.perf_counter()
            found = bound.generate(prompts, sampling, use_tqdm=False)
            time_s = time.perf_counter() - began
            stopped = [each for each in found if each.finish_reason == "stop"]
            table["num_completions"] += len(found)
            table["num_stopped"] += len(stopped)
            table["num_valid"] += sum(is_instance(each.text, schema) for each in stopped)
            stats = bound._stats
            table["forced_share"] = round(stats.num_forced_draft_tokens / stats.num_draft_tokens, 3)
            table["acceptance"] = round(stats.num_accepted_tokens / stats.num_draft_tokens, 3)
            if given.repeats:
                # As long as these, so that the batch drains alike.
                free_s, stats = generate_free(free, found, prompts, sampling)
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
        "command": " ".join(["python -m tests.constraints.measure", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "settings": {**common, "temperature": 1.0},
        "totals": totals
        | ({"median_throughput_over_unconstrained": statistics.median(every)} if every else {}),
        "schemas": dict(tables),
    }
    Path(given.output).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def generate_free(
    llm: SpeculativeLLM, like: list[GeneratedText], prompts: list[str], sampling: CompletionOptions
) -> tuple[float, Stats]:
    """Seconds for as many tokens of each completion without a constraint or an end, and the statistics."""
    llm._replica.resample(llm._config(sampling))
    requests = [
        Request(
            row_id=each.prompt_index,
            sample_index=each.sample_index,
            prompt_ids=llm._tokenizer(prompts[each.prompt_index])["input_ids"],
            max_new_tokens=len(each.token_ids),
        )
        for each in like
    ]
    recorder = StatsRecorder()
    began = time.perf_counter()
    found = list(llm._replica.engine(iter(requests), StopRules(str), recorder).run())
    time_s = time.perf_counter() - began
    assert sum(len(each.token_ids) for each in found) == sum(len(each.token_ids) for each in like)
    return time_s, recorder.close_shard(0)


def is_instance(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


if __name__ == "__main__":
    main()
