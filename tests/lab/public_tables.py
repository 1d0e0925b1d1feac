"""The planner beside published figures of other engines: ``python -m tests.lab.public_tables``.

``public.json`` has the figures and where they are from. Every figure of the hardware is the planner's; none
is fitted. What differs from a run of this engine is said in ``NOTES``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from transformers import LlamaConfig

from specdist.lab.plan.hardware import GB, GPUS
from specdist.lab.plan.memory import fit
from specdist.lab.plan.roofline import DRAFT_PASS, Placement, roofline_costs
from specdist.lab.plan.simulate import PREFILL_CHUNK_TOKENS, Mode, Settings, predict
from specdist.models.quantized.quantized import Quantization
from specdist.models.sizes.sizes import ModelSize, model_size
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.table import Table

FIGURES = Path(__file__).with_name("public.json")
HALF_BYTES = 2
LLAMA = {"vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
         "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131_072}  # fmt: skip
MODELS = {
    "Llama-3.3-70B": LLAMA,
    "Llama-2-70B": LLAMA | {"vocab_size": 32_000, "max_position_embeddings": 4096},
    "Llama-3.2-1B": LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                             "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True},
}  # fmt: skip
DRAFT = "Llama-3.2-1B"
GREEDY = SamplingSettings(temperature=0.0)
# gpt-fast's own defaults.
PROMPT_TOKENS, OUTPUT_TOKENS = 5, 200
MAX_DRAFT_TOKENS = 16
# The others have kernels of their own for short sums over ranks.
BY_NCCL = ("nano-PEARL, plain", "nano-PEARL, 1B on one more GPU", "gpt-fast")
UNITS = {
    "tokens_per_s_per_gpu": "tokens/s per GPU", "tokens_per_s": "tokens/s",
    "bandwidth_gb_per_s": "GB/s per GPU",
}  # fmt: skip
NOTES = (
    "FP8: their kernels before the products round inputs, with the checkpoint's scales, and keys and values "
    "are FP8, too (an assumption for NIM). *This engine* rounds with kernels of its own, with scales that "
    "it finds on every rank; its keys and values are those of `--cache_dtype float8`. nano-PEARL and "
    "gpt-fast sum over ranks by NCCL.",
    "Without a batch size as many sequences run as memory holds; of a larger one, no more.",
    "nano-PEARL's acceptance is not published: {acceptance:.2f} gives its first row, which therefore says "
    "nothing.",
)


@dataclass(frozen=True)
class Case:
    """A published row."""

    found: dict[str, Any]

    @property
    def drafts(self) -> bool:
        return "one more GPU" in self.found["engine"]

    @property
    def unit(self) -> str:
        return next(
            name
            for name in ("tokens_per_s_per_gpu", "tokens_per_s", "bandwidth_gb_per_s")
            if name in self.found
        )

    @property
    def published(self) -> float:
        return float(self.found[self.unit])

    @property
    def lengths(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.found.get("prompt_tokens", PROMPT_TOKENS),
            "output_tokens": self.found.get("output_tokens", OUTPUT_TOKENS),
        }

    def predicted(self, acceptance: float = 0.0, *, is_ours: bool = False) -> float:
        """In the row's unit; ``is_ours``: of this engine on the same GPUs."""
        tp_size, gpu = self.found["tp"], GPUS[self.found["gpu"]]
        is_narrow = self.found["weights"] == "fp8"
        target = size_of(self.found["model"], is_narrow)
        draft = size_of(DRAFT) if self.drafts else None
        prompt_tokens, output_tokens = self.lengths.values()
        mode: Mode = "asynchronous" if draft is not None else "target only"
        room = fit(
            target,
            draft,
            gpu,
            mode,
            tp_size=tp_size,
            row_tokens=prompt_tokens + output_tokens,
            settings=GREEDY,
        )
        num_rows = min(room.most_rows, self.found.get("batch", room.most_rows))
        of_target = Placement(
            model=target, gpu=gpu, tp_size=tp_size, context_tokens=prompt_tokens + output_tokens / 2,
            sampling=GREEDY, rounds_apart=is_ours,
            reads_peers=is_ours or self.found["engine"] not in BY_NCCL,
        )  # fmt: skip
        of_draft = draft and dataclasses.replace(
            of_target, model=draft, tp_size=1, counts=DRAFT_PASS, drafts=True
        )
        costs = roofline_costs(
            of_target, of_draft, num_rows=num_rows, most_draft_rows=2 * num_rows,
            most_tokens=num_rows * (MAX_DRAFT_TOKENS + 1) + PREFILL_CHUNK_TOKENS,
        )  # fmt: skip
        tokens_per_s = max(
            predict(
                costs,
                Settings(mode=mode, num_rows=num_rows, num_draft_tokens=length, acceptance=acceptance),
                **self.lengths,
            ).tokens_per_s
            for length in (range(1, MAX_DRAFT_TOKENS + 1) if self.drafts else [0])
        )
        per_gpu = {
            "tokens_per_s_per_gpu": 1 / tp_size,
            "bandwidth_gb_per_s": target.streamed_bytes(tp_size) / GB,
        }
        return tokens_per_s * per_gpu.get(self.unit, 1.0)


