"""The exhaustive traces of a pair that the tables are counted on, collected where they are missing.

One trace for each set of prompts and temperature gives the passes of every policy and setting, as a live run
synchronously would count them. T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdist.lab.replay import ExhaustiveTrace
from specdist.lab.tune.config import TuneConfig
from specdist.lab.tune.grid import read_heads
from specdist.lab.tune.run import collect_trace
from specdist.utils.errors import UserError
from tests.lab.papers.config import PapersConfig

SPEC_BENCH = "spec_bench"
TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
SHORT, LONG_CAP, CAP = 128, 40, 20


class Traces:
    """Those of a pair."""

    def __init__(self, config: PapersConfig) -> None:
        self.config = config
        self.work = Path(config.work)

    def trace(
        self,
        prompts: str,
        temperature: float,
        *,
        cap: int = CAP,
        heads: Sequence[str] = (),
        top_k: int = 0,
        max_new_tokens: int = SHORT,
    ) -> ExhaustiveTrace:
        """Of one set. Raises :class:`UserError` for prompts or heads that cannot be used."""
        marks = [f"t{temperature:g}", *(["heads"] if heads else []), *([str(max_new_tokens)])]
        path = self.work / "traces" / f"{'-'.join([prompts, *marks])}.arrow"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            config = TuneConfig(
                prompts=str(self._tasks_in_turn() if prompts == SPEC_BENCH else self.file(prompts)),
                target=self.config.target,
                draft=self.config.draft,
                dtype="float32",
                temperature=temperature,
                top_k=top_k,
                max_new_tokens=max_new_tokens,
                max_draft_tokens=cap,
                num_prompts=self.config.num_prompts,
                max_num_seqs=16,
                head=list(heads),
                output=str(path.parent),
            )
            trace, _ = collect_trace(config, read_heads(list(heads)))
            trace.write(path)
        return ExhaustiveTrace.read(path)

    def file(self, prompts: str) -> Path:
        path = Path(self.config.prompts) / f"{prompts}.arrow"
        if not path.exists():
            raise UserError(f"--prompts {self.config.prompts} has no {path.name}: put an Arrow file there")
        return path

    def spec_bench(self, temperature: float) -> dict[str, ExhaustiveTrace]:
        """By task, as many prompts of each."""
        trace = self.trace(SPEC_BENCH, temperature, cap=LONG_CAP)
        each = self.config.num_prompts // len(TASKS)
        if len(trace.prompts) != self.config.num_prompts:
            raise UserError(
                f"{len(trace.prompts)} of {self.config.num_prompts} prompts of Spec-Bench are usable"
            )
        return {
            task: ExhaustiveTrace(trace.prompts[index * each : (index + 1) * each], trace.origin)
            for index, task in enumerate(TASKS)
        }

    def _tasks_in_turn(self) -> Path:
        """As many prompts of every task of Spec-Bench, one task after the other."""
        rows = pa.ipc.open_file(self.file(SPEC_BENCH)).read_all()
        each = self.config.num_prompts // len(TASKS)
        of_task = [rows.filter(pc.equal(rows["task"], task)).slice(0, each) for task in TASKS]
        path = self.work / "spec_bench.arrow"
        with pa.ipc.new_file(path, rows.schema) as writer:
            writer.write_table(pa.concat_tables(of_task))
        return path

    @torch.inference_mode()
    def logits(self, temperature: float) -> list[tuple[Tensor, Tensor]]:
        """Target's and draft's, [T, V], after every prefix of the target's completions of Spec-Bench."""
        models = [
            AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
            for name in (self.config.target, self.config.draft)
        ]
        found = []
        for trace in self.spec_bench(temperature).values():
            for prompt in trace.prompts:
                ids = torch.from_numpy(np.r_[prompt.prompt_ids, prompt.completion_ids])[None]
                target_TV, draft_TV = (m(ids).logits[0, len(prompt.prompt_ids) - 1 : -1] for m in models)
                found.append((target_TV, draft_TV))
        return found
