"""Measures what log-probabilities cost: ``python -m tests.engine.measure_logprobs --target T --draft D ...``.

Tokens per second of processor time with ``--logprobs 5``, and with ``--prompt_logprobs 5`` besides, over
those without, of the same completions in turns, the lines of a part log included. With one thread
(OMP_NUM_THREADS=1), so that other processes matter little; only ratios of one run are reported.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from specdist.config.groups import CompletionOptions
from specdist.engine.request import Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.stopping import StopRules
from specdist.job.rows.row_results import result_of
from specdist.llm import SpeculativeLLM

RESULT = Path(__file__).parent.parent.parent / "jobs/benchmarks/logprobs-small-pair-cpu.json"
VARIANTS: dict[str, dict[str, int]] = {
    "none": {},
    "logprobs_5": {"logprobs": 5},
    "logprobs_5_and_prompt_logprobs_5": {"logprobs": 5, "prompt_logprobs": 5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--num_prompts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max_new_tokens", type=int, default=48)
    parser.add_argument("--max_num_seqs", type=int, default=8)
    given = parser.parse_args()
    common: dict[str, Any] = {
        "policy": "fixed", "num_draft_tokens": 4, "device": "cpu", "dtype": "float32",
        "max_num_seqs": given.max_num_seqs,
    }  # fmt: skip
    llm = SpeculativeLLM(given.target, given.draft, **common)
    texts = pa.ipc.open_file(given.prompts).read_all()["prompt"].to_pylist()[: given.num_prompts]
    requests = [
        Request(row_id=row, sample_index=0, prompt_ids=llm._tokenizer(text)["input_ids"])
        for row, text in enumerate(texts)
    ]
    times_s: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for repeat in range(given.repeats + 1):
        tokens = {}
        for name, asked in VARIANTS.items():
            sampling = CompletionOptions(max_new_tokens=given.max_new_tokens, seed=repeat, **asked)
            llm._replica.resample(llm._config(sampling))
            engine = llm._replica.engine(iter(requests), StopRules(NO_TEXT), StatsRecorder())
            began = time.process_time()
            rows = [result_of(completion) for completion in engine.run()]
            num_bytes = sum(len(row.to_json()) for row in rows)
            times_s[name].append(time.process_time() - began)
            tokens[name] = sorted((row.row_id, row.completion_ids) for row in rows)
            assert num_bytes
        assert len({str(each) for each in tokens.values()}) == 1, "asking for them changes no token"
    ratios = {
        name: [none / own for none, own in zip(times_s["none"][1:], found[1:], strict=True)]
        for name, found in times_s.items()
        if name != "none"
    }
    document = {
        "command": " ".join(["python -m tests.engine.measure_logprobs", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "settings": {**common, "temperature": 1.0},
        "throughput_over_none": {
            name: {
                "median": round(statistics.median(found), 3),
                "repeats": [round(ratio, 3) for ratio in found],
            }
            for name, found in ratios.items()
        },
    }
    Path(given.output).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document["throughput_over_none"]))  # noqa: T201


def markdown() -> str:
    """The READMEs' sentence."""
    found = json.loads(RESULT.read_text(encoding="utf-8"))["throughput_over_none"]
    text = (
        "On the small pair, on one core, a run with `--logprobs 5` generates "
        f"{found['logprobs_5']['median']:.2f} times as many tokens per second of processor time as one "
        f"without ({min(found['logprobs_5']['repeats']):.2f} to {max(found['logprobs_5']['repeats']):.2f} in "
        f"{len(found['logprobs_5']['repeats'])} repeats), with `--prompt_logprobs 5` besides "
        f"{found['logprobs_5_and_prompt_logprobs_5']['median']:.2f} times "
        "([result](../logprobs-small-pair-cpu.json))."
    )
    return "\n".join(textwrap.wrap(text, 120, break_on_hyphens=False))


if __name__ == "__main__":
    main()
