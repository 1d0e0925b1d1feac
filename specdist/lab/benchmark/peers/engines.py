"""Other engines as methods of a benchmark."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from specdist.job.ranks.topology import local_device
from specdist.lab.benchmark.config import BenchmarkConfig
from specdist.lab.benchmark.methods import Generated, Row
from specdist.lab.benchmark.peers.environments import PEERS, peer_python
from specdist.lab.benchmark.peers.worker import Options
from specdist.lab.benchmark.setting import Setting
from specdist.utils.errors import UserError

WORKER = Path(__file__).with_name("worker.py")
STOP_SECONDS = 20
SHOWN_CHARACTERS = 400
DTYPES = ("float32", "bfloat16")

logger = logging.getLogger(__name__)


class PeerEngine:
    """A worker process with one engine of a peer."""

    def __init__(self, name: str, python: str, options: Options, num_threads: int) -> None:
        """Raises :class:`UserError` if the engine does not start."""
        self.label = PEERS[name].label
        self.num_draft_tokens = options.num_draft_tokens
        self._name = name
        # Isolated: modules of this folder would be found instead of Python's own.
        command = [python, "-I", str(WORKER), f"{name}_engine"]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 closed with the process
        environment = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            encoding="utf-8",
        )
        try:
            self.version: str = self._ask(vars(options))["version"]
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **arguments: Any) -> Any:
        """What a method of the worker's ``Engine`` returns."""
        return self._ask([method, arguments])["found"]

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _signal(self, number: int) -> None:
        """To the worker and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ask(self, document: object) -> dict[str, Any]:
        """The answer. Before and after it all processes are stopped: one that spins would slow the others."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None and self._process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(document), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise UserError(
                f"--peers {self._name}: {self.label} failed ({answer['error'][-SHOWN_CHARACTERS:]}): "
                "leave it out, or choose models that it can run"
            )
        return answer

    def _last_words(self) -> str:
        code = self._process.wait(STOP_SECONDS)
        end = f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
        self._log.seek(0)
        text = self._log.read().decode("utf-8", "replace").strip()
        return f"{end}: {text[-SHOWN_CHARACTERS:]}"


class PeerGenerate:
    """A peer with the target alone, or with a constant number of draft tokens."""

    order = None

    def __init__(self, engine: PeerEngine, batch_size: int) -> None:
        length = engine.num_draft_tokens
        self.name = f"{engine.label}, K = {length}" if length else f"{engine.label}, target only"
        self.batch_size = batch_size
        self._engine = engine

    def prepare(self) -> None:
        self._engine.call("prepare", batch_size=self.batch_size)

    def generate(self, rows: Sequence[Row]) -> Generated:
        prompts, limits = [row.prompt_ids for row in rows], [row.max_new_tokens for row in rows]
        return Generated(self._engine.call("generate", prompts=prompts, limits=limits))


@contextlib.contextmanager
def peer_engines(config: BenchmarkConfig, setting: Setting) -> Iterator[list[PeerEngine]]:
    """Two engines of each of ``--peers``: the target alone, and with a draft."""
    if not config.peers:
        yield []
        return
    assert config.batch_sizes
    pair, work, settings = setting.pair, setting.work, setting.paged.settings
    if pair.dtype not in DTYPES:
        raise UserError(
            f"--peers measures engines in {' and '.join(DTYPES)}, and the weights would be {pair.dtype}: "
            f"add --dtype {DTYPES[0]}, or leave --peers out"
        )
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=config.peers_folder))
        engines: list[PeerEngine] = []
        for name, length in itertools.product(config.peers, (0, config.num_draft_tokens)):
            logger.info("starting %s with %d draft tokens", PEERS[name].label, length)
            options = Options(
                target=str(pair.target_checkpoint.folder),
                draft=str(pair.draft_checkpoint.folder) if length else None,
                num_draft_tokens=length,
                dtype=pair.dtype,
                max_num_seqs=config.batch_sizes[-1],
                max_seq_len=min(pair.max_positions, work.longest_prompt + work.longest_limit + length + 1),
                stop_token_ids=sorted(pair.stop_token_ids),
                sampling={each: getattr(settings, each) for each in ("temperature", "top_k", "top_p")},
                seed=config.seed,
                folder=folder,
            )
            python = peer_python(name, config.peers_folder)
            engines.append(PeerEngine(name, python, options, torch.get_num_threads()))
            stack.callback(engines[-1].close)
        yield engines


def make_environments(config: BenchmarkConfig) -> None:
    """Those of ``--peers``, before anything is loaded. Raises :class:`UserError`."""
    if config.peers and local_device(config.device).type != "cpu":
        raise UserError(
            f"--peers {' '.join(config.peers)} measures engines on the CPU, and specdist would run on a GPU: "
            "add --device cpu, or leave --peers out"
        )
    compiled = [name for name in config.peers or () if PEERS[name].compiled]
    if compiled and not (shutil.which("c++") or "CXX" in os.environ):
        raise UserError(
            f"--peers {' '.join(compiled)} is compiled on this machine, which has no C++ compiler (c++): "
            "install g++, name another one in the variable CXX, or leave it out of --peers"
        )
    for name in config.peers or ():
        peer_python(name, config.peers_folder)
