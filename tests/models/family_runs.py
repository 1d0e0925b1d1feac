"""What specdist makes of every family of the installed transformers: ``generate``'s tokens, or a refusal.

python -m tests.models.family_runs [--families NAME ...] [--output tests/models/families.json]

Every family of :mod:`tests.models.all_families` is made small, saved, opened and run as the job does, with a
draft beside the target, on one rank and with the target on two (``--tp_size 2``, the draft on the first).
Rows are shorter and longer than windows and borders of rotary embeddings, and share their passes; blocks have
0 to 8 tokens. What is right is what transformers' ``generate`` gives for each row alone with the family's own
attention.

Processes go through the whole list. One that dies or stands still is started again after the family that it
was busy with.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from transformers import AutoConfig

from specdist.config.generate import GenerateConfig
from specdist.engine.request import Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.stopping import StopRules
from specdist.job.models.model_plan import plan_models
from specdist.job.ranks.logs import quiet_libraries
from specdist.job.ranks.topology import Topology
from specdist.job.replica.plan import ReplicaPlan
from specdist.job.replica.replica import build_replica
from specdist.llm import NO_PATH
from specdist.models.cache.windowed_pages import longest_window
from specdist.models.loading import loading
from specdist.policies.base import DraftSequences, VerifiedBlocks
from specdist.policies.lengths.counted import HfHeuristic
from specdist.utils.errors import UserError
from tests.forked import World, started_world
from tests.models.all_families import BORDER, FAMILIES, VOCAB_SIZE, save_pair
from tests.ranks import REPOSITORY, join, leave

STORED = REPOSITORY / "tests/models/families.json"
# So many that rows come to all lengths, even if everything is accepted.
NUM_NEW = 24
# Before the windows, across the borders, past both.
PROMPT_LENGTHS = (3, BORDER - 8, BORDER + 12)
# Of logits of order 10 in float32; a token that wins by less may lose in another order of summation.
TIE = 2e-4
LONGEST_S = 60
MOST_DRAFTED = 8
EXACT, REFUSED, LATE, WRONG, ERROR = "exact", "refused", "late", "wrong", "error"
UNPREPARED = "no reference: "
NOTES, BEGUN, WANTED = "outcomes{}.jsonl", "begun", "wanted.pt"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one family on so many ranks.

    Attributes:
        kind: ``exact``; ``refused`` before any weight was read; ``late``: refused after that; ``wrong``;
            ``error``.
        detail: the refusal's message, the error, or where the tokens differ.
        unchecked: why the loading check could compare nothing.
    """

    family: str
    tp_size: int
    kind: str
    detail: str = ""
    unchecked: str | None = None
    seconds: float = 0.0


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS
    ]


@torch.no_grad()
def reference(folder: Path) -> list[dict[str, Any]]:
    """Of every prompt the tokens of ``generate`` for it alone, and the logits after them."""
    architecture = getattr(transformers, AutoConfig.from_pretrained(folder).architectures[0])
    model = architecture.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    found = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        output = model.eval().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.cat(output.logits).float()
        found.append({"token_ids": output.sequences[0, len(prompt) :].tolist(), "logits": logits})
    return found


def difference(found: Sequence[list[int]], wanted: Sequence[dict[str, Any]]) -> str:
    """Where tokens are not those of ``generate``; empty if nowhere."""
    for row, (own, right) in enumerate(zip(found, wanted, strict=True)):
        if own == right["token_ids"]:
            continue
        pairs = zip(own, right["token_ids"], strict=False)
        place = next((i for i, (one, other) in enumerate(pairs) if one != other), -1)
        if place >= 0:
            logits = right["logits"][place]
            margin = float(logits.max() - logits[own[place]])
            if margin < TIE:
                continue
            return (
                f"token {place} after {PROMPT_LENGTHS[row]} is {own[place]}, not "
                f"{right['token_ids'][place]}, whose logit is larger by {margin:.2g}"
            )
        return f"{len(own)} tokens after {PROMPT_LENGTHS[row]}, not {len(right['token_ids'])}"
    return ""


