"""The draft in a process of its own: rank 1 of a world of two, whose rank 0 is the benchmark.

It loads the draft once and serves one engine after another. What it is to do next comes through a pipe, which
also tells when it has died; what an engine and its draft say to each other goes through the world.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from specdist.benchmark.drafts import DraftOrder, with_slots
from specdist.engine.assembly import Assembly
from specdist.engine.collectives import RANK_ZERO
from specdist.engine.proposals import Proposer
from specdist.engine.remote import RemoteDraft, serve_drafts
from specdist.job.costs import draft_curve
from specdist.job.replica import TARGET_GROUP
from specdist.job.topology import Topology, join_world
from specdist.models.checkpoint import open_checkpoint
from specdist.models.loading import load_whole
from specdist.models.runner import ModelRunner
from specdist.policies.costs import BRANCH_COUNTS, Curve
from specdist.utils.errors import UserError

DRAFT_RANK = 1
END_S = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DraftSource:
    """Which model, where, and by what assembly: the process has nothing else. ``num_threads`` are torch's, on
    a CPU; ``num_context_tokens`` stand before a step that is timed."""

    checkpoint: str
    trust_remote_code: bool
    allow_pickle: bool
    dtype: str
    device: torch.device
    num_threads: int
    num_context_tokens: int
    assembly: Assembly


class DraftRank:
    """The process, and this one's half of the world. A context manager; there can be one at a time.

    Every method raises :class:`UserError` when the process has ended.
    """

    def __init__(self, source: DraftSource, target_device: torch.device) -> None:
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = Path(self._folder.name, "rendezvous").as_uri()
        # Not a fork of this process: threads of torch and CUDA do not survive one. Of a process that has
        # imported all this and done nothing else, of which later drafts are forks too.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_run_rank, args=(theirs, source, rendezvous), name="draft", daemon=True
        )
        self._process.start()
        theirs.close()
        self.num_threads = source.num_threads
        try:
            self._receive()
            join_world(_topology(RANK_ZERO, target_device), rendezvous)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> DraftRank:
        return self

    def __exit__(self, *error: object) -> None:
        if error == (None, None, None):
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(END_S)
        self._end()

    def measure(self, num_slots: int, *, uses_features: bool) -> Curve:
        """Let it time its steps of up to ``num_slots`` rows and all branches that they may have."""
        self._send("measure", num_slots, uses_features)
        curve: Curve = self._receive()
        return curve

    def build(self, order: DraftOrder) -> None:
        """Make ready for one engine, which must then run."""
        self._send("build", order)
        self._receive()

    @contextlib.contextmanager
    def serving(self) -> Iterator[Proposer]:
        """The proposer for the engine that it is ready for, to be run to its end inside."""
        self._send("serve")
        try:
            yield RemoteDraft(DRAFT_RANK, group=TARGET_GROUP)
            self._receive()
        except RuntimeError as error:
            # A broken connection says nothing of its cause: see whether there is a better reason.
            self._process.join(END_S)
            if self._process.is_alive():
                raise
            raise self._death() from error

    def _send(self, method: str, *arguments: object) -> None:
        """Call a method of the server there; what it returns is to be received."""
        try:
            self._pipe.send((method, *arguments))
        except OSError as error:
            raise self._death() from error

    def _receive(self) -> Any:
        wait([self._pipe, self._process.sentinel])
        with contextlib.suppress(EOFError, OSError):
            if self._pipe.poll():
                message = self._pipe.recv()
                if isinstance(message, UserError):
                    raise message
                return message
        raise self._death()

    def _death(self) -> UserError:
        """What is known of the end of the process."""
        self._process.join(END_S)
        with contextlib.suppress(EOFError, OSError):
            while self._pipe.poll():
                message = self._pipe.recv()
                if isinstance(message, UserError):
                    return message
        return UserError(
            f"the draft's process has ended with exit code {self._process.exitcode}, so nothing more can be "
            "measured with --placements separate; -9 means that it was killed, often because memory ran "
            "out: free some, or use --placements colocated"
        )

    def _end(self) -> None:
        self._pipe.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._folder.cleanup()


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads for torch's operations on a CPU; the former number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _topology(rank: int, device: torch.device) -> Topology:
    return Topology(rank=rank, world_size=2, tp_size=1, uses_draft=True, device=device)


def _run_rank(pipe: Connection, source: DraftSource, rendezvous: str) -> None:
    """The process. It ends with the pipe."""
    try:
        server = _Server(source)
        pipe.send(None)
        join_world(_topology(DRAFT_RANK, source.device), rendezvous)
        while (call := pipe.recv()) is not None:
            method, *arguments = call
            pipe.send(getattr(server, method)(*arguments))
    except EOFError:
        logger.warning("the benchmark's process has ended; the draft's process ends too")
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else traceback.format_exc()
        with contextlib.suppress(OSError):
            pipe.send(UserError(f"the draft's process has failed: {reason}"))


class _Server:
    """The model, with a cache for one number of slots at a time. The other side calls its methods."""

    def __init__(self, source: DraftSource) -> None:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        torch.set_num_threads(source.num_threads)
        checkpoint = open_checkpoint(
            "--draft",
            source.checkpoint,
            trust_remote_code=source.trust_remote_code,
            allow_pickle=source.allow_pickle,
        )
        model = load_whole(checkpoint, dtype=checkpoint.torch_dtype(source.dtype), device=source.device)
        self._runner = ModelRunner(model, source.device)
        self._source = source
        self._num_slots = 0

    def measure(self, num_slots: int, uses_features: bool) -> Curve:
        self._allocate(num_slots)
        assembly = self._source.assembly
        return draft_curve(
            self._runner,
            assembly.settings,
            assembly.vocab_size,
            uses_features=uses_features,
            num_rows=num_slots * (1 + BRANCH_COUNTS[-1]),
            num_tokens_per_row=1,
            num_context_tokens=self._source.num_context_tokens,
        )

    def build(self, order: DraftOrder) -> None:
        self._allocate(order.num_slots)
        assembly = order.assembly(self._source.assembly)
        self._order = order
        self._clock = order.timeline("transfer", self._runner.device)
        self._draft = assembly.draft_worker(self._runner, order.policy(assembly.settings), self._clock)

    def serve(self) -> None:
        """One engine, to its end."""
        with self._order.traced("draft"):
            serve_drafts(
                {TARGET_GROUP: self._draft},
                RANK_ZERO,
                vocab_size=self._source.assembly.vocab_size,
                clock=self._clock,
            )

    def _allocate(self, num_slots: int) -> None:
        """With as many branches as the costs may ask for."""
        if num_slots == self._num_slots:
            return
        assembly = with_slots(self._source.assembly, num_slots)
        assembly.allocate(
            self._runner,
            num_branch_rows=num_slots * BRANCH_COUNTS[-1],
            max_branch_tokens=assembly.scheduling.max_draft_tokens + 1,
        )
        self._num_slots = num_slots
