"""vLLM's engine for :mod:`specdist.lab.benchmark.peers.worker`, in vLLM's environment."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdist.lab.benchmark.peers.worker import Options

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

    def __init__(self, options: Options) -> None:
        self._shared: dict[str, Any] = {"stop_token_ids": options.stop_token_ids, **options.sampling}
        self._shared |= {"detokenize": False, "ignore_eos": True}
        self._vllm = importlib.import_module("vllm")
        speculative: dict[str, Any] | None = None
        if options.draft is not None:
            speculative = {"method": "draft_model", "model": options.draft}
            speculative["num_speculative_tokens"] = options.num_draft_tokens
        self._engine = self._vllm.LLM(
            options.target,
            dtype=options.dtype,
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_seq_len,
            seed=options.seed,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            speculative_config=speculative,
        )
        self.version: str = self._vllm.__version__

    def prepare(self, batch_size: int) -> None:
        """For a run of at most ``batch_size`` sequences at a time, which finds no pages of another run."""
        self._engine.reset_prefix_cache()
        self._engine.llm_engine.engine_core.engine_core.scheduler.max_num_active_reqs = batch_size

    def generate(self, prompts: list[list[int]], limits: list[int]) -> list[list[int]]:
        """Token ids per prompt."""
        parameters = [self._vllm.SamplingParams(max_tokens=limit, **self._shared) for limit in limits]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._engine.generate(inputs, parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