@dataclass(frozen=True)
class Prediction:
    """In the row's unit, and what it would be of this engine; None of the row that says the acceptance."""

    case: Case
    acceptance: float | None
    planner: float | None = None
    ours: float | None = None

    @property
    def error(self) -> float | None:
        return None if self.planner is None else self.planner / self.case.published - 1


@cache
def size_of(name: str, is_narrow: bool = False) -> ModelSize:
    quantization = Quantization(request="float8") if is_narrow else None
    size = model_size(name, LlamaConfig(**MODELS[name]), HALF_BYTES, quantization=quantization)
    return dataclasses.replace(size, has_float8_cache=is_narrow)


def cases() -> list[Case]:
    return [Case(row) for row in json.loads(FIGURES.read_text(encoding="utf-8"))["rows"]]


def acceptance_of(case: Case) -> float:
    """The one with which the prediction is what was published."""
    below, above = 0.0, 1.0
    for _ in range(12):
        middle = (below + above) / 2
        below, above = (middle, above) if case.predicted(middle) < case.published else (below, middle)
    return below


@cache
def predictions() -> list[Prediction]:
    """Of each row that names its GPUs."""
    acceptance, found = None, []
    for case in cases():
        if case.found["gpu"] is None:
            continue
        if case.drafts and acceptance is None:
            acceptance = acceptance_of(case)
            found.append(Prediction(case, acceptance))
            continue
        predicted, ours = (case.predicted(acceptance or 0.0, is_ours=is_ours) for is_ours in (False, True))
        found.append(Prediction(case, acceptance if case.drafts else None, predicted, ours))
    return found


def markdown() -> str:
    rows = [
        {
            "engine": one.case.found["engine"],
            "model": f"{one.case.found['model']}, {one.case.found['weights']}",
            "GPUs": f"{one.case.found['tp']} {one.case.found['gpu']}",
            "tokens": "{prompt_tokens} + {output_tokens}".format(**one.case.lengths),
            "sequences": str(one.case.found.get("batch", "most")),
            "published": f"{one.case.published:,.0f} {UNITS[one.case.unit]}",
            "planner": None if one.planner is None else f"{one.planner:,.0f}",
            "error": None if one.error is None else f"{one.error:+.0%}",
            "this engine": None if one.ours is None else f"{one.ours:,.0f}",
        }
        for one in predictions()
    ]
    errors = [one.error for one in predictions() if one.error is not None]
    acceptance = next(one.acceptance for one in predictions() if one.acceptance is not None)
    summary = (
        f"Of {len(errors)} predictions the median error is {median(map(abs, errors)):.0%}, the largest "
        f"{max(errors, key=abs):+.0%}."
    )
    notes = " ".join(NOTES).format(acceptance=acceptance)
    return "\n\n".join([summary, Table.of(rows, num_names=5).markdown(), notes])


if __name__ == "__main__":
    sys.stdout.write(f"{markdown()}\n")
