"""Four real replicas whose passes take a large model's time: tiny models, and sleep.

A pass over b sequences ends after so many times what it takes in the simulation (tail.py), so that the cores
of the machine do not matter. The length of every row's completion is drawn beforehand.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdist.cli import generate as main
from specdist.engine.request import Completion, Request
from specdist.job.recording.recording import Recorder
from specdist.job.recording.work import WorkQueue
from specdist.job.rows.lengths import ExpectedLengths
from specdist.models.passes.runner import ModelRunner
from tests.forked import fork
from tests.job.launching import arguments
from tests.job.pair import TEXT, random_llama, save, train_tokenizer, write_arrow
from tests.scale.tail import TailOutcome, TailScenario

# Plain, and with the rates of speculation: a pass of a full batch then takes about 60 ms.
SLOWDOWN = {False: 2.0, True: 8.0}
SCENARIO = TailScenario(num_shards=10, rows_per_shard=256, max_num_seqs=8, median_tokens=30, most_tokens=200)
MAX_POSITIONS = 1024


def paced_run(folder: Path, seed: int, *, is_new: bool, has_rates: bool) -> TailOutcome:
    """Times since the first replica began. ``is_new``: with sub-shards, and the longest rows first."""
    folder.mkdir(parents=True)
    target = save(folder / "target", random_llama(max_position_embeddings=MAX_POSITIONS), train_tokenizer())
    prompts, output = _prompts(folder / "prompts.arrow", seed), folder / "run"
    words = arguments(
        prompts=prompts, target=target, device="cpu", temperature=1, seed=seed,
        row_options=["max_new_tokens"], min_new_tokens=SCENARIO.most_tokens,
        max_new_tokens=SCENARIO.most_tokens, max_num_seqs=SCENARIO.max_num_seqs,
        rows_per_shard=SCENARIO.rows_per_shard, output=output,
    )  # fmt: skip
    replicas = [
        fork(_replica, words, folder / f"events-{number}", is_new, has_rates)
        for number in range(SCENARIO.num_replicas)
    ]
    for replica in replicas:
        replica.start()
    for replica in replicas:
        replica.join()
    told = "\n".join(path.read_text() for path in folder.glob("events-*.out"))
    assert [replica.exitcode for replica in replicas] == [0] * len(replicas), told
    lines = [line for path in folder.glob("events-?") for line in path.read_text().splitlines()]
    events = [json.loads(line) for line in lines]
    return _outcome(events, TailScenario(has_rates=has_rates))


def _prompts(path: Path, seed: int) -> Path:
    """Lengths of completions are log-normal around a power of the prompt's length, as in the simulation."""
    rng, words = random.Random(seed), TEXT.split()
    sizes = [max(1, min(40, round(rng.lognormvariate(2, 0.7)))) for _ in range(SCENARIO.num_rows)]
    medians = [SCENARIO.median_tokens * (size / 8) ** 0.5 for size in sizes]
    lengths = [
        min(SCENARIO.most_tokens, 1 + int(rng.lognormvariate(math.log(median), SCENARIO.sigma)))
        for median in medians
    ]
    texts = [" ".join(rng.choices(words, k=size)) for size in sizes]
    return write_arrow(path, {"prompt": texts, "max_new_tokens": lengths})


def _replica(words: list[str], events: Path, is_new: bool, has_rates: bool) -> None:
    scenario, file = TailScenario(has_rates=has_rates), events.open("w")
    forward, requests, record, lease = (
        ModelRunner.forward,
        Recorder.requests,
        Recorder.record,
        Recorder.lease,
    )

    def tell(kind: str, **values: Any) -> None:
        file.write(json.dumps({"kind": kind, "at": time.time()} | values) + "\n")
        file.flush()

    def paced(self: ModelRunner, batch: Any, *rest: Any) -> Any:
        until = time.monotonic() + SLOWDOWN[scenario.has_rates] * scenario.token_s(
            len(set(batch.slots_T.tolist()))
        )
        logits = forward(self, batch, *rest)
        time.sleep(max(0.0, until - time.monotonic()))
        return logits

    def told_requests(self: Recorder) -> Iterator[Request | None]:
        tell("works")
        for request in requests(self):
            if request is not None:
                tell("begins", row=request.row_id)
            yield request

    def told_record(self: Recorder, completion: Completion) -> None:
        tell("ends", row=completion.request.row_id, tokens=len(completion.token_ids))
        record(self, completion)
        tell("recorded")

    def told_lease(self: Recorder) -> bool:
        found = lease(self)
        # Asked for while nothing runs: else a lease is made for a request.
        if not found and not self._work.open and not self.is_run_complete:
            tell("idle")
        return found

    ModelRunner.forward = paced  # type: ignore[method-assign]
    Recorder.requests, Recorder.record = told_requests, told_record  # type: ignore[method-assign]
    Recorder.lease = told_lease  # type: ignore[method-assign]
    if not is_new:
        WorkQueue._offer = lambda self, work, wanted: None  # type: ignore[method-assign]
        ExpectedLengths.longest_first = lambda self, rows: list(rows)  # type: ignore[method-assign]
    # What people read is in the run's folder, in logs.
    for descriptor in (1, 2):
        os.dup2(os.open(events.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.exit(main(words))


def _outcome(events: list[dict[str, Any]], scenario: TailScenario) -> TailOutcome:
    start = min(event["at"] for event in events if event["kind"] == "works")
    end = max(event["at"] for event in events if event["kind"] == "recorded")
    idle = min([event["at"] for event in events if event["kind"] == "idle"] + [end])
    begun: dict[int, float] = {}
    longest_left_s = 0.0
    for event in sorted(events, key=lambda event: event["at"]):
        if event["kind"] == "begins":
            begun[event["row"]] = event["at"]
        elif event["kind"] == "ends" and begun[event["row"]] < idle < event["at"]:
            took_s = event["at"] - begun[event["row"]]
            left = event["tokens"] * (event["at"] - idle) / took_s
            longest_left_s = max(longest_left_s, SLOWDOWN[scenario.has_rates] * scenario.token_s(1) * left)
    return TailOutcome(first_idle_s=idle - start, longest_left_s=longest_left_s, end_s=end - start)
