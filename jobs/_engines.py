"""The processes of jobs/benchmark.py that run transformers or vLLM: ``python jobs/_engines.py WORK FOUND``.

Nothing of this project is imported: vLLM's environment need not have what specdist needs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRANSFORMERS, VLLM = "transformers", "vllm"
NUM_WARMUP_TOKENS = 8
PAD_TOKEN_ID = 0  # masked on the left and cut off on the right, so any token will do


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a process generates. Models are folders, prompts token ids."""

    engine: str
    target: str
    draft: str | None = None
    num_draft_tokens: int
    dtype: str
    device: str
    num_threads: int
    batch_size: int
    max_new_tokens: int
    max_seq_len: int
    stop_token_ids: list[int]
    prompts: list[list[int]]

    @property
    def name(self) -> str:
        return f"{self.engine}, with draft" if self.draft else self.engine


@dataclass(frozen=True, kw_only=True)
class Found:
    """Seconds of all rows and of the start, and token ids by row; or why there are none."""

    version: str | None = None
    seconds: float = 0.0
    completions: list[list[int]] = field(default_factory=list)
    error: str | None = None
    start_s: float = 0.0


def generate_with_transformers(work: Work) -> Found:
    """In batches that are padded on the left; each runs until its longest row ends."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    def loaded(name: str, **options: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, work.dtype))
        model.generation_config = GenerationConfig(**options)  # without the checkpoint's own sampling
        return model.to(work.device).eval()

    target, assistance = loaded(work.target), {}
    if work.draft is not None:
        # Without a threshold of confidence every round drafts the same number.
        assistance["assistant_model"] = draft = loaded(
            work.draft,
            num_assistant_tokens=work.num_draft_tokens,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        widths = {model.get_output_embeddings().weight.shape[0] for model in (target, draft)}
        if len(widths) > 1:
            # transformers takes them for different tokenizers, and requires these.
            assistance["tokenizer"] = AutoTokenizer.from_pretrained(work.target)
            assistance["assistant_tokenizer"] = AutoTokenizer.from_pretrained(work.draft)

    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        ends = {"eos_token_id": work.stop_token_ids or None, "pad_token_id": PAD_TOKEN_ID}
        settings = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, **ends)
        completions = []
        for start in range(0, len(prompts), work.batch_size):
            rows = prompts[start : start + work.batch_size]
            width = max(map(len, rows))
            token_ids = torch.tensor([[PAD_TOKEN_ID] * (width - len(row)) + row for row in rows])
            mask = torch.arange(width) >= torch.tensor([[width - len(row)] for row in rows])
            inputs = {"attention_mask": mask.long().to(work.device), "generation_config": settings}
            output = target.generate(token_ids.to(work.device), **inputs, **assistance)
            completions += [until_stop(row, work.stop_token_ids) for row in output[:, width:].tolist()]
        return completions

    return timed(work, transformers.__version__, generate)


def generate_with_vllm(work: Work) -> Found:
    """Raises RuntimeError for a vLLM that was built for another device."""
    import vllm
    from vllm.platforms import current_platform

    if current_platform.device_type != work.device:
        raise RuntimeError(f"this vLLM was built for {current_platform.device_type}, not for {work.device}")
    speculation: dict[str, Any] = {"method": "draft_model", "model": work.draft}
    speculation["num_speculative_tokens"] = work.num_draft_tokens
    engine = vllm.LLM(
        work.target,
        dtype=work.dtype,
        max_num_seqs=work.batch_size,
        max_model_len=work.max_seq_len,
        skip_tokenizer_init=True,
        speculative_config=speculation if work.draft else None,
    )

    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        ends = {"stop_token_ids": work.stop_token_ids, "ignore_eos": True}
        settings = vllm.SamplingParams(temperature=0.0, max_tokens=max_new_tokens, detokenize=False, **ends)
        engine.reset_prefix_cache()  # which the warm-up has filled
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(one.outputs[0].token_ids) for one in engine.generate(inputs, settings, use_tqdm=False)]

    return timed(work, vllm.__version__, generate)


def timed(work: Work, version: str, generate: Callable[..., list[list[int]]]) -> Found:
    """What is found after a warm-up with the first rows."""
    generate(work.prompts[: work.batch_size], NUM_WARMUP_TOKENS)
    begin = time.perf_counter()
    completions = generate(work.prompts, work.max_new_tokens)
    return Found(version=version, seconds=time.perf_counter() - begin, completions=completions)


def until_stop(token_ids: list[int], stop_token_ids: Sequence[int]) -> list[int]:
    """Up to the first end token, which is kept."""
    ends = (index + 1 for index, token_id in enumerate(token_ids) if token_id in stop_token_ids)
    return token_ids[: next(ends, len(token_ids))]


def run_worker(work_file: str, found_file: str) -> int:
    """What a process of transformers or vLLM does, from file to file. An error ends its threads, too."""
    sys.excepthook = lambda *error: (traceback.print_exception(*error), os._exit(1))
    work = Work(**json.loads(Path(work_file).read_text()))
    found = (generate_with_vllm if work.engine == VLLM else generate_with_transformers)(work)
    return not Path(found_file).write_text(json.dumps(dataclasses.asdict(found)))


if __name__ == "__main__":
    sys.exit(run_worker(*sys.argv[1:]))
