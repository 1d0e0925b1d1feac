"""Exhaustive traces of a pair, and the counts of any policy in them, for papers.py.

One trace per set of prompts and temperature (what :mod:`specdist.tuning` collects) gives the passes of every
policy and setting, as a live run in turns would count them. A time is then N_draft t_draft + N_target
t_target, as SpecDec++ has it (Equation 3.1), for given c = t_draft / t_target. So nothing here depends on how
busy the machine is, and the papers' own costs can be put in.

T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import torch
from transformers import AutoModelForCausalLM

from specdist.policies import LengthPolicy
from specdist.policies.choice import PolicyChoice, build_policy
from specdist.policies.costs import CostModel, Curve
from specdist.replay import ExhaustiveTrace, Oracle, ReplaySettings, replay
from specdist.stats.shard import Stats
from specdist.tuning.config import TuneConfig
from specdist.tuning.heads import read_heads
from specdist.tuning.run import collect_trace

# Not used: passes are counted.
COSTS = CostModel(Curve([1], [1]), Curve([1], [1]))
TOGETHER = ReplaySettings(max_num_seqs=64, max_num_batched_tokens=2**14)
TASKS_FILE = "spec_bench"
TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
ALPACA = ("alpaca_test", "humaneval", "gsm8k_test")
DEPTHS, WEIGHTS = range(5), (1, 3, 6, 12)
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
FIRST_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24)
TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
# t_draft / t_target of the papers: SpecDec++ section 5.2; GammaTune Table 1, by pair.
LLAMA_2 = 0.0234 / 0.112
GAMMATUNE_PAIRS = {"Vicuna 13B": 5.61 / 20.15, "Vicuna 7B": 1.76 / 14.29, "Llama 8B": 8.87 / 16.65}
# The papers' own numbers.
PAPER_KL = {
    (1, 0): "0.422, 0.412", (1, 1): "0.409, 0.390", (1, 2): "0.391, 0.387", (1, 3): "0.387, 0.384",
    (1, 4): "0.384, 0.383", (3, 0): "0.515, 0.491", (3, 1): "0.479, 0.461", (3, 2): "0.475, 0.458",
    (3, 3): "0.462, 0.454", (3, 4): "0.465, 0.451", (6, 0): "0.657, 0.637", (6, 1): "0.620, 0.596",
    (6, 2): "0.607, 0.589", (6, 3): "0.617, 0.582", (6, 4): "0.603, 0.575", (12, 0): "0.922, 0.871",
    (12, 1): "0.830, 0.805", (12, 2): "0.834, 0.794", (12, 3): "0.801, 0.781", (12, 4): "0.799, 0.773",
}  # fmt: skip
SVIP_AVERAGES = {
    0.0: {"constant": "1.42, 1.07, 2.34", "heuristic": "1.53, 1.07, 2.76", "SVIP": "1.63, 1.29, 2.83"},
    1.0: {"constant": "0.65, 0.96, 1.60", "heuristic": "0.83, 0.99, 1.58", "SVIP": "1.02, 1.20, 1.58"},
}
PAPER_GAMMATUNE = {
    "SpecDecode": "1.00 ± 0.28, 1.00 ± 0.20, 1.00 ± 0.19",
    "HFHeuristic": "1.14 ± 0.14, 1.04 ± 0.05, 1.12 ± 0.09",
    "AssistantThreshold": "1.24 ± 0.03, 1.05 ± 0.04, 1.17 ± 0.11",
    "GammaTune": "1.23 ± 0.04, 1.13 ± 0.03, 1.12 ± 0.06",
    "GammaTune+": "1.28 ± 0.02, 1.13 ± 0.02, 1.18 ± 0.05",
}


@dataclass(frozen=True)
class Counts:
    """Of a policy's rounds after the pass over the prompt: N, N_draft, N_target, and drafted and accepted."""

    num_tokens: int
    num_draft: int
    num_target: int
    num_drafted: int
    num_accepted: int
    num_discarded: int

    @staticmethod
    def of(stats: Stats) -> Counts:
        return Counts(
            stats.num_completion_tokens - stats.num_completions,
            stats.num_draft_row_steps,
            stats.num_row_steps,
            stats.num_draft_tokens,
            stats.num_accepted_tokens,
            stats.num_discarded,
        )

    def speedup(self, cost_ratio: float) -> float:
        """Over the target alone."""
        return self.num_tokens / (self.num_target + cost_ratio * self.num_draft)

    @property
    def rates(self) -> tuple[float, float]:
        """Verification and discard rate."""
        return self.num_target / self.num_tokens, self.num_discarded / self.num_tokens


def counts(policy: LengthPolicy | Oracle, traces: Iterable[ExhaustiveTrace], head: int = 0) -> Counts:
    """Of all these prompts together."""
    total = Stats()
    for trace in traces:
        total.add(replay(policy, trace, COSTS, TOGETHER, head).stats)
    return Counts.of(total)


