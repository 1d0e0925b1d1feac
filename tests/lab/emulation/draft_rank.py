"""The draft in a process of its own: rank 1 of a world of two, whose rank 0 is the emulation.

It makes the draft once and serves one engine after another. The calls come through a pipe, which also tells
when the process has died; the messages of an engine and its draft go through the world.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from specdist.engine.draft.client import ToRank
from specdist.engine.messages import link
from specdist.engine.target.sharded_target import RANK_ZERO
from specdist.job.ranks.topology import Topology, join_world
from specdist.utils.errors import UserError

DRAFT_RANK = 1
CPU = torch.device("cpu")
END_S = 10


class DraftRank:
    """Handle of the process, and rank 0's membership in the world: a context manager, one at a time.

    Every method raises :class:`UserError` when the process has ended.
    """

    def __init__(self, new_server: Callable[[], Any]) -> None:
        """``new_server``: makes the :class:`tests.lab.emulation.sides.DraftServer` there."""
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = Path(self._folder.name, "rendezvous").as_uri()
        # Not a fork of this process, which threads of torch do not survive, but of a server process that has
        # imported this module and nothing else.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, new_server, rendezvous)
        self._process = context.Process(target=_run_rank, args=arguments, name="draft", daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._receive()
            join_world(_topology(RANK_ZERO), rendezvous)
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

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the :class:`tests.lab.emulation.sides.DraftServer`."""
        with contextlib.suppress(OSError):
            self._pipe.send((method, *arguments))
        return self._receive()

    @contextlib.contextmanager
    def serving(self) -> Iterator[ToRank]:
        """The way to the draft of the engine that it was built for, which must run to its end inside."""
        with contextlib.suppress(OSError):
            self._pipe.send(("serve",))
        try:
            yield ToRank(DRAFT_RANK, CPU, link.busy_wait)
        except RuntimeError:
            # A broken connection does not say why it broke; the end of the process may.
            self._process.join(END_S)
            if not self._process.is_alive():
                self._receive()
            raise
        self._receive()

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
            f"the draft's process has ended with exit code {self._process.exitcode}; -9 means that it was "
            "killed, often because memory ran out: leave out --modes synchronous asynchronous branches"
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
    """Run with this number of torch threads on a CPU; restore the former number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _topology(rank: int) -> Topology:
    return Topology(rank=rank, world_size=2, tp_size=1, uses_draft=True, device=CPU)


def _run_rank(pipe: Connection, new_server: Callable[[], Any], rendezvous: str) -> None:
    """Main function of the process, which ends with the pipe."""
    try:
        server = new_server()
        pipe.send(None)
        join_world(_topology(DRAFT_RANK), rendezvous)
        while (call := pipe.recv()) is not None:
            method, *arguments = call
            pipe.send(getattr(server, method)(*arguments))
    except EOFError:
        pass  # the emulation's process has ended
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else traceback.format_exc()
        with contextlib.suppress(OSError):
            pipe.send(UserError(f"the draft's process has failed: {reason}"))
