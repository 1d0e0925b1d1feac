"""Where the time of a round goes: a target of 8B and a draft of 1B on one GPU, greedy and with top-p.

    python -m tests.gpu.first_round FOLDER [--fake]

Random weights, made on the device: times of phases are those of such models, tokens per second are not, since
random models agree on little. The engine is the job's; draft and target take turns, and the target is "idle"
while the draft drafts. Then a few rounds run under torch.profiler: what the device did in them, and how long
it had nothing to do.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdist.data.stats.shard import Stats
from specdist.engine.assembly import PAGE_SIZE, Assembly
from specdist.engine.request import Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.detokenizer import Detokenizer
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.engine.schedule.stopping import StopRules
from specdist.models.families.adapters import use_paged_attention
from specdist.models.passes.runner import ModelRunner
from specdist.policies import FixedLength
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import short_text
from tests.gpu.first_device import Bench, Shape, random_llama, say, step, table

SETTINGS = {
    "greedy": SamplingSettings(temperature=0.0),
    "top_p": SamplingSettings(temperature=0.8, top_p=0.9),
}
NUM_DRAFT_TOKENS = 4
BATCH_SIZES, TINY_BATCH_SIZES = (1, 8, 32), (2,)
PROMPT_TOKENS, TINY_PROMPT_TOKENS = 512, 20
NEW_TOKENS, TINY_NEW_TOKENS, PROFILED_TOKENS = 48, 6, 8
NUM_KERNELS_SHOWN = 25
NS_PER_MS = 1e6
# Of kernels' names, the first that occurs. cuBLAS calls its products by many names.
KINDS = {
    "attention": ("attend_kernel", "join_kernel", "flash", "fmha"),
    "sampling": (
        "survey_kernel",
        "weigh_kernel",
        "list_kernel",
        "search_kernel",
        "normalize_kernel",
        "mass_kernel",
        "draw_kernel",
        "race_kernel",
        "winner_kernel",
    ),
    "small steps of layers": ("norm_kernel", "rotary_kernel", "gate_kernel", "write_kernel"),
    "products": ("gemm", "gemv", "nvjet", "cutlass", "splitk", "cublas"),
    "copies": ("memcpy", "memset"),
}


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Milliseconds by the device's clock, means over a run's rounds; ``prefill_ms`` is of all prompts."""

    setting: str
    batch_size: int
    num_rounds: int
    round_ms: float
    verify_ms: float
    draft_ms: float
    idle_ms: float
    host_ms: float
    transfer_ms: float
    prefill_ms: float
    acceptance: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return step(str(__doc__).partition("\n")[0], time_rounds, arguments)


def time_rounds(bench: Bench, folder: Path) -> int:
    target, draft = (runner_of(bench, bench.shapes[name]) for name in ("8B", "1B"))
    replica = Replica(bench, target, draft)
    rounds = []
    for name, settings in SETTINGS.items():
        for batch_size in TINY_BATCH_SIZES if bench.is_fake else BATCH_SIZES:
            new_tokens = TINY_NEW_TOKENS if bench.is_fake else NEW_TOKENS
            replica.generate(settings, batch_size, new_tokens)  # records what is replayed below
            stats = replica.generate(settings, batch_size, new_tokens)
            rounds.append(summary(name, batch_size, stats))
            say(table(rounds[-1:]) if len(rounds) == 1 else table(rounds[-1:]).splitlines()[1])
    found: dict[str, Any] = {"rounds": [asdict(one) for one in rounds]}
    if not bench.is_fake:
        try:
            found["profile"] = profile(replica, BATCH_SIZES[-1])
        except Exception as error:  # tracing needs rights that not every node gives
            say(f"\ntorch.profiler failed, and the times above stand: {short_text(error)}")
    bench.write(folder / "round.json", found)
    return 0


def runner_of(bench: Bench, shape: Shape) -> ModelRunner:
    model = random_llama(bench, shape)
    use_paged_attention(model)
    return ModelRunner(model, bench.device)


