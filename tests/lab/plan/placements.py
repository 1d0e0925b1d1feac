"""Where a draft should be, by the planner's closed form: ``python -m tests.lab.plan.placements`` writes the
table of jobs/benchmarks/tables/placements.md."""

from __future__ import annotations

from collections.abc import Iterator

from specdist.lab.plan.advise import Planner, Site, Work
from specdist.lab.plan.hardware import GPUS
from specdist.lab.plan.job import open_model
from specdist.lab.plan.simulate import OWN_GPU, Mode
from specdist.models.sizes.sizes import ModelSize
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.table import Table
from tests.lab.plan.public import drafter
from tests.ranks import REPOSITORY
from tests.readme import write_block

PAGE = REPOSITORY / "jobs/benchmarks/tables/placements.md"
BATCHES = (1, 8, 32, 128)
SITE = Site(gpu=GPUS["h100-sxm"], gpus_per_node=8, num_nodes=1)
# A name, what is opened, its GPUs, a small model, and the name of the shape of its drafters.
TARGETS = (
    ("70b", "70b", 4, "1b", "Llama-2-70B"),
    ("70b, FP8", "70b", 2, "1b", None),
    ("Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", 2, "0.5b", "Qwen3-30B-A3B"),
    ("gpt-oss-120b, MXFP4", "openai/gpt-oss-120b", 1, "0.5b", None),
)
Line = dict[str, str | int | None]


def pairs() -> Iterator[tuple[str, ModelSize, int, str, ModelSize]]:
    """A name, the target and its GPUs, and a draft with its name."""
    for name, opened, tp_size, small, shape in TARGETS:
        quantization = "float8" if "FP8" in name else None
        target = open_model("--target", opened, "auto", quantization=quantization)[0]
        yield name, target, tp_size, small, open_model("--draft", small, "auto")[0]
        for kind in ("EAGLE-3", "DFlash") if shape else ():
            yield name, target, tp_size, kind, drafter(shape or "", kind)
    target, head = (
        open_model("--target", "Qwen/Qwen3.5-35B-A3B", "auto", drafter=drafter)[0]
        for drafter in (None, "mtp")
    )
    yield "Qwen3.5-35B-A3B", target, 2, "mtp", head


def line(target: ModelSize, tp_size: int, draft: ModelSize, acceptance: float) -> Line:
    """Per GPU: tokens/s of the target alone, and over them with a draft, with its best number of tokens."""
    work = Work(
        prompt_tokens=1000, output_tokens=500, num_prompts=10**6, acceptance=acceptance, caught=0.5,
        sampling=SamplingSettings(temperature=0.0),
    )  # fmt: skip
    planner = Planner(target, draft, SITE, work)

    def rate(num_rows: int, *modes: Mode) -> float:
        """Tokens/s of the fastest."""
        lengths = [0] if modes == ("target only",) else range(1, (draft.num_block_tokens or 16) + 1)
        predicted = (planner._predict(mode, tp_size, num_rows, k) for mode in modes for k in lengths)
        return max(one.tokens_per_s for one in predicted)

    own: tuple[Mode, ...] = ("synchronous",) if draft.num_read_numbers else OWN_GPU
    alone = [rate(num_rows, "target only") / tp_size for num_rows in BATCHES]
    found = {"alone, tokens/s": [f"{one:,.0f}" for one in alone]}
    for name, modes, num_gpus in (
        ("shared, times", ("colocated",), tp_size),
        ("own GPU, times", own, tp_size + 1),
    ):
        rates = [rate(num_rows, *modes) / num_gpus for num_rows in BATCHES]
        found[name] = [f"{one / other:.2f}" for one, other in zip(rates, alone, strict=True)]
    return {name: " / ".join(cells) for name, cells in found.items()}


def lines() -> Iterator[Line]:
    for name, target, tp_size, kind, draft in pairs():
        for acceptance in (0.7, 0.8):
            about: Line = {"target": name, "GPUs": str(tp_size), "draft": kind, "acceptance": str(acceptance)}
            yield about | line(target, tp_size, draft, acceptance)


if __name__ == "__main__":
    write_block(PAGE, "placements", Table.of([*lines()], num_names=4).markdown())
