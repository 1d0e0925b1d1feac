"""The draft in a process of its own: rank 1 of a world of two, whose rank 0 is the emulation.

It makes the draft once and serves one engine after another. The calls come through a pipe, which also tells
when the process has died; the messages of an engine and its draft go through the world.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from specdist.engine.draft.channels import ToRank
from specdist.engine.messages.link import Wait
from specdist.engine.target.collectives import RANK_ZERO
from specdist.job.ranks.topology import Topology, join_world
from specdist.utils.errors import UserError

DRAFT_RANK = 1
END_S = 10

logger = logging.getLogger(__name__)


class RankServer(Protocol):
    """What runs in the process: :class:`DraftRank` calls these methods, and others by their names."""

    def build(self, order: Any) -> None: ...

    def serve(self) -> None: ...


class RankSource(Protocol):
    """All that the process is given; ``remedy`` ends the message of its death."""

    @property
    def device(self) -> torch.device: ...

    @property
    def num_threads(self) -> int: ...

    @property
    def remedy(self) -> str: ...

    def open(self) -> RankServer: ...


class DraftRank:
    """Handle of the process, and rank 0's membership in the world: a context manager, one at a time.

    Every method raises :class:`UserError` when the process has ended.
    """

    def __init__(self, source: RankSource, target_device: torch.device) -> None:
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = Path(self._folder.name, "rendezvous").as_uri()
        # Not a fork of this process, which threads of torch and CUDA do not survive, but of a server process
        # that has imported this module and nothing else.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_run_rank, args=(theirs, source, rendezvous), name="draft", daemon=True
        )
        self._process.start()
        theirs.close()
        self.num_threads = source.num_threads
        self._remedy = source.remedy
        self._target_device = target_device
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

    def build(self, order: Any) -> None:
        """Build the draft for one engine, which must then run."""
        self.call("build", order)

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the :class:`RankServer`."""
        self._send(method, *arguments)
        return self._receive()

    @contextlib.contextmanager
    def serving(self, wait: Wait | None = None) -> Iterator[ToRank]:
        """The way to the draft of the engine that it was built for, which must run to its end inside.

        ``wait``: for replies; by default as the target's device wants it.
        """
        self._send("serve")
        try:
            yield ToRank(DRAFT_RANK, self._target_device, wait)
            self._receive()
        except RuntimeError:
            # A broken connection does not say why it broke; the end of the process may.
            self._process.join(END_S)
            if self._process.is_alive():
                raise
            self._raise_death()

    def _send(self, method: str, *arguments: object) -> None:
        """Call a method of the server; receive its result next."""
        try:
            self._pipe.send((method, *arguments))
        except OSError:
            self._raise_death()

    def _receive(self) -> Any:
        """The next message. Raises :class:`UserError`: the process's own, or how it has ended."""
        wait([self._pipe, self._process.sentinel])
        with contextlib.suppress(EOFError, OSError):
            if self._pipe.poll():
                message = self._pipe.recv()
                if isinstance(message, UserError):
                    raise message
                return message
        self._process.join(END_S)
        raise UserError(
            f"the draft's process has ended with exit code {self._process.exitcode}, so nothing more can be "
            "measured with a draft in a process of its own; -9 means that it was killed, often because "
            f"memory ran out: {self._remedy}"
        )

    def _raise_death(self) -> NoReturn:
        """After the process has ended: raise the reason, which may come after other messages."""
        while True:
            self._receive()

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
    """Run with this number of torch threads on a CPU; restore the former number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _topology(rank: int, device: torch.device) -> Topology:
    return Topology(rank=rank, world_size=2, tp_size=1, uses_draft=True, device=device)


def _run_rank(pipe: Connection, source: RankSource, rendezvous: str) -> None:
    """Main function of the process, which ends with the pipe."""
    try:
        server = source.open()
        pipe.send(None)
        join_world(_topology(DRAFT_RANK, source.device), rendezvous)
        while (call := pipe.recv()) is not None:
            method, *arguments = call
            pipe.send(getattr(server, method)(*arguments))
    except EOFError:
        logger.warning("the emulation's process has ended; the draft's process ends too")
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else traceback.format_exc()
        with contextlib.suppress(OSError):
            pipe.send(UserError(f"the draft's process has failed: {reason}"))
