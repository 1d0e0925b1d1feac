"""A draft and a target group on machines that only a network joins: two network namespaces of this one."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from specdist.engine.sockets import Kind, Link, LinkError, Message
from specdist.job import shared_drafts
from specdist.job.shared_drafts import DraftDirectory, Listeners, check_greeting

ADDRESSES = ("10.211.77.1", "10.211.77.2")
PORT, TIMEOUT_S, WAIT_S = 29571, 1.0, 30.0
TERMS = {"policy": "fixed"}
PART = SimpleNamespace(index=0)
TOPOLOGY: Any = SimpleNamespace(part=PART, num_drafts=1)
CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two machines with an address each."""
    names = [f"specdist-{os.getpid()}-{index}" for index in range(2)]
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        ip(
            "link",
            "add",
            "veth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "veth0",
            "netns",
            names[1],
        )
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "veth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def enter(namespace: str, machine: str) -> None:
    """From now on this process is on that machine."""
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}
    shared_drafts.Process = SimpleNamespace(  # type: ignore[assignment,misc]
        current=lambda: SimpleNamespace(machine=machine)
    )


def store(*, is_host: bool) -> dist.TCPStore:
    return dist.TCPStore(
        ADDRESSES[0], PORT, is_master=is_host, timeout=timedelta(seconds=WAIT_S), wait_for_workers=False
    )


def draft_machine(namespace: str, pipe: Connection) -> None:
    """Greets as a draft does, and answers every request with what it has."""
    enter(namespace, "first")
    held = store(is_host=True)
    shared_drafts.launch_store = lambda: held  # type: ignore[assignment]
    listeners = Listeners(spans_machines=True)
    listeners.publish(TOPOLOGY, num_pages=7)
    pipe.send(None)
    while True:
        link = Link(listeners.sockets[-1].accept()[0], timeout_s=WAIT_S)
        try:
            check_greeting(link.receive().values, listeners.token, TERMS)
            link.send(Message.of_values(Kind.WELCOME, {"draft": "far"}))
            while True:
                request = link.receive()
                link.send(Message(Kind.REPLY, request.arrays, request.matrix))
        except ValueError as error:
            link.send(Message.of_text(Kind.REFUSAL, str(error)))
        except LinkError:
            link.close()


def target_machine(namespace: str, pipe: Connection) -> None:
    """Reports what a target group sees of that draft."""
    enter(namespace, "second")
    held = store(is_host=False)
    shared_drafts.launch_store = lambda: held  # type: ignore[assignment]
    drafts = DraftDirectory(TOPOLOGY, timeout_s=TIMEOUT_S)
    pipe.send(drafts.num_pages(WAIT_S))
    try:
        drafts.dial({"terms": {"policy": "goodput"}})
    except LinkError as error:
        pipe.send(str(error))
    link, welcome = drafts.dial({"terms": TERMS})
    # Several segments of a network in both directions.
    sent = Message(
        Kind.REQUEST, [np.arange(300_000)], np.random.default_rng(0).random((64, 2048), np.float32)
    )
    link.send(sent)
    found = link.receive()
    same = found.matrix is not None and np.array_equal(found.matrix, np.asarray(sent.matrix))
    pipe.send((welcome, bool(same) and np.array_equal(found.arrays[0], sent.arrays[0])))
    pipe.recv()
    link.send(Message(Kind.REQUEST, [np.arange(3)]))
    try:
        link.receive()
    except LinkError as error:
        pipe.send(str(error))


def test_a_draft_on_another_machine(namespaces: list[str]) -> None:
    """Its pages, a refusal, messages unchanged, and a link that is cut: the group notices, and goes on."""
    context = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as stack:
        pipes = []
        for namespace, main in zip(namespaces, (draft_machine, target_machine), strict=True):
            ours, theirs = context.Pipe()
            process = context.Process(target=main, args=(namespace, theirs), daemon=True)
            process.start()
            stack.callback(process.kill)
            pipes.append(ours)
            if main is draft_machine:
                assert ours.poll(WAIT_S), "the draft has not told its address"

        def told() -> Any:
            assert pipes[1].poll(WAIT_S), "the target group says nothing"
            return pipes[1].recv()

        assert told() == 7
        assert "policy is 'goodput' for the target group and 'fixed' for the draft" in told()
        assert told() == ({"draft": "far"}, True)
        ip("-n", namespaces[0], "link", "set", "veth0", "down")
        pipes[1].send(None)
        assert "has not answered within 1 s" in told()
