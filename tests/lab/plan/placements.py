"""Where a draft should be, and what pays with experts, by the planner's closed form: ``python -m
tests.lab.plan.placements`` writes the tables of two pages of jobs/benchmarks/tables. Greedy, on H100s."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

from transformers import AutoConfig

from specdist.lab.plan.advise import Planner, Site, Work
from specdist.lab.plan.hardware import GPUS
from specdist.lab.plan.job import open_model
from specdist.lab.plan.simulate import OWN_GPU, Mode
from specdist.models.sizes.sizes import ModelSize
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.table import Table
from tests.lab.plan.public import FOUND, drafter, write_block
from tests.ranks import REPOSITORY

TABLES = REPOSITORY / "jobs/benchmarks/tables"
BATCHES = (1, 8, 32, 128)
# The planner's own shape.
FOUND["models"]["70b"] = ["llama", {
    "vocab_size": 32_000, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}]  # fmt: skip
Line = dict[str, str | int | None]
opened = partial(open_model, "--target")


class Rates:
    """Tokens/s of a pair at fixed numbers of sequences, each with its best number of draft tokens."""

    def __init__(self, target: ModelSize, draft: ModelSize, tp_size: int, **about: Any) -> None:
        site = Site(gpu=GPUS["h100-sxm"], gpus_per_node=8, num_nodes=1)
        greedy = SamplingSettings(temperature=0.0)
        work = Work(num_prompts=10**6, caught=0.5, sampling=greedy, **about)
        self.planner, self.tp_size = Planner(target, draft, site, work), tp_size
        self._lengths = range(1, (draft.num_block_tokens or 16) + 1)
        reads_states = draft.num_read_numbers > 0
        self._own: tuple[Mode, ...] = ("synchronous",) if reads_states else OWN_GPU

    def of(self, mode: Mode, num_rows: int, *lengths: int) -> float:
        lengths = (0,) if mode == "target only" else lengths or tuple(self._lengths)
        predicted = [self.planner._predict(mode, self.tp_size, num_rows, length) for length in lengths]
        return max(one.tokens_per_s for one in predicted)

    def own(self, num_rows: int) -> float:
        """With a GPU of the draft's own."""
        return max(self.of(mode, num_rows) for mode in self._own)

    def has_room(self, num_rows: int) -> bool:
        return num_rows <= self.planner._fit("colocated", self.tp_size, 4).most_rows


def placements() -> Iterator[Line]:
    """Tokens/s per GPU of a 70B target."""
    about = {"prompt_tokens": 1000, "output_tokens": 500, "acceptance": 0.8}
    draft = opened("1b", "auto")[0]
    pairs = {
        "bfloat16": Rates(opened("70b", "auto")[0], draft, 4, **about),
        "FP8": Rates(opened("70b", "auto", quantization="float8")[0], draft, 2, **about),
    }
    for num_rows in (1, 8, 32, 64, 128, 240):
        line: Line = {"sequences": str(num_rows)}
        for name, rates in pairs.items():
            has_room, num_gpus = rates.has_room(num_rows), rates.tp_size
            alone = rates.of("target only", num_rows) / num_gpus
            shared, own = rates.of("colocated", num_rows) / num_gpus, rates.own(num_rows) / (num_gpus + 1)
            line[f"{name}, target only"] = f"{alone:,.0f}" if has_room else None
            for place, found in (("shared", shared), ("own GPU", own)):
                line[f"{name}, {place}"] = f"{found:,.0f} ({found / alone:.2f})" if has_room else None
        yield line


def drafts() -> Iterator[Line]:
    """Per GPU over the target alone, at several numbers of sequences."""
    with tempfile.TemporaryDirectory() as hybrid:
        # transformers' defaults of the family are those of Qwen3.5-35B-A3B.
        AutoConfig.for_model("qwen3_5_moe").save_pretrained(hybrid)
        pairs = [
            (name, opened(target, "auto")[0], tp_size, draft, made)
            for name, target, tp_size, small in (
                ("70b", "70b", 4, "1b"), ("Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", 2, "0.5b"),
            )
            for draft, made in (
                (small, opened(small, "auto")[0]),
                *((kind, drafter(name, kind)) for kind in ("EAGLE-3", "DFlash")),
            )
        ]  # fmt: skip
        head = opened(hybrid, "bfloat16", is_head=True)[0]
        pairs.append(("Qwen3.5-35B-A3B", opened(hybrid, "bfloat16")[0], 2, "mtp", head))
    for name, target, tp_size, draft, made in pairs:
        for acceptance in (0.7, 0.8):
            about = {"prompt_tokens": 1000, "output_tokens": 500, "acceptance": acceptance}
            rates = Rates(target, made, tp_size, **about)
            alone = [rates.of("target only", num_rows) for num_rows in BATCHES]
            shared = [rates.of("colocated", num_rows) for num_rows in BATCHES]
            own = [rates.own(num_rows) * tp_size / (tp_size + 1) for num_rows in BATCHES]
            line: Line = {"target": name, "draft": draft, "acceptance": str(acceptance)}
            for place, found in (("shared", shared), ("own GPU", own)):
                gains = (f"{one / other:.2f}" for one, other in zip(found, alone, strict=True))
                line[f"{place}, at {' / '.join(map(str, BATCHES))}"] = " / ".join(gains)
            yield line


def experts() -> Iterator[Line]:
    """A 0.5B draft beside mixtures of experts."""
    draft = opened("0.5b", "auto")[0]
    for name in ("Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b"):
        target = opened(name, "auto")[0]
        for tp_size in (1, 2):
            for num_rows in (1, 8, 32, 64, 128, 256):
                for acceptance in (0.3, 0.8):
                    about = {"prompt_tokens": 256, "output_tokens": 256, "acceptance": acceptance}
                    rates = Rates(target, draft, tp_size, **about)
                    alone = rates.of("target only", num_rows)
                    yield {
                        "target": name,
                        "its GPUs": str(tp_size),
                        "acceptance": str(acceptance),
                        "sequences": num_rows,
                        "alone, tokens/s": f"{alone:,.0f}",
                        "K = 5, colocated": f"{rates.of('colocated', num_rows, 5) / alone:.2f}",
                        "best K, colocated": f"{rates.of('colocated', num_rows) / alone:.2f}",
                        "best, own GPU": f"{rates.own(num_rows) / alone:.2f}",
                    }


if __name__ == "__main__":
    write_block(TABLES / "placements.md", "placements", Table.of([*placements()]).markdown())
    write_block(TABLES / "placements.md", "drafts", Table.of([*drafts()], num_names=2).markdown())
    write_block(TABLES / "experts.md", "experts", Table.of([*experts()], num_names=3).markdown())
