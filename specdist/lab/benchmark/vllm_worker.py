"""One engine of vLLM in a process of its own, in an environment of its own: JSON lines in, JSON lines out.

The first line has the options of the engine; each of the others is a call of its methods. Between calls the
process waits for a line, and tells with the next answer how much processor time it used meanwhile. It is run
as a file: its environment has no specdist.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

ENVIRONMENT = {
    # The engine in this process, on the threads of OMP_NUM_THREADS wherever the system runs them.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Engine:
    """vLLM over token ids, without a tokenizer."""

    def __init__(
        self,
        target: str,
        draft: str | None,
        num_draft_tokens: int,
        dtype: str,
        max_num_seqs: int,
        max_seq_len: int,
        seed: int,
    ) -> None:
        self._vllm = importlib.import_module("vllm")
        speculative: dict[str, Any] | None = None
        if draft is not None:
            speculative = {"method": "draft_model", "model": draft}
            speculative["num_speculative_tokens"] = num_draft_tokens
        self._engine = self._vllm.LLM(
            target,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=max_seq_len,
            seed=seed,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            speculative_config=speculative,
        )
        self.version: str = self._vllm.__version__

    def prepare(self, batch_size: int) -> None:
        """For a run of at most ``batch_size`` sequences at a time, which finds no pages of another run."""
        self._engine.reset_prefix_cache()
        self._engine.llm_engine.engine_core.engine_core.scheduler.max_num_active_reqs = batch_size

    def generate(
        self,
        prompts: list[list[int]],
        limits: list[int],
        stop_token_ids: list[int],
        sampling: dict[str, Any],
    ) -> list[list[int]]:
        """Token ids per prompt."""
        parameters = [
            self._vllm.SamplingParams(
                max_tokens=limit, stop_token_ids=stop_token_ids, detokenize=False, ignore_eos=True, **sampling
            )
            for limit in limits
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._engine.generate(inputs, parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def serve(
    engine_of: Callable[..., Any], lines: Iterator[str], answer: Callable[[dict[str, Any]], None]
) -> None:
    """The first line makes the engine, every other one a call. An error is answered, and ends it."""
    try:
        engine = engine_of(**json.loads(next(lines)))
        answer({"version": engine.version})
        while True:
            idle_since, used = time.monotonic(), time.process_time()
            line = next(lines, None)
            if line is None:
                return
            share = (time.process_time() - used) / max(time.monotonic() - idle_since, 1.0)
            call, arguments = json.loads(line)
            answer({"found": getattr(engine, call)(**arguments), "idle_cpu_share": share})
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """What vLLM prints goes to stderr, so that stdout has answers alone."""
    os.environ.update(ENVIRONMENT)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def answer(document: dict[str, Any]) -> None:
            answers.write(json.dumps(document) + "\n")
            answers.flush()

        serve(Engine, iter(sys.stdin.readline, ""), answer)


if __name__ == "__main__":
    main()
