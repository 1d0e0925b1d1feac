"""Drafters of the target's states on one GPU: tokens, drafts, graphs, and seconds of a run.

    python -m tests.gpu.first_drafters FOLDER [--fake]

Tiny random models in float32, greedy. The tokens must be those of the target alone on the CPU, and the drafts
those of the same drafter there, but for rounding; passes of the target and of the drafter are replayed from
graphs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.engine import block_drafters, eagle, mtp
from tests.engine.harness import Harness, requests_for
from tests.engine.test_eagle import prompts_of_lengths
from tests.gpu.first_device import Bench, say, step, table

VOCAB_SIZE = 24
IDS = [*range(1, 9), 11, 12, *range(14, 22)]
NUM_NEW_TOKENS, TINY_NUM_NEW_TOKENS = 64, 8
# Of drafted tokens; of two that are nearly equally likely rounding chooses.
LEAST_EQUAL = 0.9


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of a kind of drafters: the share of drafts that are those of the CPU, graphs, and seconds of a run
    whose passes have been recorded."""

    kind: str
    equal_tokens: bool
    equal_drafts: float
    target_graphs: int
    draft_graphs: int
    run_s: float


def eagle3() -> tuple[Any, Any, Any]:
    target = eagle.eagle_target(VOCAB_SIZE)
    return eagle.EagleHarness, target, eagle.eagle_model(target, IDS)


def head() -> tuple[Any, Any, Any]:
    target = mtp.mtp_target("mimo", VOCAB_SIZE)
    return mtp.MtpHarness, target, mtp.mtp_head(target)


def block() -> tuple[Any, Any, Any]:
    target = eagle.eagle_target(VOCAB_SIZE)
    return block_drafters.BlockHarness, target, block_drafters.block_drafter(target, IDS)


KINDS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {"EAGLE-3": eagle3, "MTP": head, "DFlash": block}


def run_all(bench: Bench, folder: Path) -> int:
    results = [run(bench, kind) for kind in KINDS]
    say(table(results))
    bench.write(folder / "drafters.json", {"drafters": [asdict(one) for one in results]})
    wrong = [one.kind for one in results if not is_right(one)]
    if wrong:
        say(f"WRONG: {', '.join(wrong)}: other tokens, other drafts, or no graphs, of which the log says why")
    return int(bool(wrong))


def is_right(found: Found) -> bool:
    has_graphs = found.target_graphs > 0 and found.draft_graphs > 0
    return found.equal_tokens and found.equal_drafts >= LEAST_EQUAL and has_graphs


def run(bench: Bench, kind: str) -> Found:
    harness, target, draft = KINDS[kind]()
    requests = requests_for(prompts_of_lengths(14))
    sizes: dict[str, Any] = {
        "max_new_tokens": TINY_NUM_NEW_TOKENS if bench.is_fake else NUM_NEW_TOKENS,
        "max_seq_len": 128,
    }
    expected = Harness(target, None, **sizes).generate(requests)
    on_cpu = harness(target, draft, **sizes)
    on_cpu.generate(requests)
    on_gpu = harness(target, draft, **sizes, device=bench.device)
    found = on_gpu.generate(requests)
    pairs = [
        (one.candidates, other.candidates)
        for one, other in zip(on_gpu.blocks, on_cpu.blocks, strict=False)
        if one.committed == other.committed
    ]
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    on_gpu.generate(requests)
    torch.cuda.synchronize()
    runners = on_gpu.target_runner, on_gpu.draft_runner
    target_graphs, draft_graphs = (
        sum(len(each._graphs._replays) for each in (runner._static, runner.runs) if each is not None)
        for runner in runners
    )
    return Found(
        kind=kind,
        equal_tokens=[each.token_ids for each in found] == [each.token_ids for each in expected],
        equal_drafts=sum(one == other for one, other in pairs) / max(1, len(on_cpu.blocks)),
        target_graphs=target_graphs,
        draft_graphs=draft_graphs,
        run_s=time.perf_counter() - begin_s,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return step(str(__doc__).partition("\n")[0], run_all, arguments)


if __name__ == "__main__":
    sys.exit(main())
