"""The planner beside what other engines have published: ``python -m tests.lab.plan.public`` writes the tables
of jobs/benchmarks/tables/plan-validated.md.

``public.json`` has the figures. The GPUs are the planner's; what their engines do otherwise is here. Of each
kind of row every third is held out of all fits: the first, fourth, ... by the SHA-256 of the row.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoConfig

from specdist.lab.plan.hardware import EXPERTS_RATE, GB, GPUS, Gpu, Rates
from specdist.lab.plan.job import open_model
from specdist.lab.plan.memory import fit
from specdist.lab.plan.roofline import DRAFT_PASS, Placement, roofline_costs
from specdist.lab.plan.simulate import PREFILL_CHUNK_TOKENS, Mode, Settings, predict
from specdist.models.quantized.quantized import Quantization
from specdist.models.quantized.quantized_weights import LayerFormat
from specdist.models.sizes.sizes import ModelSize, model_size
from specdist.policies.formulas import tokens_per_call
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.table import Table
from tests.ranks import REPOSITORY
from tests.readme import write_block

FOUND = json.loads(Path(__file__).with_name("public.json").read_text(encoding="utf-8"))
PAGE = REPOSITORY / "jobs/benchmarks/tables/plan-validated.md"

# Their products of FP8 run at twice the rate of 16 bits, as the data sheets say; those of FP4, whose peak is
# four times it, and attention of prompts at these: fitted to published figures.
FP8_RATE, FP4_RATE, THEIR_ATTENTION_RATE = 2.0, 3.4, 0.75
# Where each GPU has its own sequences and a part of the experts ("dep"), all wait for the slowest: fitted to
# published figures. Every layer's rows go to all and come back, 16 bits each way.
SLOWEST, DISPATCH_BYTES = 1.35, 4
# Of TensorRT-LLM's benchmark by the prompts' length (perf-overview.md): requests of a run, on all GPUs.
REQUESTS = {1000: 3000, 1024: 1500, 8192: 1500, 32768: 1000}
GREEDY = SamplingSettings(temperature=0.0)
# gpt-fast's own defaults.
PROMPT_TOKENS, OUTPUT_TOKENS = 5, 200
# Contexts of the gains of drafts, and draft tokens of EAGLE-3, which are not published.
GAIN_CONTEXT, EAGLE_TOKENS = 700, 3
LAYER_FORMATS = {
    "fp8": LayerFormat(numbers="float8", rows=1, columns=None, activations="static"),
    # A group's scale takes a byte.
    "fp4": LayerFormat(numbers="float4", rows=1, columns=16, has_powers=True),
}
UNITS = {"tokens_per_s_per_gpu": " per GPU", "tokens_per_s": "", "bandwidth_gb_per_s": " GB/s per GPU"}


@dataclass(frozen=True, kw_only=True)
class TheirPlacement(Placement):
    """A model in another engine. ``token_s``: that each token takes beside what it does in this one;
    ``slowest``: how much longer the slowest GPU takes."""

    token_s: float = 0.0
    slowest: float = 1.0

    def pass_s(self, num_tokens: float, num_rows: float, num_logits: float | None = None) -> float:
        return self.slowest * (super().pass_s(num_tokens, num_rows, num_logits) + num_tokens * self.token_s)

    def prompt_s(self, num_tokens: float) -> float:
        return self.slowest * (super().prompt_s(num_tokens) + num_tokens * self.token_s)


@dataclass(frozen=True)
class Run:
    """A published row of tokens per second."""

    found: dict[str, Any]

    @property
    def weights(self) -> str:
        return str(self.found["weights"]).split()[0].rstrip(",")

    @property
    def drafts(self) -> bool:
        return "one more GPU" in self.found["engine"]

    @property
    def unit(self) -> str:
        return next(name for name in UNITS if name in self.found)

    @property
    def published(self) -> float:
        return float(self.found[self.unit])

    @property
    def lengths(self) -> tuple[int, int]:
        """Of prompts and completions."""
        return self.found.get("prompt_tokens", PROMPT_TOKENS), self.found.get("output_tokens", OUTPUT_TOKENS)

    @property
    def has_float8_cache(self) -> bool:
        """By the benchmark's options and NVIDIA's checkpoints; of the others assumed."""
        return self.weights in ("fp8", "fp4") or (self.weights == "mxfp4" and self.found["gpu"] == "b200")

    @property
    def gpu(self) -> Gpu:
        """With their products; those of MXFP4 have inputs of 16 bits before Blackwell."""
        factors = {"fp8": FP8_RATE, "fp4": FP4_RATE, "mxfp4": FP8_RATE if self.has_float8_cache else 1.0}
        return replace(
            GPUS[self.found["gpu"]],
            products={"float8": Rates(1.0, FP8_RATE), "float4": Rates(1.0, FP4_RATE)},
            attention_rate=THEIR_ATTENTION_RATE * (FP8_RATE if self.has_float8_cache else 1.0),
            experts_rate=EXPERTS_RATE * factors.get(self.weights, 1.0),
        )

    def layouts(self) -> list[tuple[int, int]]:
        """Ranks of a target, and GPUs that share experts beside their own sequences; where it is not said,
        all of which the best is taken."""
        layout = self.found.get("layout", f"tp{self.found['tp']}" if "tp" in self.found else "")
        if layout:
            number = int(layout.lstrip("dept"))
            return [(1, number) if layout.startswith("dep") else (number, 1)]
        return [(tp_size, 1) for tp_size in (1, 2, 4, 8)]

    def predicted(self, acceptance: float = 0.0) -> float:
        """In the row's unit."""
        return max(self._predicted(*layout, acceptance) for layout in self.layouts())

    def _predicted(self, tp_size: int, num_sharing: int, acceptance: float) -> float:
        prompt_tokens, output_tokens = self.lengths
        target = size_of(self.found["model"], self.weights, self.has_float8_cache)
        token_s, gpu = 0.0, self.gpu
        if num_sharing > 1:
            own = [replace(each, num_experts=each.num_experts // num_sharing) for each in target.experts]
            target = replace(target, experts=tuple(own))
            rows = sum(each.num_layers for each in own) * (num_sharing - 1) * target.hidden_size
            token_s = gpu.send_s(DISPATCH_BYTES * rows)
        # TensorRT-LLM keeps all tokens of windowed layers.
        held = replace(target, layers=tuple(replace(layer, window=None) for layer in target.layers))
        draft = size_of("Llama-3.2-1B") if self.drafts else None
        mode: Mode = "asynchronous" if draft is not None else "target only"
        row_tokens = prompt_tokens + output_tokens
        room = fit(held, draft, gpu, mode, tp_size=tp_size, row_tokens=row_tokens, settings=GREEDY).most_rows
        num_rows = min(room, self.found.get("batch", room))
        if not num_rows:
            return 0.0
        by_nccl = self.found["engine"].startswith(("nano-PEARL", "gpt-fast"))
        placed = TheirPlacement(
            model=target, gpu=gpu, tp_size=tp_size, context_tokens=prompt_tokens + output_tokens / 2,
            prompt_tokens=prompt_tokens, sampling=GREEDY, rounds_apart=False, reads_peers=not by_nccl,
            token_s=token_s, slowest=SLOWEST if num_sharing > 1 else 1.0,
        )  # fmt: skip
        lengths = range(1, 17) if draft is not None else [0]

        def rate(num_rows: int) -> float:
            drafting = None if draft is None else own_placement(placed, draft)
            costs = roofline_costs(
                placed, drafting, num_rows=num_rows, most_draft_rows=2 * num_rows,
                most_tokens=num_rows * (1 + max(lengths)) + PREFILL_CHUNK_TOKENS,
            )  # fmt: skip
            settings = [
                Settings(mode=mode, num_rows=num_rows, num_draft_tokens=length, acceptance=acceptance)
                for length in lengths
            ]
            about = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
            return max(predict(costs, each, **about).tokens_per_s for each in settings)

        tokens_per_s = rate(num_rows)
        if self.found["engine"] == "TensorRT-LLM":
            # A run is of so many requests, the last of which are fewer at a time.
            requests = -(-REQUESTS[prompt_tokens] // num_sharing)
            full, rest = divmod(requests, num_rows)
            seconds = full * num_rows / tokens_per_s + (rest / rate(rest) if rest else 0.0)
            tokens_per_s = requests / seconds
        streamed = target.streamed_bytes(tp_size) / GB
        return tokens_per_s * {"tokens_per_s_per_gpu": 1 / tp_size, "tokens_per_s": 1.0}.get(
            self.unit, streamed
        )


@dataclass(frozen=True)
class Gain:
    """A published row of what a draft gives, by the number of sequences."""

    found: dict[str, Any]

    def predicted(self, num_rows: int) -> float:
        """SGLang is assumed to write a recurrent layer's state of every candidate; this engine does not."""
        what, gpu = self.found["what"], GPUS[self.found["gpu"]]
        model = next((name for name in FOUND["models"] if name in what), "Qwen3.6-35B-A3B")
        target, draft = size_of(model), drafter(model, "EAGLE-3" if "EAGLE-3" in what else "DFlash")
        placed = TheirPlacement(
            model=target, gpu=gpu, tp_size=4 if "4 GPUs" in what else 1,
            context_tokens=GAIN_CONTEXT, sampling=GREEDY,
        )  # fmt: skip
        length = draft.num_block_tokens or EAGLE_TOKENS
        state_s = target.states.state_bytes(placed.tp_size) / gpu.sustained_bytes_per_s
        settings = Settings(
            mode="colocated",
            num_rows=num_rows,
            num_draft_tokens=length,
            acceptance=bisected(lambda rate: tokens_per_call(rate, length), self.found["accepted_per_round"]),
        )
        most = {"most_tokens": num_rows * (length + 1), "most_draft_rows": 4 * num_rows}
        verifying = replace(placed, token_s=state_s)
        drafted, plain = (
            roofline_costs(one, other, num_rows=num_rows, **most)
            for one, other in ((verifying, own_placement(placed, draft)), (placed, None))
        )
        alone = replace(settings, mode="target only", num_draft_tokens=0)
        return predict(drafted, settings).tokens_per_s / predict(plain, alone).tokens_per_s


def own_placement(target: TheirPlacement, draft: ModelSize) -> Placement:
    """Of a draft."""
    placed = replace(target, model=draft, tp_size=1, counts=DRAFT_PASS, drafts=True)
    return replace(placed, token_s=0.0)


def bisected(rising: Callable[[float], float], wanted: float) -> float:
    """Where between 0 and 1 a rising function has a value."""
    below, above = 0.0, 1.0
    for _ in range(14):
        middle = (below + above) / 2
        below, above = (middle, above) if rising(middle) < wanted else (below, middle)
    return below


@cache
def size_of(name: str, weights: str = "bf16", has_float8_cache: bool = False) -> ModelSize:
    family, sizes = FOUND["models"][name]
    quantization = None
    if weights == "mxfp4":
        quantization = Quantization(has_mxfp4_experts=True)
    elif weights in LAYER_FORMATS:
        quantization = Quantization(groups=((("Linear",), LAYER_FORMATS[weights]),), ignored=("re:.*gate$",))
    size = model_size(name, AutoConfig.for_model(family, **sizes), 2, quantization=quantization)
    size = replace(size, product="float4") if weights == "fp4" else size  # type: ignore[arg-type]
    return replace(size, has_float8_cache=has_float8_cache)


@cache
def drafter(target: str, kind: str) -> ModelSize:
    """As wide as the target: an EAGLE-3 layer, or a DFlash of five layers and blocks of 16."""
    family, sizes = FOUND["models"][target]
    text = AutoConfig.for_model(family, **sizes).get_text_config()
    width, num_layers = text.hidden_size, text.num_hidden_layers
    layers = {
        "vocab_size": text.vocab_size, "hidden_size": width, "intermediate_size": 3 * width, "head_dim": 128,
        "num_attention_heads": width // 128, "num_key_value_heads": 4, "max_position_embeddings": 40_960,
    }  # fmt: skip
    config = dict(FOUND["drafters"][kind])
    if kind == "EAGLE-3":
        config |= layers
    else:
        config["transformer_layer_config"] = config["transformer_layer_config"] | layers
        config["aux_hidden_state_layer_ids"] = [1 + index * (num_layers - 3) // 4 for index in range(5)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return open_model("--draft", folder, "auto")[0]


@dataclass(frozen=True)
class Prediction:
    """One of a row's figures, published and predicted. ``what``: its unit, or the sequences of a gain."""

    row: dict[str, Any]
    what: str
    published: float
    planner: float

    @property
    def error(self) -> float:
        return self.planner / self.published - 1

    @property
    def is_held_out(self) -> bool:
        return kind_of(self.row) == "gains" or digest(self.row) in held_out()

    def line(self) -> dict[str, str | int | None]:
        """Of a table."""
        row = self.row
        if kind_of(row) == "gains":
            about = {"draft": row["what"], "GPUs": row["gpu"], "sequences": self.what}
            digits = ".2f"
        else:
            run, digits = Run(row), ",.0f"
            about = {
                "engine": row["engine"].partition(",")[0],
                "model": f"{row['model']}, {run.weights}{', drafted' * run.drafts}",
                "GPUs": f"{row.get('layout', row.get('tp', '-'))} {row['gpu']}",
                "tokens": "{} + {}".format(*run.lengths),
                "sequences": str(row.get("batch", "most")),
            }
        return about | {
            "published": f"{self.published:{digits}}{UNITS.get(self.what, '')}",
            "planner": f"{self.planner:{digits}}",
            "error": f"{self.error:+.0%}",
            "in the fits": "held out" if self.is_held_out else "yes",
        }


def kind_of(row: dict[str, Any]) -> str:
    if "gain_by_batch" in row:
        return "gains"
    return "experts" if row["model"].startswith(("gpt-oss", "Qwen3", "DeepSeek", "Mixtral")) else "dense"


def digest(row: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


@cache
def held_out() -> frozenset[str]:
    """Nothing is fitted to gains."""
    kinds = [
        sorted(digest(row) for row in FOUND["rows"] if kind_of(row) == kind) for kind in ("dense", "experts")
    ]
    return frozenset(name for names in kinds for name in names[::3])


def is_predicted(row: dict[str, Any]) -> bool:
    """Whether a row names its GPU, its model, the lengths of its texts, and what is accepted of drafts."""
    if "gain_by_batch" in row:
        return row["accepted_per_round"] is not None
    return row["gpu"] in GPUS and row["model"] in FOUND["models"] and row.get("prompt_tokens", 1) is not None


@cache
def predictions() -> list[Prediction]:
    return [one for row in FOUND["rows"] if is_predicted(row) for one in _predictions_of(row)]


def _predictions_of(row: dict[str, Any]) -> Iterator[Prediction]:
    if "gain_by_batch" in row:
        for batch, gain in row["gain_by_batch"].items():
            yield Prediction(row, batch, gain, Gain(row).predicted(int(batch)))
        return
    run = Run(row)
    acceptance = nano_pearl_acceptance() if run.drafts else 0.0
    if not (run.drafts and row["batch"] == 1):
        yield Prediction(row, run.unit, run.published, run.predicted(acceptance))


@cache
def nano_pearl_acceptance() -> float:
    """It is not published: the one that gives the first row with a draft, which is not a prediction."""
    run = next(run for run in map(Run, FOUND["rows"][:15]) if run.drafts)
    return bisected(run.predicted, run.published)


GROUPS: dict[str, Callable[[Prediction], bool]] = {
    "dense models": lambda one: kind_of(one.row) == "dense",
    "the same, without MLPerf": lambda one: kind_of(one.row) == "dense" and "MLPerf" not in one.row["engine"],
    "experts": lambda one: kind_of(one.row) == "experts",
    "prompts of 32,768 tokens": lambda one: one.row.get("prompt_tokens") == 32768,
    "gains of DFlash on experts": lambda one: kind_of(one.row) == "gains" and "EAGLE" not in one.row["what"],
    "gains of EAGLE-3 on experts": lambda one: "EAGLE" in one.row.get("what", ""),
}


def errors(group: str, *, is_held_out: bool) -> list[float]:
    """Of a group's predictions, without signs."""
    found = filter(GROUPS[group], predictions())
    return [abs(one.error) for one in found if one.is_held_out is is_held_out]


def markdown() -> str:
    summary = []
    for group in GROUPS:
        line: dict[str, str | int | None] = {"rows": group}
        for name, is_held_out in (("fitted", False), ("held out", True)):
            found = errors(group, is_held_out=is_held_out)
            figures = (f"{median(found):.0%}", f"{max(found):.0%}") if found else ("-", "-")
            line |= {name: len(found), f"{name}: median": figures[0], f"{name}: worst": figures[1]}
        summary.append(line)
    tables = [Table.of(summary)]
    for is_gain in (False, True):
        found = [one for one in predictions() if (kind_of(one.row) == "gains") is is_gain]
        tables.append(Table.of([one.line() for one in found], num_names=3 if is_gain else 5))
    return "\n\n".join(table.markdown() for table in tables)


if __name__ == "__main__":
    write_block(PAGE, "published", markdown())
