"""Replicas within one test: clocks are set by hand, and processes pretend to be on other machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specdist.data.leases.heartbeat import Process
from specdist.data.leases.membership import Membership

SILENT_AFTER_S = 12.0


class Clock:
    """Seconds since an arbitrary moment: no two replicas' clocks agree."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Member:
    """A member without a thread: it beats when the test calls it."""

    def __init__(self, output: Path, name: str, *, start: float = 0.0) -> None:
        self.clock = Clock(start)
        self.membership = Membership(
            output, silent_after_s=SILENT_AFTER_S, clock=self.clock, sleep=self.clock.sleep, name=name
        )
        beat = self.membership.heartbeat._beat
        beat.process = replace(beat.process, machine=f"machine of {name}")
        self.membership.create_folder()
        self.beat()

    @property
    def leases(self):
        return self.membership.leases

    def beat(self) -> None:
        self.membership.heartbeat.beat()

    def take(self, name: str, **options):
        return self.leases.take(name, self.leases.latest().get(name), **options)

    def pretend(self, process: Process) -> None:
        """Write a heartbeat as this process."""
        self.membership.heartbeat._beat.process = process
        self.beat()


def watch_for(observer: Member, seconds: float, name: str, *, beating: Member | None = None, step_s=1.0):
    """Let the observer try once a second for so long; returns its last answer."""
    lease = None
    for _ in range(int(seconds / step_s)):
        observer.clock.now += step_s
        if beating is not None:
            beating.beat()
        lease = observer.take(name)
        if lease is not None:
            break
    return lease
