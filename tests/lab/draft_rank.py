"""The draft in a process of its own: rank 1 of a world of two, whose rank 0 is the benchmark.

It loads the draft once and serves one engine after another. The calls come through a pipe, which also tells
when the process has died; the messages of an engine and its draft go through the world.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from specdist.config.groups import ModelImpl
from specdist.data.stats.regression import NS_PER_S
from specdist.engine.assembly import Assembly
from specdist.engine.draft.channels import ToRank, serve_draft
from specdist.engine.messages.link import Wait
from specdist.engine.target.collectives import RANK_ZERO
from specdist.engine.times.timeline import Kind, Timeline, clock_of
from specdist.job.costs.measuring import LEAST_BUDGET_S, ModelTimes, measure_draft
from specdist.job.costs.pass_times import Budget
from specdist.job.ranks.topology import Topology, join_world
from specdist.job.run.workload import Workload
from specdist.lab.benchmark.pair import DraftOrder
from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading.loading import load_whole
from specdist.models.passes.runner import ModelRunner
from specdist.policies.costs import BRANCH_COUNTS
from specdist.policies.payoff import ALONE, RoundShape
from specdist.policies.registry import uses_features
from specdist.utils.errors import UserError

DRAFT_RANK = 1
END_S = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RankOrder(DraftOrder):
    """Of a draft that may work ahead.

    ``trace_folder``: for a trace of each process, with the phases of a round; None for none.
    """

    ahead: RoundShape = ALONE
    trace_folder: str | None = None

    @property
    def name(self) -> str:
        """How the draft works in a process of its own."""
        return ("asynchronous" if self.ahead.num_ahead else "separate") + branches_text(
            self.ahead.num_branches
        )

    def assembly(self, largest: Assembly) -> Assembly:
        assembly = super().assembly(largest)
        scheduling = dataclasses.replace(assembly.scheduling, num_ahead_tokens=self.ahead.num_ahead)
        return dataclasses.replace(assembly, scheduling=scheduling, ahead=self.ahead)

    def timeline(self, rest: Kind, device: torch.device) -> Timeline:
        annotate = None if self.trace_folder is None else torch.profiler.record_function
        return Timeline(rest, clock=clock_of(device), annotate=annotate)

    @contextlib.contextmanager
    def traced(self, process: str) -> Iterator[None]:
        """With a trace folder, write ``process.json``: all that this process does inside."""
        if self.trace_folder is None:
            yield
            return
        with torch.profiler.profile() as profiler:
            yield
        profiler.export_chrome_trace(str(Path(self.trace_folder, f"{process}.json")))


def branches_text(num_branches: int) -> str:
    """The end of a placement's name in tables."""
    return f", {num_branches} branch{'es' * (num_branches > 1)}" if num_branches else ""


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


@dataclass(frozen=True, kw_only=True)
class DraftSource:
    """A model that is loaded: model, device and assembly. ``num_threads`` are torch's on a CPU;
    ``num_context_tokens`` is the context length at which steps are timed."""

    checkpoint: str
    quantization: str | None
    trust_remote_code: bool
    allow_pickle: bool
    dtype: str
    model_impl: ModelImpl
    device: torch.device
    num_threads: int
    num_context_tokens: int
    assembly: Assembly
    remedy: str = "free some memory, or use --placements colocated"

    def open(self) -> _Server:
        return _Server(self)


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
        if source.device.type == "cuda":
            torch.cuda.set_device(source.device)
        server = source.open()
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
    """The model, with a cache for one number of slots at a time. :class:`DraftRank` calls its methods."""

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
        checkpoint = dataclasses.replace(checkpoint, quantization=source.quantization)
        model = load_whole(checkpoint, dtype=checkpoint.torch_dtype(source.dtype), device=source.device)
        self._runner = ModelRunner(model, source.device, model_impl=source.model_impl)
        self._source = source
        self._num_slots = 0

    def measure(self, order: RankOrder) -> ModelTimes:
        """Times of draft steps of up to ``order.num_slots`` sequences with the most branches."""
        self._allocate(order.num_slots)
        assembly = order.assembly(self._source.assembly)
        return measure_draft(
            assembly,
            self._runner,
            num_branch_slots=order.num_slots * BRANCH_COUNTS[-1],
            workload=Workload(num_context_tokens=self._source.num_context_tokens),
            uses_features=uses_features(order.choice.policy),
            budget=Budget(LEAST_BUDGET_S * NS_PER_S),
        )

    def build(self, order: RankOrder) -> None:
        self._allocate(order.num_slots)
        assembly = order.assembly(self._source.assembly)
        self._order = order
        self._clock = order.timeline("transfer", self._runner.device)
        self._draft = assembly.draft_worker(self._runner, order.policy(assembly.settings), self._clock)

    def serve(self) -> None:
        """Serve one engine to its end."""
        with self._order.traced("draft"):
            serve_draft(self._draft, RANK_ZERO, clock=self._clock)

    def _allocate(self, num_slots: int) -> None:
        """A cache with room for as many branches as the costs may ask for."""
        if num_slots == self._num_slots:
            return
        assembly = with_slots(self._source.assembly, num_slots)
        assembly.allocate_draft(
            self._runner,
            num_branch_slots=num_slots * BRANCH_COUNTS[-1],
            max_branch_tokens=assembly.scheduling.max_draft_tokens + 1,
        )
        self._num_slots = num_slots


def with_slots(assembly: Assembly, num_slots: int) -> Assembly:
    """The same assembly for this many sequences at a time."""
    return dataclasses.replace(
        assembly, scheduling=dataclasses.replace(assembly.scheduling, max_num_seqs=num_slots)
    )
