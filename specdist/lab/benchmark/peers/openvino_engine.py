"""OpenVINO GenAI's engine for :mod:`specdist.lab.benchmark.peers.worker`, in OpenVINO's environment."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from specdist.lab.benchmark.peers.worker import Options

ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}
PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
MAX_NUM_BATCHED_TOKENS = 2048
# Of pages of its cache on a CPU, in tokens.
BLOCK_SIZE = 32
SHOWN_CHARACTERS = 300


def converted(model: str, folder: str) -> Path:
    """The model in OpenVINO's own format with weights in float32, made in ``folder`` unless it is there."""
    output = Path(folder, model.strip("/").replace("/", "-"))
    if not output.exists():
        export = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", model]
        export += ["--task", "text-generation-with-past", "--weight-format", "fp32", str(output)]
        done = subprocess.run(export, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{model} was not converted: {done.stderr.strip()[-SHOWN_CHARACTERS:]}")
        if not Path(output, "openvino_tokenizer.xml").exists():
            save_any_tokenizer(output)
    return output


def save_any_tokenizer(folder: Path) -> None:
    """One of three tokens, for a model whose own cannot be converted: an engine with a draft must have one,
    and never uses it for token ids."""
    openvino, convert = map(importlib.import_module, ("openvino", "openvino_tokenizers"))
    tokens = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="a")
    both = convert.convert_tokenizer(tokenizer, with_detokenizer=True)
    for name, model in zip(("tokenizer", "detokenizer"), both, strict=True):
        openvino.save_model(model, folder / f"openvino_{name}.xml")


class Engine:
    """``ContinuousBatchingPipeline`` over token ids on the CPU. Keys and values have the weights' type, and
    no pages of another run are found."""

    def __init__(self, options: Options) -> None:
        self._genai = genai = importlib.import_module("openvino_genai")
        self._openvino = importlib.import_module("openvino")
        self._options = options
        self._batch_size = options.max_num_seqs
        self._request_ids = itertools.count()
        precision = PRECISIONS[options.dtype]
        properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": int(os.environ["OMP_NUM_THREADS"]),
            "ENABLE_CPU_PINNING": False,
        }
        more = dict(properties)
        if options.draft is not None:
            draft = converted(options.draft, options.folder)
            more["draft_model"] = genai.draft_model(draft, "CPU", **properties)
        scheduling = genai.SchedulerConfig()
        scheduling.max_num_seqs = options.max_num_seqs
        scheduling.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
        scheduling.enable_prefix_caching = False
        # Room for every sequence from the start: a cache that grows makes the first runs slower.
        scheduling.num_kv_blocks = options.max_num_seqs * (-(-options.max_seq_len // BLOCK_SIZE) + 1)
        target = converted(options.target, options.folder)
        self._pipeline = genai.ContinuousBatchingPipeline(target, scheduling, "CPU", more)
        self.version: str = genai.__version__

    def prepare(self, batch_size: int) -> None:
        """For a run of at most ``batch_size`` sequences at a time."""
        self._batch_size = batch_size

    def generate(self, prompts: list[list[int]], limits: list[int]) -> list[list[int]]:
        """Token ids per prompt. A new row begins when another one ends."""
        completions: list[list[int]] = [[] for _ in prompts]
        waiting, running = iter(range(len(prompts))), dict[int, Any]()
        while True:
            for row in itertools.islice(waiting, self._batch_size - len(running)):
                settings = self._settings(row, limits[row])
                prompt = self._openvino.Tensor(np.array([prompts[row]], dtype=np.int64))
                running[row] = self._pipeline.add_request(next(self._request_ids), prompt, settings)
            if not running:
                return completions
            self._pipeline.step()
            for row, handle in list(running.items()):
                if handle.get_status() == self._genai.GenerationStatus.FINISHED:
                    completions[row] = list(handle.read_all()[0].generated_ids)
                    del running[row]

    def _settings(self, row: int, limit: int) -> Any:
        options = self._options
        settings = self._genai.GenerationConfig(max_new_tokens=limit, ignore_eos=not options.stop_token_ids)
        settings.stop_token_ids = set(options.stop_token_ids)
        if options.draft is not None:
            settings.num_assistant_tokens = options.num_draft_tokens
        settings.do_sample = options.sampling["temperature"] > 0
        settings.rng_seed = options.seed + row
        for name, value in options.sampling.items():
            if value:  # its defaults are greedy, and all tokens
                setattr(settings, name, value)
        return settings
