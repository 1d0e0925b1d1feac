"""The measurements of counts.py: small engines and single passes on the fake device.

Kernels are counted by what the device is given, whatever their size. So a tiny model of two and of four
layers tells the kernels of a layer, and a model of the true width with one and with two layers the bytes of
any number of layers.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specdist.engine.assembly import PAGE_SIZE
from specdist.engine.engine import Engine
from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.pages import PageUpdates
from specdist.models.families.adapters import use_paged_attention
from specdist.models.passes.runner import ModelRunner
from specdist.policies import LengthPolicy, Sprinter
from tests.engine.harness import Harness, requests_for
from tests.engine.heads import random_head
from tests.gpu.engine_runs import GPU, RULES, prompts
from tests.gpu.observing import SIDES, Observer
from tests.gpu.policies import policies
from tests.gpu.tensor import FakeDevice
from tests.gpu.traffic import CACHE, KINDS, PAGED_ATTENTION, REST, WEIGHTS, address
from tests.models.families import VOCAB_SIZE, noisy_copy, tiny_model

# Rounds whose synchronisations are counted.
NUM_DRAFT_TOKENS, NUM_ROWS, NUM_NEW_TOKENS = 4, 4, 32
# Runs whose replays are counted: as many tokens as one pass takes on a GPU, and a third of the rows wait.
MAX_DRAFT_TOKENS, PASS_TOKENS, ROWS_PER_SLOT = 20, 2048, 4 / 3
SHORTEST_PROMPT, LONGEST_PROMPT = 4, 48
NUM_RUN_TOKENS, NUM_RECORDING_RUNS = 40, 3
NUM_LAYERS = 2
# The pass whose bytes are counted: as in reviews of the GPU path.
NUM_PASS_ROWS, NUM_KEYS, BLOCK_TOKENS = 32, 1100, 6


@dataclass(frozen=True)
class Shape:
    """A model's share on one of ``tp_size`` ranks, which holds that part of its heads and widths."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = 128_256
    tp_size: int = 1

    def config(self, num_layers: int) -> LlamaConfig:
        """Input and output embeddings are tied to save memory here; a pass reads lines of the one and all of
        the other, tied or not."""
        return LlamaConfig(
            vocab_size=self.vocab_size // self.tp_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size // self.tp_size,
            num_hidden_layers=num_layers,
            num_attention_heads=self.num_heads // self.tp_size,
            num_key_value_heads=self.num_kv_heads // self.tp_size,
            head_dim=self.head_dim,
            tie_word_embeddings=True,
        )


# Llama 3.2 1B, 3.1 8B and 3.3 70B.
SHAPES = {
    "1B": Shape(16, 2048, 8192, 32, 8, 64),
    "8B": Shape(32, 4096, 14_336, 32, 8, 128),
    "70B, tp 4": Shape(80, 8192, 28_672, 64, 8, 128, tp_size=4),
}


