"""Runs of the job itself, on real ranks, which are killed by SIGKILL and started again by the same command.

Its rows are compared with the target alone, as those of the engine are: a case's model is the pair of
tests/job.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from specdist.engine.request import Completion, Request, TokenLogprobs
from tests.job.gate import Gate
from tests.job.launching import logged_rows, read_output, shard_stats
from tests.job.pair import MAX_POSITIONS, build_pair, some_texts, write_arrow
from tests.job.ranks import fork_ranks, started_ranks
from tests.random_runs.case import Case, Row
from tests.random_runs.checking import Found, check_completion
from tests.random_runs.models import PAIR, tokenizer_of_pair

# Ten pages of both models, of which a row needs up to five; more where branches have some of them.
SMALL, WITH_BRANCHES = "160KiB", "4MiB"
SHOWN_CHARACTERS = 400


@dataclass(frozen=True, kw_only=True)
class JobCase:
    """A job. ``options``: of its command line; ``kills``: how many completions are safe at each."""

    num_ranks: int = 1
    num_rows: int = 4
    draft: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    kills: tuple[int, ...] = ()

    is_valid = True

    def line(self) -> str:
        return json.dumps({"job": vars(self)}, separators=(",", ":"))

    def smaller(self) -> Iterator[JobCase]:
        for index in range(len(self.kills)):
            yield replace(self, kills=self.kills[:index] + self.kills[index + 1 :])
        if self.num_ranks == 1:
            yield replace(self, draft=None, options=_without(self.options, "policy"))
        for name in self.options:
            if name not in ("tp_size", "policy", "overlap"):
                yield replace(self, options=_without(self.options, name))
        for less in (self.num_rows // 2, self.num_rows - 1):
            if 0 < less < self.num_rows:
                yield replace(self, num_rows=less)


def job_from_line(line: str) -> JobCase:
    values = json.loads(line)["job"]
    return JobCase(**{**values, "kills": tuple(values["kills"])})


def draw_job(seed: str) -> JobCase:
    rng = random.Random(f"{seed} job")
    num_ranks = rng.choice([1, 2, 3])
    draft = "pair" if num_ranks > 1 else rng.choice(["pair", "pair", "ngram", None])
    options: dict[str, Any] = {
        "seed": rng.randrange(1000),
        "temperature": rng.choice([0.0, 0.8, 1.2]),
        "acceptance": "gumbel",
        "max_new_tokens": rng.randint(10, 40),
        "rows_per_shard": rng.randint(2, 6),
        "max_num_seqs": rng.randint(2, 6),
        "cache_memory": SMALL,
        "num_samples": rng.choice([None, None, 2]),
        "logprobs": rng.choice([None, None, 2]),
        "stop": rng.choice([None, None, [" s"]]),
        "top_k": rng.choice([None, 20]),
        "tp_size": num_ranks - 1 if num_ranks > 1 else None,
    }
    if draft == "pair":
        options["policy"] = rng.choice(["fixed", "svip", "gammatune", "confidence"])
        overlaps = ["synchronous"] if num_ranks == 1 else ["synchronous", "asynchronous", "auto"]
        options["overlap"] = rng.choice(overlaps)
        options["cache_memory"] = SMALL if options["overlap"] == "synchronous" else WITH_BRANCHES
    num_rows = rng.randint(6, 12)
    num_all = num_rows * (options["num_samples"] or 1)
    kills = sorted(rng.randrange(num_all) for _ in range(rng.choice([1, 1, 2])))
    given = {name: value for name, value in options.items() if value is not None}
    return JobCase(num_ranks=num_ranks, num_rows=num_rows, draft=draft, options=given, kills=tuple(kills))


def attempt_job(job: JobCase) -> Found:
    """Run it, with its kills, and compare its rows with the target alone."""
    texts = some_texts(job.num_rows, seed=7)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = write_arrow(folder / "prompts.arrow", {"prompt": texts})
        output, pair = folder / "run", build_pair(folder / "pair")
        options = {"device": "cpu", "policy": None, "overlap": None, **job.options, "prompts": prompts,
                   "target": pair.target, "draft": pair.draft if job.draft == "pair" else job.draft,
                   "output": output}  # fmt: skip
        num_samples = job.options.get("num_samples", 1)
        for number, wanted in enumerate(job.kills):
            gate = Gate(folder / f"gate-{number}")
            with started_ranks(job.num_ranks, gate=gate, **options) as ranks:
                gate.let_through(partial(_is_safe, output, wanted), ranks.is_running)
        ended = fork_ranks(job.num_ranks, **options)
        if ended.code != 0:
            return Found([f"exit code {ended.code}: {ended.stderr[-SHOWN_CHARACTERS:]}"], is_broken=True)
        rows = read_output(output).to_pylist()
        stats = shard_stats(output)
    case = _case_of(job, texts)
    found = Found(num_preemptions=sum(shard["num_preemptions"] for shard in stats))
    keys = [(row["row_id"], row["sample_index"]) for row in rows]
    if keys != [(row, sample) for row in range(job.num_rows) for sample in range(num_samples)]:
        return Found([f"rows {keys}"])
    for row in rows:
        completion = _completion(row, case)
        wrong = check_completion(case, completion, found.places)
        found.wrong += [f"row {row['row_id']}, sample {row['sample_index']}: {words}" for words in wrong]
    num_tokens = sum(shard["num_completion_tokens"] for shard in stats)
    if num_tokens != sum(row["num_completion_tokens"] for row in rows):
        found.wrong.append(f"the statistics count {num_tokens} tokens")
    return found


def _is_safe(output: Path, num_wanted: int) -> bool:
    """Whether more completions are in finished shards and part logs."""
    finished = list((output / "shards").glob("*.json"))
    logged = sum(
        logged_rows(output, shard).count(b"\n")
        for shard in {int(path.name[6:11]) for path in (output / "parts").glob("shard-*.jsonl")}
        if not (output / "shards" / f"shard-{shard:05d}.json").exists()
    )
    done = sum(json.loads(path.read_text()).get("num_completions", 0) for path in finished)
    return logged + done > num_wanted


def _case_of(job: JobCase, texts: list[str]) -> Case:
    options = job.options
    tokenizer = tokenizer_of_pair()
    default = {name: options[name] for name in ("top_k", "top_p") if name in options}
    return Case(
        model=PAIR,
        rows=tuple(Row(prompt=tuple(tokenizer(text).input_ids)) for text in texts),
        num_samples=options.get("num_samples", 1),
        temperature=options.get("temperature", 1.0),
        default=default,
        seed=options.get("seed", 0),
        max_new_tokens=options.get("max_new_tokens", MAX_POSITIONS),
        max_seq_len=MAX_POSITIONS,
        eos=(0,),
        stop=tuple(options.get("stop", ())),
        num_logprobs=options.get("logprobs"),
    )


def _completion(row: Mapping[str, Any], case: Case) -> Completion:
    logprobs = None
    if row.get("logprobs") is not None:
        logprobs = TokenLogprobs(
            raw=row["logprobs"],
            processed=row["processed_logprobs"],
            top_ids=row["top_logprob_ids"],
            top_raw=row["top_logprobs"],
        )
    return Completion(
        request=Request(
            row_id=row["row_id"],
            sample_index=row["sample_index"],
            prompt_ids=list(case.rows[row["row_id"]].prompt),
        ),
        token_ids=row["completion_ids"],
        text=row["completion"],
        finish_reason=row["finish_reason"],
        num_spec_steps=row["num_spec_steps"],
        num_draft_tokens=row["num_draft_tokens"],
        num_accepted_draft_tokens=row["num_accepted_draft_tokens"],
        logprobs=logprobs,
        error=row["error"],
    )


def _without(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}
