"""llama.cpp's server for :mod:`specdist.lab.benchmark.peers.worker`, in an environment with its sources."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from specdist.lab.benchmark.peers.worker import Options

ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}
HOST = "127.0.0.1"
FILE_TYPES = {"float32": "ALL_F32", "bfloat16": "MOSTLY_BF16"}
# Names that a file has for tokens that end a completion.
STOP_NAMES = ("eos", "eot", "eom")
SECONDS_BETWEEN_QUESTIONS = 0.05
SETTINGS = ("--host", HOST, "--log-verbosity", "1", "--kv-unified", "--no-cache-prompt", "--cache-ram", "0")


def converted(model: str, options: Options) -> str:
    """The model as llama.cpp's own file, made unless it is there. Its tokens are named by their numbers: the
    server is given ids, and its converter knows few tokenizers."""
    output = Path(options.folder, f"{model.strip('/').replace('/', '-')}.gguf")
    if output.exists():
        return str(output)
    if len(options.stop_token_ids) > len(STOP_NAMES):
        raise ValueError(f"a file has at most {len(STOP_NAMES)} stop tokens, not {options.stop_token_ids}")
    sys.path.extend(map(str, Path(sys.prefix, "sources").glob("*/vendor/llama.cpp")))
    conversion, gguf = map(importlib.import_module, ("conversion", "gguf"))

    def set_vocab(converter: Any) -> None:
        writer, size = converter.gguf_writer, converter.hparams["vocab_size"]
        writer.add_tokenizer_model("test")
        writer.add_token_list([str(token) for token in range(size)])
        for name, token in zip(STOP_NAMES, options.stop_token_ids, strict=False):
            getattr(writer, f"add_{name}_token_id")(token)

    with torch.inference_mode():
        config = conversion.ModelBase.load_hparams(Path(model), False)
        architecture = conversion.get_model_architecture(config, conversion.ModelType.TEXT)
        kind = conversion.get_model_class(architecture)
        kind.set_vocab = set_vocab
        kind(Path(model), gguf.LlamaFileType[FILE_TYPES[options.dtype]], output).write()
    return str(output)


class Engine:
    """``llama-server`` over token ids, as its users run it: a cache in float16 that all sequences share."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._command = [str(Path(sys.prefix, "build", "bin", "llama-server")), *SETTINGS]
        self._command += ["--threads", os.environ["OMP_NUM_THREADS"]]
        self._command += ["--model", converted(options.target, options)]
        if options.draft is not None:
            self._command += [
                "--spec-type",
                "draft-simple",
                "--spec-draft-n-max",
                str(options.num_draft_tokens),
            ]
            self._command += ["--spec-draft-model", converted(options.draft, options)]
        # In this order, and nothing else.
        self._sampling = {"samplers": list(options.sampling), **options.sampling, "return_tokens": True}
        self._server: subprocess.Popen[bytes] | None = None
        self.prepare(options.max_num_seqs)
        self.version: str = self._ask("/props")["build_info"]

    def prepare(self, batch_size: int) -> None:
        """A new server for at most ``batch_size`` sequences at a time, whose cache is empty."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._batch_size = batch_size
        with socket.create_server((HOST, 0)) as free:
            self._port: int = free.getsockname()[1]
        size = ["--parallel", str(batch_size), "--ctx-size", str(batch_size * self._options.max_seq_len)]
        self._server = subprocess.Popen([*self._command, *size, "--port", str(self._port)])
        atexit.register(self._server.kill)
        while self._server.poll() is None:
            # It does not listen yet, or says that it loads the model.
            with contextlib.suppress(ConnectionRefusedError, RuntimeError):
                self._ask("/health")
                return
            time.sleep(SECONDS_BETWEEN_QUESTIONS)
        sys.exit(f"llama-server ended with exit code {self._server.returncode}")

    def generate(self, prompts: list[list[int]], limits: list[int]) -> list[list[int]]:
        """Token ids per prompt. A new row begins when another one ends."""
        bodies = [
            {"prompt": prompt, "n_predict": limit, "seed": self._options.seed + row, **self._sampling}
            for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        with ThreadPoolExecutor(self._batch_size) as clients:
            return [answer["tokens"] for answer in clients.map(partial(self._ask, "/completion"), bodies)]

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        with contextlib.closing(http.client.HTTPConnection(HOST, self._port)) as connection:
            connection.request("POST" if body else "GET", path, json.dumps(body))
            answer = json.load(connection.getresponse())
        if "error" in answer:
            raise RuntimeError(answer["error"]["message"])
        return answer