def run_family(folder: Path, topology: Topology) -> tuple[list[list[int]] | None, str | None]:
    """The tokens of every prompt, on rank 0, and why the loading check compared nothing. All ranks call it.

    Raises :class:`UserError` as the job does, :class:`LateRefusal` instead after weights were read.
    """
    config = GenerateConfig(
        prompts=NO_PATH, output=NO_PATH, target=str(folder / "target"), draft=str(folder / "draft"),
        policy="hf_heuristic", max_draft_tokens=MOST_DRAFTED, overlap="synchronous", temperature=0.0,
        max_new_tokens=NUM_NEW, tp_size=topology.tp_size, device="cpu", dtype="float32", max_num_seqs=4,
        draft_placement="shared", cache_memory="16MB", max_num_batched_tokens=24,
    )  # fmt: skip
    models = plan_models(config)
    # Both ways of reading weights end with this.
    with mock.patch.object(loading, "refuse_missing", wraps=loading.refuse_missing) as was_read:
        try:
            replica = build_replica(ReplicaPlan(config=config, models=models, topology=topology))
        except UserError as error:
            raise (LateRefusal(str(error)) if was_read.called else error) from error
    if (runner := replica._loaded.target) is not None:
        has_windows = longest_window(runner.windows.values(), models.max_seq_len) is not None
        assert has_windows is (replica._room.windowed is not None), "windowed layers and their pages"
    if not topology.is_rank0:
        replica.serve()
        return None, None
    requests = [Request(row_id=row, sample_index=0, prompt_ids=ids) for row, ids in enumerate(prompts())]
    rules = StopRules(NO_TEXT, models.target.stop_token_ids())
    recorder = StatsRecorder()
    lengths = EveryLength()
    with mock.patch.multiple(HfHeuristic, wants=lengths.wants, next_histories=lengths.next_histories):
        completions = list(replica.engine(iter(requests), rules, recorder).run())
    for completion in completions:
        assert completion.finish_reason != "error", completion.error
    if all(completion.finish_reason == "length" for completion in completions):
        stats = recorder.shard(0)
        blocks = [stats.num_row_steps - stats.num_drafts, *stats.draft_length_histogram[1:]]
        assert len(blocks) > MOST_DRAFTED and all(blocks), f"blocks by their length: {blocks}"
    ordered = sorted(completions, key=lambda completion: completion.request.row_id)
    return [completion.token_ids for completion in ordered], replica.loading_check.reason


class EveryLength:
    """In the place of a policy: a block gets the length that fewest had. A stop token, or the end, may cut
    it."""

    def __init__(self) -> None:
        self._num_blocks = Counter(range(MOST_DRAFTED, -1, -1))

    def wants(self, rows: DraftSequences) -> np.ndarray:
        planned, lengths = self._num_blocks.copy(), []
        for _ in rows.slots_R:
            lengths.append(min(range(MOST_DRAFTED, -1, -1), key=planned.__getitem__))
            planned[lengths[-1]] += 1
        self._num_blocks[0] += lengths.count(0)
        return np.array(lengths)

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        self._num_blocks.update(blocks.num_drafted_R.tolist())
        return blocks.histories_RH


class LateRefusal(UserError):
    """After weights were read."""


def outcome(family: str, folder: Path, topology: Topology) -> Outcome:
    """On rank 0 of what all ranks do together."""
    begin = time.perf_counter()
    kind, detail, unchecked = EXACT, "", None
    try:
        assert (folder / "draft").is_dir(), "the family could not be made"
        found, unchecked = run_family(folder, topology)
        if found is not None:
            detail = difference(found, torch.load(folder / WANTED))
            kind = WRONG if detail else EXACT
    except LateRefusal as error:
        kind, detail = LATE, str(error)
    except UserError as error:
        kind, detail = REFUSED, str(error)
    except Exception as error:
        traceback.print_exc()
        kind, detail = ERROR, _words(error)
    return Outcome(
        family=family,
        tp_size=topology.tp_size,
        kind=kind,
        detail=detail.replace(f"{folder}/", ""),
        unchecked=unchecked,
        seconds=round(time.perf_counter() - begin, 2),
    )


def prepared(family: str, folder: Path) -> Outcome:
    """Save the pair, and what ``generate`` makes of it."""
    try:
        save_pair(family, folder)
        torch.save(reference(folder / "target"), folder / WANTED)
    except Exception as error:
        return Outcome(family=family, tp_size=0, kind=ERROR, detail=_words(error))
    return Outcome(family=family, tp_size=0, kind=EXACT)


