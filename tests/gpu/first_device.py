"""What the measuring steps of the first day share: the device, shapes of models, clocks, results."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

# Of what is not timed by triton.testing, whose own limits are times.
NUM_WARMUPS, NUM_REPEATS = 3, 9
FAKE_REPEATS = 1
NOTHING_MEANT = "The device is fake: no figure here means anything."
MS_PER_S = 1e3
MAX_POSITIONS = 8192


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One rank's part of a model: heads, inner width and vocabulary are what it has of them."""

    name: str
    num_layers: int
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    width: int
    vocab_size: int

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Outputs and inputs of the products of a layer, as transformers has them."""
        of_heads, of_keys = self.num_heads * self.width, self.num_kv_heads * self.width
        hidden, inner = self.hidden_size, self.inner_size
        of_attention = [(of_heads, hidden), (of_keys, hidden), (of_keys, hidden), (hidden, of_heads)]
        return [*of_attention, (inner, hidden), (inner, hidden), (hidden, inner)]

    @property
    def joined(self) -> list[tuple[int, int]]:
        """The same, of which those with the same input are one."""
        query, key, value, *others, gate, up, down = self.matrices
        one = [(sum(rows for rows, _ in each), each[0][1]) for each in ((query, key, value), (gate, up))]
        return [one[0], *others, one[1], down]

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.inner_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.width,
            max_position_embeddings=MAX_POSITIONS,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )


LLAMA = {
    shape.name: shape
    for shape in (
        Shape(name="1B", num_layers=16, hidden_size=2048, inner_size=8192, num_heads=32, num_kv_heads=8,
              width=64, vocab_size=128256),
        Shape(name="8B", num_layers=32, hidden_size=4096, inner_size=14336, num_heads=32, num_kv_heads=8,
              width=128, vocab_size=128256),
        Shape(name="70B tp 4", num_layers=80, hidden_size=8192, inner_size=7168, num_heads=16, num_kv_heads=2,
              width=128, vocab_size=32064),
    )
}  # fmt: skip
# For the fake device.
TINY = {
    shape.name: shape
    for shape in (
        Shape(name="1B", num_layers=1, hidden_size=64, inner_size=96, num_heads=4, num_kv_heads=2, width=16,
              vocab_size=300),
        Shape(name="8B", num_layers=2, hidden_size=128, inner_size=256, num_heads=8, num_kv_heads=2,
              width=16, vocab_size=300),
    )
}  # fmt: skip


class Bench:
    """The device of a step. ``is_fake``: installed here, in this process, until it ends."""

    def __init__(self, *, is_fake: bool, index: int = 0) -> None:
        self.is_fake = is_fake
        if is_fake and not torch.cuda.is_available():
            from tests.gpu import device

            device.prepare()
            device.install()
        torch.set_grad_enabled(False)
        self.device = torch.device("cuda", index)
        self.shapes = TINY if is_fake else LLAMA

    def random(self, *size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
        """Normal numbers, made on the device."""
        maker = torch.device("cpu") if self.is_fake else self.device
        generator = torch.Generator(maker).manual_seed(seed)
        return torch.randn(size, generator=generator, dtype=dtype, device=maker).to(self.device)

    def device_s(self, function: Callable[[], object]) -> float:
        """Median seconds of what the function gives the device, whose cache is emptied before each.

        It is replayed, since the host would need longer for a small kernel than the device; the launch of a
        graph, some microseconds, is a part of the time.
        """
        replay = self.recorded(function)
        if self.is_fake:
            return self.host_s(replay, 1)
        from triton.testing import do_bench

        return float(do_bench(replay, warmup=20, rep=60, return_mode="median")) / MS_PER_S

    def host_s(self, function: Callable[[], object], times: int) -> float:
        """Median seconds of a call, of so many one after the other and the work that they queue."""
        found = []
        for _ in range(1 + FAKE_REPEATS if self.is_fake else NUM_WARMUPS + NUM_REPEATS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(times):
                function()
            torch.cuda.synchronize()
            found.append((time.perf_counter() - begin) / times)
        return statistics.median(found[1 if self.is_fake else NUM_WARMUPS :])

    def recorded(self, function: Callable[[], object]) -> Callable[[], None]:
        """The replay of a CUDA graph of the function."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # As the job records: other threads, such as NCCL's watchdog, may use the device meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            function()
        return graph.replay

    def identity(self) -> dict[str, Any]:
        """Of the device and what runs on it, as a calibration has it."""
        libraries = ("torch", "triton", "transformers")
        versions = {name: str(importlib.import_module(name).__version__) for name in libraries}
        found = torch.cuda.get_device_properties(self.device)
        if not self.is_fake:
            versions |= {"cuda": str(torch.version.cuda), "driver": driver_version()}
        return {"gpu_name": found.name, "memory_bytes": found.total_memory, "versions": versions}

    def write(self, path: Path, content: Mapping[str, Any]) -> None:
        """Results of a step, with what says whether they mean anything."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"is_fake": self.is_fake, **content}, indent=2))


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def random_llama(bench: Bench, shape: Shape) -> LlamaForCausalLM:
    """A whole model in bfloat16, made on the device: no file is read or written."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        # Modules of the fake device are made on the host.
        with torch.device("cpu" if bench.is_fake else bench.device):
            model = LlamaForCausalLM(shape.config)
    finally:
        torch.set_default_dtype(before)
    return model.to(bench.device).eval()


def step(description: str, run: Callable[[Bench, Path], int], arguments: Sequence[str] | None = None) -> int:
    """The program of a step: ``FOLDER [--fake]``; its exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="for the results")
    parser.add_argument("--fake", action="store_true", help="on the fake device, with tiny shapes")
    options = parser.parse_args(arguments)
    if not options.fake and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --fake tries this program on a fake one")
    # Which kernels are chosen, and why others are not.
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="[%(name)s] %(message)s")
    bench = Bench(is_fake=options.fake)
    if bench.is_fake:
        say(NOTHING_MEANT)
    code = run(bench, options.folder)
    if bench.is_fake:
        say(NOTHING_MEANT)
    return code


def table(rows: Sequence[Any]) -> str:
    """Dataclasses of one kind, with a header; numbers with four digits."""
    lines = [list(asdict(rows[0]))] if rows else []
    lines += [[_cell(value) for value in asdict(row).values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