def of(name: str, traces: Sequence[ExhaustiveTrace], head: int = 0, **options: float) -> Counts:
    """Of a policy by its name, with the trace's cap unless it is told another."""
    cap = traces[0].max_draft_tokens
    if name != "fixed":
        options = {"max_draft_tokens": cap} | options
    policy = build_policy(PolicyChoice.of(name, **options), None, is_coupled=False)
    return counts(policy, traces, head)


def best(found: Mapping[float, Counts]) -> float:
    """The option with the largest speed-up at SpecDec++'s costs."""
    return max(found, key=lambda option: found[option].speedup(LLAMA_2))


class Traces:
    """Those of a pair, collected where they are missing."""

    def __init__(self, pair: Path, prompts: Path, work: Path, num_prompts: int) -> None:
        self._pair, self._prompts, self._work, self._num_prompts = pair, prompts, work, num_prompts

    def trace(
        self,
        prompts: str,
        temperature: float,
        *,
        cap: int = 20,
        heads: Sequence[str] = (),
        top_k: int = 0,
    ) -> ExhaustiveTrace:
        """Collected unless it is there."""
        path = self._work / "traces" / f"{prompts}-t{temperature:g}{'-heads' * bool(heads)}.arrow"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            config = TuneConfig(
                prompts=str(self._tasks_in_turn() if prompts == TASKS_FILE else self._file(prompts)),
                target=str(self._pair / "target"),
                draft=str(self._pair / "draft_distilled"),
                dtype="float32",
                temperature=temperature,
                top_k=top_k,
                max_new_tokens=128,
                max_draft_tokens=cap,
                num_prompts=self._num_prompts,
                max_num_seqs=16,
                head=list(heads),
                output=str(path.parent),
            )
            trace, _ = collect_trace(config, read_heads(list(heads)))
            trace.write(path)
        return ExhaustiveTrace.read(path)

    def _file(self, prompts: str) -> Path:
        return self._prompts / f"{prompts}.arrow"

    def _tasks_in_turn(self) -> Path:
        """As many prompts of every task of Spec-Bench, the tasks in turn."""
        rows = pa.ipc.open_file(self._file(TASKS_FILE)).read_all()
        each = self._num_prompts // len(TASKS)
        of_task = [rows.filter(pc.equal(rows["task"], task)).slice(0, each) for task in TASKS]
        path = self._work / "spec_bench.arrow"
        with pa.ipc.new_file(path, rows.schema) as writer:
            writer.write_table(pa.concat_tables(of_task))
        return path

    def spec_bench(self, temperature: float) -> list[ExhaustiveTrace]:
        """By task."""
        trace = self.trace(TASKS_FILE, temperature, cap=40)
        assert len(trace.prompts) == self._num_prompts, "some prompts cannot be used"
        each = self._num_prompts // len(TASKS)
        return [
            ExhaustiveTrace(trace.prompts[begin : begin + each], trace.origin)
            for begin in range(0, self._num_prompts, each)
        ]

    @torch.inference_mode()
    def overlaps(self) -> dict[str, object]:
        models = [
            AutoModelForCausalLM.from_pretrained(self._pair / name, dtype=torch.float32)
            for name in ("target", "draft_distilled")
        ]
        overlaps: dict[float, list[np.ndarray]] = {t: [] for t in TEMPERATURES}
        ratios, entropies, betas = [], [], []
        for trace in self.spec_bench(1.0):
            for prompt in trace.prompts:
                ids = torch.from_numpy(np.r_[prompt.prompt_ids, prompt.completion_ids])[None]
                target_TV, draft_TV = (m(ids).logits[0, len(prompt.prompt_ids) - 1 : -1] for m in models)
                for t in TEMPERATURES:
                    if t == 0:
                        overlap_T = (target_TV.argmax(1) == draft_TV.argmax(1)).double()
                    else:
                        overlap_T = torch.minimum((target_TV / t).softmax(1), (draft_TV / t).softmax(1)).sum(
                            1
                        )
                    overlaps[t].append(overlap_T.numpy())
                q_TV = draft_TV.softmax(1)
                entropy_T = torch.special.entr(q_TV).sum(1)
                cross_T = -(q_TV * target_TV.log_softmax(1)).sum(1)
                known_T = entropy_T > 0.01
                ratios.append((cross_T / entropy_T)[known_T].numpy())
                entropies.append(entropy_T.numpy())
                betas.append(overlaps[1.0][-1])
        entropy_T, beta_T = np.concatenate(entropies), np.concatenate(betas)
        return {
            "alpha": {t: float(np.concatenate(each).mean()) for t, each in overlaps.items()},
            "ratio": np.concatenate(ratios),
            "corr": float(np.corrcoef(entropy_T, beta_T)[0, 1]),
            "corr_root": float(np.corrcoef(np.sqrt(entropy_T), beta_T)[0, 1]),
        }