def kernels_of_family(family: str) -> dict[str, float]:
    """Kernels of a steady pass in bfloat16: per layer, and those outside of layers, replayed and eager."""
    counts = {}
    for num_layers in (2, 4):
        overrides = {"num_hidden_layers": num_layers}
        if family == "gpt2":
            overrides = {"n_layer": num_layers}
        elif family == "gpt_neo":
            overrides = {
                "num_layers": num_layers,
                "attention_types": [[["local", "global"], num_layers // 2]],
            }
        model = tiny_model(family, **overrides).bfloat16().to(GPU)  # type: ignore[arg-type]
        counts[num_layers] = _steady_pass(model, 4, num_keys=20, num_new=1)
    per_layer = (counts[4]["replayed kernels"] - counts[2]["replayed kernels"]) / 2
    return {
        "per_layer": per_layer,
        "outside_of_layers": counts[2]["replayed kernels"] - 2 * per_layer,
        "eager": counts[2]["eager kernels"],
    }


def bytes_of_shape(shape: Shape, passes: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """By their names, bytes of passes of so many tokens per row, over those of weights and live cache."""
    one, two = (_bytes(shape, num_layers, passes.values()) for num_layers in (1, 2))
    return {
        name: _of_all_layers(shape, new, *counts)
        for (name, new), *counts in zip(passes.items(), one, two, strict=True)
    }


def _of_all_layers(
    shape: Shape, num_new: int, one: Mapping[str, int], two: Mapping[str, int]
) -> dict[str, float]:
    """From the bytes with one layer and with two."""
    per_layer = {kind: two[kind] - one[kind] for kind in KINDS}
    moved = {kind: one[kind] + (shape.num_layers - 1) * per_layer[kind] for kind in KINDS}
    cache_per_key = 2 * 2 * shape.num_layers * shape.num_kv_heads // shape.tp_size * shape.head_dim
    floor = moved[WEIGHTS] + NUM_PASS_ROWS * NUM_KEYS * cache_per_key
    return {
        "floor_bytes": floor,
        "moved_bytes": sum(moved.values()),
        "weights_bytes": moved[WEIGHTS],
        "attended_cache_bytes": moved[CACHE],
        "other_bytes": moved[REST],
        "other_bytes_per_token_and_layer": per_layer[REST] / (NUM_PASS_ROWS * num_new),
        "ratio": round(sum(moved.values()) / floor, 4),
    }


def _bytes(shape: Shape, num_layers: int, passes: Iterable[int]) -> list[Counter[str]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config(num_layers), dtype=torch.bfloat16)
    rotary = model.model.rotary_emb.__class__(model.config)
    model = model.to_empty(device="cpu")
    model.model.rotary_emb = rotary
    for parameter in model.parameters():
        parameter.data.zero_()
    model.tie_weights()
    model = model.to(GPU)
    counted = [
        _steady_pass(model, NUM_PASS_ROWS, num_keys=NUM_KEYS, num_new=new, weighs=True) for new in passes
    ]
    return [Counter({kind: counts[f"bytes of {kind}"] for kind in KINDS}) for counts in counted]


def _steady_pass(
    model: Any, num_rows: int, *, num_keys: int, num_new: int, weighs: bool = False
) -> Counter[str]:
    """The last ``num_new`` tokens of every row, in a pass whose shape has been recorded before."""
    use_paged_attention(model)
    runner = ModelRunner(model, GPU)
    runner.reuses_logits = num_new > 1  # as in the target, which verifies blocks
    num_pages = -(-num_keys // PAGE_SIZE)
    runner.allocate(
        num_pages=num_rows * num_pages, page_size=PAGE_SIZE, num_slots=num_rows,
        max_seq_len=num_pages * PAGE_SIZE,
    )  # fmt: skip
    slots_R, indices_P = np.arange(num_rows), np.arange(num_pages)
    runner.update_pages(
        PageUpdates(
            np.repeat(slots_R, num_pages), np.tile(indices_P, num_rows), np.arange(num_rows * num_pages)
        )
    )
    batch = FlatBatch(
        np.full(num_rows * num_new, 5),
        np.repeat(slots_R, num_new),
        np.tile(np.arange(num_keys - num_new, num_keys), num_rows),
    )
    observer = Observer(model, weighs=weighs)
    weights = {address(weight) for weight in model.parameters()}
    with observer.active(), _without_products(weights) if weighs else contextlib.nullcontext():
        runner.forward(batch, range(len(batch)))
        before = observer.snapshot()
        runner.forward(batch, range(len(batch)))
    counts = observer.since(before)["target"]
    assert counts["replayed passes"] == 1 and not counts["eager passes"], counts
    return counts


@contextlib.contextmanager
def _without_products(weights: Collection[int]) -> Iterator[None]:
    """Products with weights, and attention, are counted and give zeros: the host would take seconds for
    each."""
    run_on_device = FakeDevice._run_on_device

    def run(
        device: Any, function: Any, operator: Any, args: Any, kwargs: Any, tensors: Any, index: Any
    ) -> Any:
        if operator.name == PAGED_ATTENTION:
            function = _Zeros(lambda queries, *_: queries.shape)
        elif operator.name == "mm" and address(args[1]) in weights:
            function = _Zeros(lambda left, right: (len(left), right.shape[1]))
        return run_on_device(device, function, operator, args, kwargs, tensors, index)

    with patch.object(FakeDevice, "_run_on_device", run):
        yield


class _Zeros:
    """In an operator's place: zeros of the shape, like the first argument."""

    namespace = "aten"

    def __init__(self, shape: Callable[..., Sequence[int]]) -> None:
        self._shape = shape

    def __call__(self, first: torch.Tensor, *args: Any, **_: Any) -> torch.Tensor:
        return first.new_zeros(self._shape(first, *args))


class Runs:
    """Runs of one pair of models at one batch size, again and again in the same engine."""

    def __init__(self, *, num_rows: int, cap: int, num_new_tokens: int, has_head: bool = False) -> None:
        target = tiny_model("llama", num_hidden_layers=NUM_LAYERS).bfloat16()
        draft = noisy_copy(target)
        self.num_rows = num_rows
        self.harness = Harness(
            target,
            draft,
            device=GPU,
            policy=policies(cap)["specdecpp" if has_head else "fixed"](),
            head=random_head(draft) if has_head else None,
            max_new_tokens=num_new_tokens,
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(PASS_TOKENS, num_rows * (cap + 1)),
            max_seq_len=LONGEST_PROMPT + num_new_tokens + cap + 1,
            num_pages=num_rows * (LONGEST_PROMPT + num_new_tokens + cap + 8) // 4 + 8,
        )
        self.observer = Observer(*(runner.model for runner in self.harness.runners))

    def run(self, rule: str, policy: Callable[[], LengthPolicy], rows: Sequence[list[int]]) -> list[Any]:
        """The counts of every round, each with whether it was a steady one: all rows decode, and no prompt
        joins."""
        rounds: list[tuple[bool, dict[str, Counter[str]]]] = []
        harness, observer, one_round = self.harness, self.observer, Engine.step

        def counted(engine: Engine) -> Generator[Any, None, bool]:
            before = observer.snapshot()
            is_over = yield from one_round(engine)
            plan = engine.round.plan
            goes_on = all(sequence.finish_reason is None for sequence in plan.decoding)
            steady = len(plan.decoding) == self.num_rows and not plan.chunks and goes_on
            if not is_over:
                rounds.append((steady, observer.since(before)))
            return is_over

        harness.settings, harness.policy = RULES[rule], policy()
        harness.trusts_draft = isinstance(harness.policy, Sprinter)
        with observer.active(), patch.object(Engine, "step", counted):
            harness.generate(requests_for(rows))
        return rounds


def steady_rounds(runs: Runs, rule: str, policy: Callable[[], LengthPolicy]) -> dict[str, dict[str, float]]:
    """By side, what a steady round takes on average, and the most synchronisations of one."""
    rows = prompts((20, 9, 14, 12)[:NUM_ROWS])
    runs.run(rule, policy, rows)
    found = [counts for is_steady, counts in runs.run(rule, policy, rows) if is_steady]
    found = [counts for counts in found if not any(counts[name]["graphs"] for name in SIDES)]
    assert found, "no steady round"
    return {
        name: {
            **{
                key: round(sum(counts[name][key] for counts in found) / len(found), 2)
                for key in ("synchronisations", "copies", "replays", "replayed kernels", "eager kernels")
            },
            "passes": round(
                sum(counts[name][f"{how} passes"] for counts in found for how in ("eager", "replayed"))
                / len(found),
                2,
            ),
            "most synchronisations": max(counts[name]["synchronisations"] for counts in found),
        }
        for name in SIDES
    }


def replay_share(runs: Runs, policy: Callable[[], LengthPolicy]) -> dict[str, float]:
    """The share of passes of both models that are replays, once earlier runs have recorded most shapes; every
    run has other prompts.

    ``share`` leaves out rounds in which a shape was recorded, as do the draft's synchronisations;
    ``share_with_recordings`` has them, with the five eager passes that recording one takes.
    """
    rng = np.random.default_rng(runs.num_rows)
    found: list[tuple[Counter[str], Counter[str]]] = []
    of_draft: Counter[str] = Counter()
    for _ in range(NUM_RECORDING_RUNS + 1):
        of_draft.clear()
        lengths = rng.integers(SHORTEST_PROMPT, LONGEST_PROMPT, size=round(ROWS_PER_SLOT * runs.num_rows) + 1)
        rows = [rng.integers(2, VOCAB_SIZE, size=length).tolist() for length in lengths]
        total, steady = Counter[str](), Counter[str]()
        for _, counts in runs.run("rejection", policy, rows):
            both = sum((counts[name] for name in SIDES), Counter[str]())
            if not both["graphs"]:
                of_draft.update(rounds=1, waits=counts["draft"]["synchronisations"])
            total += both
            steady += Counter() if both["graphs"] else both
        found.append((total, steady))
    total, steady = found[-1]
    return {
        "share": _share(steady),
        "share_with_recordings": _share(total),
        "share_of_first_run": _share(found[0][0]),
        "graphs": sum(total["graphs"] for total, _ in found),
        "graphs_of_last_run": total["graphs"],
        "draft_synchronisations_per_round": round(of_draft["waits"] / max(1, of_draft["rounds"]), 2),
    }


def _share(counts: Counter[str]) -> float:
    replayed = counts["replayed passes"]
    return round(replayed / max(1, replayed + counts["eager passes"]), 4)
