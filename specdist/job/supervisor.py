"""One rank of a launch whose target groups share drafts: a light process that keeps the real one alive.

torchrun ends all ranks when one fails. Here a rank that fails is started again, a draft alone, a group's
ranks together, and the others go on. A group that fails too often is given up: its shards are taken over like
those of any replica. The launch ends with the exit code of its ranks: 0 when the run is complete.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist

from specdist.config.generate import GenerateConfig
from specdist.job.parts import Part, environment_of, place_of
from specdist.job.signals import EXIT_STOPPED, GRACE_S, STOP_SIGNALS, find_launcher
from specdist.job.topology import launch_store, launcher_has_store, rank_from_environment

FAILED, USAGE_ERROR = 1, 2
POLL_S = 0.2
# Before a part starts again: a device's memory is free a moment after its process has ended.
PAUSE_S = 0.5
# After a rank that was asked to stop should have ended by itself.
MARGIN_S = 2.0

logger = logging.getLogger(__name__)


def supervise(config: GenerateConfig, run: Callable[[], int]) -> int:
    """Run this rank of the launch; returns its exit code. ``run`` runs the rank in its part, in a process of
    its own, and returns the exit code of that."""
    return Supervisor(config, run).run()


class Supervisor:
    """Of one rank."""

    def __init__(self, config: GenerateConfig, run: Callable[[], int]) -> None:
        rank = rank_from_environment()
        self._config = config
        self._run = run
        self._part, self._rank, self._num_ranks = place_of(config, rank)
        self._store: dist.Store = launch_store(is_host=rank == 0)
        self._hosts_store = rank == 0 and not launcher_has_store()
        self._launcher = find_launcher()
        self._asked_at: float | None = None
        self._child = 0

    def run(self) -> int:
        """Until this rank's part has ended."""
        old = {number: signal.signal(number, self._ask_to_stop) for number in STOP_SIGNALS}
        try:
            code = self._supervise()
            self._leave()
        except dist.DistError:
            # The launcher is gone, and its store with it. A draft has nothing to save.
            code = self._end(EXIT_STOPPED, at_once=self._part.kind == "draft")
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
        return code

    def _leave(self) -> None:
        """Where the launcher has no store, the one that hosts it leaves last."""
        num_others = self._config.num_world_ranks - 1
        num_left = self._store.add("left", 1)
        deadline = time.monotonic() + GRACE_S
        while self._hosts_store and num_left <= num_others and time.monotonic() < deadline:
            time.sleep(POLL_S)
            num_left = self._store.add("left", 0)

    def _supervise(self) -> int:
        num_starts = self._published_starts()
        while True:
            code = self._watch(num_starts)
            if self._part.kind == "draft" and self._have_all_ended():
                return self._code_of_all()
            is_final = code in (0, EXIT_STOPPED, USAGE_ERROR) or self._asked_at is not None
            if is_final:
                self._publish_end(code)
                return code
            published = self._published_starts()
            if published == num_starts and num_starts >= self._config.max_restarts:
                return self._give_up(code)
            if published == num_starts:
                self._store.compare_set(self._key("starts"), str(num_starts or ""), str(num_starts + 1))
            num_starts = max(num_starts + 1, published)
            logger.error(
                "%s %d has ended with code %d: starting it again (%d of at most %d times)",
                self._part.kind, self._part.index, code, num_starts, self._config.max_restarts,
            )  # fmt: skip
            time.sleep(PAUSE_S)

    def _watch(self, num_starts: int) -> int:
        """Start the rank, and wait for its end; its exit code, that of a shell for a signal."""
        self._child = self._start(num_starts)
        while True:
            pid, status = os.waitpid(self._child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            time.sleep(POLL_S)
            if self._launcher is not None and os.getppid() != self._launcher:
                return self._end(EXIT_STOPPED)
            if self._asked_at is not None and time.monotonic() > self._asked_at + GRACE_S + MARGIN_S:
                return self._end(EXIT_STOPPED)
            if self._part.kind == "draft":
                if self._have_all_ended():
                    return self._end(0, at_once=True)
            elif self._num_ranks > 1 and self._published_starts() > num_starts:
                # Another rank of the group starts again.
                return self._end(FAILED, at_once=True)

    def _start(self, num_starts: int) -> int:
        part = Part(self._part.kind, self._part.index, num_starts)
        sys.stdout.flush()
        sys.stderr.flush()
        # A fork with a context of CUDA cannot use the device, and fails late.
        if torch.cuda.is_initialized():
            raise RuntimeError("the supervisor of a rank has used CUDA, so its ranks could not")
        pid = os.fork()
        if pid:
            return pid
        code = FAILED
        try:
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.environ.update(environment_of(part, self._rank, self._num_ranks))
            code = self._run()
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _end(self, code: int, *, at_once: bool = False) -> int:
        """End the rank, which has some time to do so itself; returns the code."""
        deadline = time.monotonic() + (0.0 if at_once else GRACE_S)
        try:
            os.kill(self._child, signal.SIGKILL if at_once else signal.SIGTERM)
            while os.waitpid(self._child, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(self._child, signal.SIGKILL)
                time.sleep(POLL_S / 4)
        except (ChildProcessError, ProcessLookupError):
            pass  # it has ended
        return code

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._asked_at = self._asked_at or time.monotonic()
        if self._child and self._part.kind == "target":
            try:
                os.kill(self._child, number)
            except ProcessLookupError:
                return

    def _give_up(self, code: int) -> int:
        """The other parts go on without this one."""
        logger.error(
            "%s %d has failed %d times (--max_restarts): the others go on without it",
            self._part.kind, self._part.index, self._config.max_restarts + 1,
        )  # fmt: skip
        self._publish_end(code)
        while not self._have_all_ended() and self._asked_at is None:
            if self._launcher is not None and os.getppid() != self._launcher:
                return EXIT_STOPPED
            time.sleep(POLL_S)
        return self._code_of_all()

    def _publish_end(self, code: int) -> None:
        self._store.compare_set(self._key("end"), "", str(code))

    def _key(self, what: str) -> str:
        return f"{self._part.name}/{what}"

    def _published_starts(self) -> int:
        return int(self._value(self._key("starts")) or 0)

    def _value(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _ends(self) -> list[str]:
        return [self._value(f"target-{group}/end") for group in range(self._config.num_targets)]

    def _have_all_ended(self) -> bool:
        return all(self._ends())

    def _code_of_all(self) -> int:
        """0 if any group has completed the run; else that of a group that was stopped or has failed."""
        codes = [int(end) for end in self._ends() if end] or [EXIT_STOPPED]
        return min(codes) if 0 in codes else max(codes)