def work(families: Iterable[str], folder: Path, tp_size: int) -> None:
    """A rank: one family after the other, of which rank 0 notes what it finds. ``tp_size`` 0 prepares."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    topology = Topology(rank=0, world_size=1, tp_size=1, uses_draft=True, device=torch.device("cpu"))
    if tp_size > 1:
        topology = replace(join(tp_size), uses_draft=True)
    for family in families:
        if topology.is_rank0:
            (folder / BEGUN).write_text(family)
        with quiet_libraries(lambda: None):
            found = (
                outcome(family, folder / family, topology) if tp_size else prepared(family, folder / family)
            )
        if topology.is_rank0 or found.kind == ERROR:
            with (folder / NOTES.format(tp_size)).open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
        if found.kind == ERROR and tp_size > 1:
            sys.stderr.flush()
            os._exit(3)  # the other rank may wait for this one for ever
    if tp_size > 1:
        leave()


def through(families: Sequence[str], folder: Path, tp_size: int) -> list[Outcome]:
    """The work of all families, whatever ends its processes."""
    notes = folder / NOTES.format(tp_size)
    notes.touch()
    left = list(families)
    while left:
        environment = {"OMP_NUM_THREADS": "1", "RENDEZVOUS": f"file://{folder}/meeting{tp_size}-{len(left)}"}
        with started_world(max(1, tp_size), work, left, folder, tp_size, environment=environment) as world:
            reason = _watch(world, notes)
        found = {
            one["family"]: Outcome(**one) for one in map(json.loads, reversed(notes.read_text().splitlines()))
        }
        if reason and (busy := (folder / BEGUN).read_text()) not in found:
            found[busy] = Outcome(family=busy, tp_size=tp_size, kind=ERROR, detail=reason)
            with notes.open("a") as file:
                file.write(json.dumps(asdict(found[busy])) + "\n")
        left = [family for family in left if family not in found]
    return [found[family] for family in families]


def _watch(world: World, notes: Path) -> str:
    """Until the processes have ended; why they did not reach the end of the list, if they did not."""
    while True:
        codes = [process.exitcode for process in world.processes]
        if all(code == 0 for code in codes):
            return ""
        if any(codes):
            last = [line for text in world.words("stderr") for line in text.strip().splitlines()[-1:]]
            return f"a process ended with {next(filter(None, codes))}: {' / '.join(last)}"
        if time.time() - notes.stat().st_mtime > LONGEST_S:
            return f"nothing for {LONGEST_S} s"
        time.sleep(0.05)


def run_all(families: Sequence[str], folder: Path, tp_sizes: Sequence[int] = (1, 2)) -> list[Outcome]:
    """Save every family in the folder, and run it on so many ranks."""
    unprepared = {one.family: one.detail for one in through(families, folder, 0) if one.kind == ERROR}
    found = [one for tp_size in tp_sizes for one in through(families, folder, tp_size)]
    return [
        replace(one, detail=f"{UNPREPARED}{unprepared[one.family]}")
        if one.kind not in (REFUSED, LATE) and one.family in unprepared
        else one
        for one in found
    ]


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--tp_sizes", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = run_all(arguments.families, Path(folder), arguments.tp_sizes)
    for one in found:
        print(f"{one.family:28} tp {one.tp_size} {one.kind:8} {one.seconds:5.1f} s {one.detail}")
        if one.unchecked:
            print(f"{'':28} not checked: {one.unchecked}")
    print(f"{time.perf_counter() - began:.0f} s: {dict(Counter((one.tp_size, one.kind) for one in found))}")
    if arguments.output:
        minutes = (time.perf_counter() - began) / 60
        document = document_of(found, minutes)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def document_of(found: Iterable[Outcome], minutes: float) -> dict[str, Any]:
    """What is stored, with what it was found with."""
    return {
        "command": "python -m tests.models.family_runs",
        "date": datetime.date.today().isoformat(),
        "minutes": round(minutes),
        "device": f"{os.cpu_count()} CPU cores",
        **{name: version(name) for name in ("transformers", "deepspeed", "torch")},
        "outcomes": [asdict(replace(one, seconds=0.0)) for one in found],
    }


if __name__ == "__main__":
    main()