class Replica:
    """Target and draft in this process, synchronous."""

    def __init__(self, bench: Bench, target: ModelRunner, draft: ModelRunner) -> None:
        self.target, self.draft = target, draft
        tiny = bench.is_fake
        self.prompt_tokens = TINY_PROMPT_TOKENS if tiny else PROMPT_TOKENS
        self.max_num_seqs = max(TINY_BATCH_SIZES if tiny else BATCH_SIZES)
        self.max_seq_len = self.prompt_tokens + (TINY_NEW_TOKENS if tiny else NEW_TOKENS)
        self.vocab_size = bench.shapes["8B"].vocab_size
        assembly = self.assembly(SETTINGS["greedy"])
        assembly.allocate(target)
        assembly.allocate_draft(draft)

    def assembly(self, settings: SamplingSettings) -> Assembly:
        most_tokens = self.max_seq_len + 2 * (NUM_DRAFT_TOKENS + 1)
        return Assembly(
            settings=settings,
            vocab_size=self.vocab_size,
            stop_rules=StopRules(Detokenizer(lambda token_ids, _: "")),
            scheduling=SchedulerSettings(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=2048,
                max_draft_tokens=NUM_DRAFT_TOKENS,
                max_new_tokens=self.max_seq_len,
                max_seq_len=self.max_seq_len,
                seed=0,
            ),
            num_pages=self.max_num_seqs * -(-most_tokens // PAGE_SIZE),
            max_cache_len=-(-most_tokens // PAGE_SIZE) * PAGE_SIZE,
        )

    def generate(self, settings: SamplingSettings, num_rows: int, new_tokens: int) -> Stats:
        """Other prompts of one length each, all at once."""
        assembly, recorder = self.assembly(settings), StatsRecorder()
        prompts = np.random.default_rng(0).integers(self.vocab_size, size=(num_rows, self.prompt_tokens))
        engine = assembly.engine(
            iter(
                Request(row_id=row, sample_index=0, prompt_ids=ids, max_new_tokens=new_tokens)
                for row, ids in enumerate(prompts.tolist())
            ),
            target=assembly.local_target(self.target),
            proposer=assembly.local_draft(self.draft, FixedLength(NUM_DRAFT_TOKENS)),
            stats_recorder=recorder,
        )
        completions = list(engine.run())
        short = [one for one in completions if one.error or len(one.token_ids) != new_tokens]
        if short or len(completions) != num_rows:
            raise ValueError(
                f"{num_rows} rows of {new_tokens} tokens were wanted, not {short or completions}"
            )
        return recorder.close_shard(0)


def summary(setting: str, batch_size: int, stats: Stats) -> Rounds:
    target, draft, count = stats.target_ns, stats.draft_ns, max(1, stats.num_rounds)
    whole_ns = target.total - target.prefill - draft.prefill
    return Rounds(
        setting=setting,
        batch_size=batch_size,
        num_rounds=stats.num_rounds,
        round_ms=whole_ns / count / NS_PER_MS,
        verify_ms=target.verify / count / NS_PER_MS,
        draft_ms=draft.draft / count / NS_PER_MS,
        idle_ms=target.idle / count / NS_PER_MS,
        host_ms=target.host / count / NS_PER_MS,
        transfer_ms=target.transfer / count / NS_PER_MS,
        prefill_ms=(target.prefill + draft.prefill) / NS_PER_MS,
        acceptance=stats.num_accepted_tokens / max(1, stats.num_draft_tokens),
    )


def profile(replica: Replica, batch_size: int) -> dict[str, Any]:
    """Milliseconds of the device by kind of kernel; the kernels that took most are shown."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        stats = replica.generate(SETTINGS["top_p"], batch_size, PROFILED_TOKENS)
        torch.cuda.synchronize()
    kernels: Counter[str] = Counter()
    for event in profiler.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name] += event.time_range.elapsed_us()
    if not kernels:
        raise ValueError("it saw no kernel")
    kinds: Counter[str] = Counter()
    for name, time_us in kernels.items():
        kinds[kind_of(name)] += time_us
    busy_ms, whole_ms = kinds.total() / 1e3, stats.target_ns.total / NS_PER_MS
    say(f"\nbatch {batch_size}, top_p, prompts and {stats.num_rounds} rounds, while they are traced:")
    say(f"{whole_ms:.1f} ms, of which the device worked {busy_ms:.1f} ms")
    for kind, time_us in kinds.most_common():
        say(f"{time_us / 1e3:10.2f} ms  {kind}")
    for name, time_us in kernels.most_common(NUM_KERNELS_SHOWN):
        say(f"{time_us / 1e3:10.2f} ms  {name[:100]}")
    return {"whole_ms": whole_ms, "kinds_ms": {kind: time_us / 1e3 for kind, time_us in kinds.items()}}


def kind_of(kernel: str) -> str:
    lowered = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lowered for word in words)), "other")


if __name__ == "__main__":
    sys.exit(main())
