"""What every job of ranks does around its work: options, the world, logs, and one error for all ranks."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from specdist.config import GenerateConfig
from specdist.data import Membership
from specdist.engine.collectives import LEAD_RANK
from specdist.errors import UserError
from specdist.job.logs import add_run_log
from specdist.job.signals import StopRequest
from specdist.job.topology import (
    Topology,
    join_world,
    rank_from_environment,
    told_by_lead,
    topology_from_environment,
)

Config = TypeVar("Config")
Planned = TypeVar("Planned")
USAGE_ERROR = 2


def run_rank(
    parse: Callable[[], Config],
    replica_of: Callable[[Config], GenerateConfig],
    run: Callable[[Config, Topology, StopRequest], int],
) -> int:
    """Run one rank of a job; returns its exit code, ``USAGE_ERROR`` for a :class:`UserError`.

    Args:
        parse: the job's options, the same on every rank.
        replica_of: which replica they ask for.
        run: the rank's work, once the ranks have met.
    """
    # Every rank finds the same error in its options, or is told of the others': it is shown once.
    shows_errors = rank_from_environment() == LEAD_RANK
    stop = StopRequest()
    try:
        with contextlib.nullcontext() if shows_errors else contextlib.redirect_stderr(io.StringIO()):
            config = parse()
        topology = topology_from_environment(replica_of(config))
        _configure_logging(topology)
        join_world(topology)
        code = run(config, topology, stop)
        if dist.is_initialized():
            dist.barrier()  # nobody hangs up while another rank is still talking
        return code
    except UserError as error:
        if shows_errors:
            print(f"error: {error}", file=sys.stderr)  # noqa: T201 (what the user is to read, not a log line)
        return USAGE_ERROR
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        stop.close()


def lead_first(topology: Topology, plan: Callable[[], Planned]) -> Planned:
    """Run on the lead and then on the others: it may fetch files, and its error is everybody's."""
    planned = lead_only(topology, plan)
    return plan() if planned is None else planned


def lead_only(topology: Topology, plan: Callable[[], Planned]) -> Planned | None:
    """Run on the lead alone; its :class:`UserError` is raised on every rank."""
    planned: Planned | None = None
    message: str | None = None
    if topology.is_lead:
        try:
            planned = plan()
        except UserError as error:
            message = str(error)
    message = told_by_lead(topology, message)
    if message is not None:
        raise UserError(message)
    return planned


def _configure_logging(topology: Topology) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if topology.is_lead else logging.WARNING,
        format=f"%(asctime)s [{topology.role}] %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    # The last one has a line for every layer of every pass.
    for noisy in ("httpx", "DeepSpeed", "torch.nn.attention.varlen"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def log_to_file(folder: Path, topology: Topology, membership: Membership | None) -> None:
    """Every rank of every replica keeps a log of its own in the run folder. ``membership``: the lead's."""
    replica = told_by_lead(topology, "" if membership is None else membership.replica)
    add_run_log(folder / "logs" / f"{replica}-rank-{topology.rank}.log", topology.role)
