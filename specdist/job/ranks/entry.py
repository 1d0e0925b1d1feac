"""The frame of every job that runs on ranks: their meeting, their logs, and one error for all of them."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
from collections.abc import Callable
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import NoReturn, TypeVar

import torch.distributed as dist

from specdist.config.generate import GenerateConfig
from specdist.data.leases.membership import Membership
from specdist.engine.target.sharded_target import RANK_ZERO
from specdist.job.ranks.activity import Activity, PhaseLog, StackLog
from specdist.job.ranks.logs import ConsoleLog, add_run_log
from specdist.job.ranks.numa import bind_near_gpu
from specdist.job.ranks.rank_store import Failure
from specdist.job.ranks.restart import is_out_of_memory, remember_replica, start_over
from specdist.job.ranks.signals import StopRequest, end_process, find_launcher
from specdist.job.ranks.topology import (
    Topology,
    broadcast_from_rank0,
    join_world,
    rank_from_environment,
    topology_from_environment,
)
from specdist.job.ranks.watchdog import Watchdog
from specdist.utils.documents import is_brief
from specdist.utils.errors import DISK_FULL, RANK_0_FIRST_S, USAGE_ERROR, UserError

Config = TypeVar("Config")
Planned = TypeVar("Planned")
FAILED, EXIT_CODES = 1, {"usage": USAGE_ERROR, "disk": DISK_FULL}

logger = logging.getLogger(__name__)


def run_rank(
    config: Config,
    replica: GenerateConfig,
    run: Callable[[Config, Topology, StopRequest, Activity], int],
    *,
    can_start_over: bool = False,
) -> int:
    """Run one rank of a job; returns its exit code, ``USAGE_ERROR`` for a :class:`UserError`.

    If another rank fails, this one ends too, and logs the reason.

    Args:
        config: the job's options, the same on every rank.
        replica: the options of its replica.
        run: the rank's work after the ranks have met.
        can_start_over: the job can continue with a smaller batch, see :mod:`specdist.job.ranks.restart`.
    """
    # All ranks get the same error: one of them shows it.
    shows_errors = rank_from_environment() == RANK_ZERO
    activity = Activity()
    stop = StopRequest(on_look=activity.step, launcher=find_launcher())
    watchdog: Watchdog | None = None
    phases = PhaseLog(activity)
    try:
        topology = topology_from_environment(replica)
        _configure_logging(topology)
        if topology.is_rank0:
            phases.watch()
        if topology.device.type == "cuda" and replica.cpu_affinity == "numa":
            bind_near_gpu(topology.device.index)
        if topology.world_size > 1:
            stacks = activity.stacks = StackLog()
            activity.begin("meeting the other ranks")
            watchdog = Watchdog(
                topology,
                activity,
                stacks,
                end=_leave,
                can_start_over=lambda: can_start_over and stop.defers_signals,
            )
        join_world(topology)
        activity.begin("checking the models and the prompts")
        code = run(config, topology, stop, activity)
        if watchdog is not None:
            activity.begin("leaving")
            if topology.device.type == "cuda":
                gc.collect()  # recorded graphs, which what the run has left refers to in circles
            dist.barrier()  # no connection is closed while another rank still uses it
            watchdog.leave()
            # The end of an NCCL communicator waits for every graph that has captured one of its collectives:
            # for ever, if a single one is still referred to. The process ends by os._exit, which does not.
            if topology.device.type != "cuda":
                dist.destroy_process_group()
            watchdog.close()
        return code
    except UserError as error:
        if shows_errors:
            _show(error)
        if watchdog is not None:
            failure = watchdog.explain(error)
            if not shows_errors:
                time.sleep(RANK_0_FIRST_S)
            _leave(failure)
        return error.exit_code
    except Exception as error:
        if watchdog is None:
            logger.exception("the job has failed")
            if can_start_over and stop.defers_signals and is_out_of_memory(error):
                with contextlib.suppress(OSError):
                    start_over()
            raise
        failure = watchdog.explain(error)
        if failure.kind in EXIT_CODES:
            if shows_errors:
                _show(failure.reason)
        else:
            # The traceback of a rank that was waiting for the failing one does not help.
            is_own = failure.rank == topology.rank
            logger.error("this replica ends: %s", failure, exc_info=error if is_own else None)
        _leave(failure)
    finally:
        phases.close()
        stop.close()


def _show(error: object) -> None:
    print(f"error: {error}", file=sys.stderr)  # noqa: T201 (what the user is to read, not a log line)


def _leave(failure: Failure) -> NoReturn:
    """End at once: at an ordinary exit libraries may wait for ranks that have ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    if failure.kind == "memory":
        with contextlib.suppress(OSError):
            start_over()
    end_process(EXIT_CODES.get(failure.kind, FAILED))


def rank0_first(topology: Topology, plan: Callable[[], Planned]) -> Planned:
    """Run on rank 0, which may download files, and then on the others; an error is raised on every rank."""
    planned = on_rank0(topology, plan)
    return plan() if planned is None else planned


def on_rank0(topology: Topology, plan: Callable[[], Planned]) -> Planned | None:
    """Run on rank 0 alone; its :class:`UserError` is raised on every rank. None on the other ranks."""
    planned: Planned | None = None
    message: str | None = None
    if topology.is_rank0:
        try:
            planned = plan()
        except UserError as error:
            message = str(error)
    message = broadcast_from_rank0(topology, message)
    if message is not None:
        raise UserError(message)
    return planned


def _configure_logging(topology: Topology) -> None:
    role = "" if is_brief() and topology.is_rank0 else f" [{topology.role}]"
    logging.basicConfig(
        handlers=[ConsoleLog(), MemoryHandler(1, flushLevel=logging.CRITICAL + 1)],
        level=logging.INFO if topology.is_rank0 else logging.WARNING,
        format=f"%(asctime)s{role} %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    logging.getLogger("specdist").setLevel(logging.NOTSET)
    for noisy in ("aiobotocore", "botocore", "httpcore", "httpx", "DeepSpeed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # Every rank logs the CPUs that it is bound to.
    logging.getLogger("specdist.job.ranks.numa").setLevel(logging.INFO)


def log_to_file(folder: Path, topology: Topology, membership: Membership | None, activity: Activity) -> None:
    """Log into the run folder, in a file for each rank of each replica, with its stack traces if it hangs.
    ``membership``: rank 0's."""
    replica = broadcast_from_rank0(topology, "" if membership is None else membership.replica)
    remember_replica(replica)
    path = folder / "logs" / f"{replica}-rank-{topology.rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    if add_run_log(path, topology.role) and activity.stacks is not None:
        activity.stacks.move_to(path)
    logger.info("logs        %s%s", path.parent, "; --verbose shows all of them here" if is_brief() else "")
