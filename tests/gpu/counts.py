"""Counts what the device is given, on a fake one: kernels, copies, synchronisations, replays.

    python -m tests.gpu.counts            the last line on stdout is JSON
    python -m tests.gpu.counts --write    also into specdist/lab/plan/counted.json, which the planner reads

Kernels are counted by what the device is given, whatever their size, so tiny models of one and of three
layers tell the kernels of a layer. Nothing here is a time, and nothing was measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from specdist.engine.assembly import PAGE_SIZE
from specdist.engine.engine import Engine
from specdist.models.batch.flat import FlatBatch
from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading.loading import load_whole
from specdist.models.loading.packed_experts import use_sorted_experts
from specdist.models.passes import graphs
from specdist.models.passes.runner import ModelRunner
from specdist.policies import LengthPolicy
from tests.engine.harness import Harness, paged_runner, requests_for
from tests.engine.heads import random_head
from tests.gpu import device
from tests.gpu.engine_runs import GPU, MAX_DRAFT_TOKENS, RULES, policies, prompts
from tests.gpu.observing import SIDES, Observer
from tests.models.all_families import build
from tests.models.families import noisy_copy, tiny_model
from tests.models.quantized_checkpoints import LAYOUTS, write
from tests.ranks import REPOSITORY

PLANNED = REPOSITORY / "specdist/lab/plan/counted.json"
FEW_LAYERS, MORE_LAYERS, MIXTURE = 1, 3, "qwen3_moe"
LENGTHS, NUM_NEW_TOKENS = (20, 9, 14, 12), 32
MEANS = ("synchronisations", "copies", "replays", "replayed kernels", "eager kernels")


def kernels_of_family(family: str) -> dict[str, int]:
    """Kernels of a replayed pass in bfloat16: of a layer, those outside of layers, and eager ones beside the
    graph."""
    (few, eager), (more, _) = (kernels_of_pass(family, layers) for layers in (FEW_LAYERS, MORE_LAYERS))
    per_layer, rest = divmod(more - few, MORE_LAYERS - FEW_LAYERS)
    assert rest == 0
    return {"per_layer": per_layer, "outside_of_layers": few - FEW_LAYERS * per_layer, "eager": eager}


def kernels_of_pass(family: str, num_layers: int) -> tuple[int, int]:
    """Kernels in the graph of a pass of four rows with one new token each, and eager ones beside it."""
    if family in LAYOUTS:
        runner = ModelRunner(loaded(family, num_layers), GPU)
    else:
        model = (build if family == MIXTURE else tiny_model)(family, num_hidden_layers=num_layers)
        use_sorted_experts(model, GPU, torch.bfloat16)
        runner = paged_runner(model.bfloat16(), device=GPU)
    runner.allocate(num_pages=4, page_size=PAGE_SIZE, num_slots=4, max_seq_len=PAGE_SIZE)
    batch = FlatBatch(np.full(4, 5), np.arange(4), np.zeros(4, np.int64))
    device.DEVICE.reset()
    runner.forward(batch, range(4))
    (in_graph,) = device.DEVICE.counts().captured_kernels
    device.DEVICE.reset()
    runner.forward(batch, range(4))
    counts = device.DEVICE.counts()
    assert counts.num_replays == 1
    return in_graph, counts.num_kernels


def loaded(layout: str, num_layers: int) -> PreTrainedModel:
    """A Llama in a quantised layout, as the job loads it from files."""
    with TemporaryDirectory() as folder:
        with _disable_current_modes():
            model = tiny_model("llama", num_hidden_layers=num_layers, intermediate_size=128)
            model.bfloat16().save_pretrained(folder)
            write(Path(folder), *LAYOUTS[layout])
        return load_whole(open_checkpoint("--target", folder), dtype=torch.bfloat16, device=GPU)


class Rounds:
    """Runs of one pair of models, again and again in the same engine."""

    def __init__(self, *, has_head: bool = False) -> None:
        target = tiny_model("llama", num_hidden_layers=2).bfloat16()
        draft = noisy_copy(target)
        self.harness = Harness(
            target,
            draft,
            device=GPU,
            head=random_head(draft, uses_features=True) if has_head else None,
            num_draft_tokens=MAX_DRAFT_TOKENS,
            max_new_tokens=NUM_NEW_TOKENS,
            max_num_seqs=len(LENGTHS),
            max_num_batched_tokens=256,
            max_seq_len=max(LENGTHS) + NUM_NEW_TOKENS + MAX_DRAFT_TOKENS + 1,
            num_pages=96,
        )
        self.observer = Observer(*(runner.model for runner in self.harness.runners))

    def steady(self, rule: str, policy: Callable[[], LengthPolicy]) -> list[dict[str, Counter[str]]]:
        """The counts of every round by side, in which all rows decode and nothing is recorded any more."""
        self._run(rule, policy)
        found = self._run(rule, policy)
        assert found, "no steady round"
        return found

    def _run(self, rule: str, policy: Callable[[], LengthPolicy]) -> list[dict[str, Counter[str]]]:
        rounds: list[dict[str, Counter[str]]] = []
        observer, one_round = self.observer, Engine.step

        def counted(engine: Engine) -> Generator[Any, None, bool]:
            before = observer.snapshot()
            is_over = yield from one_round(engine)
            plan, counts = engine.round.plan, observer.since(before)
            decodes = all(sequence.finish_reason is None for sequence in plan.decoding)
            is_whole = len(plan.decoding) == len(LENGTHS) and not plan.chunks and decodes
            if is_whole and not is_over and not any(counts[side]["graphs"] for side in SIDES):
                rounds.append(counts)
            return is_over

        self.harness.settings, self.harness.policy = RULES[rule], policy()
        with observer.active(), patch.object(Engine, "step", counted):
            self.harness.generate(requests_for(prompts(LENGTHS)))
        return rounds


def syncs_of(rounds: Rounds, rule: str, policy: str) -> dict[str, list[int]]:
    """By side, how often the host waits for the device in each steady round."""
    found = rounds.steady(rule, policies(MAX_DRAFT_TOKENS)[policy])
    return {side: [counts[side]["synchronisations"] for counts in found] for side in SIDES}


def planned(rounds: Rounds) -> dict[str, dict[str, float]]:
    """What the planner reckons with, by side and for each pass of its model: rejection, and blocks of a fixed
    length. The tensors that a layer reads and writes stay what the file says: they were counted at commit
    ea24f3e3."""
    known = json.loads(PLANNED.read_text(encoding="utf-8"))
    per_layer = kernels_of_family("llama")["per_layer"]
    steady = rounds.steady("rejection", policies(MAX_DRAFT_TOKENS)["fixed"])
    num_layers = rounds.harness.runners[0].model.config.num_hidden_layers
    found = {}
    for side in SIDES:
        total = sum((counts[side] for counts in steady), Counter[str]())
        num_passes = total["replayed passes"] + total["eager passes"]
        of_pass = {name: total[name] / num_passes for name in MEANS}
        outside = of_pass.pop("replayed kernels") - num_layers * per_layer
        found[side] = known[side] | {
            "kernels_per_layer": float(per_layer),
            "kernels_outside_of_layers": round(outside, 2),
            **{name.replace(" ", "_"): round(number, 2) for name, number in of_pass.items()},
        }
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.counts", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {PLANNED.relative_to(REPOSITORY)}")
    options = parser.parse_args(arguments)
    if (reason := device.why_not()) is not None:
        sys.stderr.write(f"no device can be faked here: {reason}\n")
        return 1
    device.prepare()
    device.install(graphs.NUM_WARMUPS)
    found = planned(Rounds())
    if options.write:
        PLANNED.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{json.dumps(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
