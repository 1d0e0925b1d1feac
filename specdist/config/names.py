"""Names of options elsewhere, and the command line that starts several ranks."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Collection, Sequence

# Names of vLLM and transformers that calls from Python take, too; and others that messages answer.
ALIASES = {"max_tokens": "max_new_tokens", "n": "num_samples"}
ELSEWHERE = {
    "model": "target",
    "max_model_len": "max_seq_len",
    "tensor_parallel_size": "tp_size",
    "speculative_model": "draft",
    "assistant_model": "draft",
    "draft_model": "draft",
    "num_speculative_tokens": "num_draft_tokens",
    "num_assistant_tokens": "num_draft_tokens",
    "num_return_sequences": "num_samples",
    "batch_size": "max_num_seqs",
    "dataset": "prompts",
    "input": "prompts",
    "input_file": "prompts",
    "output_dir": "output",
    "stop_strings": "stop",
    "temp": "temperature",
    "kv_cache_dtype": "cache_dtype",
    "quantization": "target_quantization",
    "gpu_memory_utilization": "cache_memory",
    "max_length": "max_new_tokens",
    "repetition_detection": "stop_repeats",
    "accepted": "num_samples",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_grammar": "grammar",
    **ALIASES,
}
LAUNCHER_OPTIONS = ("num_processes", "nproc_per_node", "num_machines", "config_file")


def nearest_option(name: str, names: Collection[str]) -> str | None:
    """The option that somebody who writes this may mean."""
    if (found := ELSEWHERE.get(name)) in names:
        return found
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.7)), None)


def launch_line(num_processes: int | str, words: Sequence[str], *, device: str = "auto") -> str:
    """What to type to start so many ranks of the main job with these options."""
    if num_processes == 1:  # which needs no launcher
        return shlex.join(["python", "jobs/generate.py", *words])
    accelerate = f"jobs/accelerate/{'cpu' if device == 'cpu' else 'gpu5'}.yaml"
    options = ["--config_file", accelerate, "--num_processes", str(num_processes)]
    return shlex.join(["accelerate", "launch", *options, "jobs/generate.py", *words])
