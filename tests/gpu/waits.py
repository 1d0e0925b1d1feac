"""How often the host waits for the device in a round of the engine, on either side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from specdist.engine.draft.channels import InProcess
from specdist.engine.engine import Engine
from tests.gpu.device import DEVICE

Waits = Counter[tuple[str, str]]


@dataclass
class RoundWaits:
    """Of steady rounds, in which no sequence begins: the host's waits by (reason, line)."""

    draft: list[Waits] = field(default_factory=list)
    target: list[Waits] = field(default_factory=list)

    @property
    def mean_of_draft(self) -> float:
        return sum(waits.total() for waits in self.draft) / len(self.draft)

    @property
    def most_of_draft(self) -> int:
        return max(waits.total() for waits in self.draft)

    @property
    def most_of_target(self) -> int:
        return max(waits.total() for waits in self.target)

    def report(self) -> str:
        """Waits per round, and the lines that cause them."""
        lines = []
        for side, rounds in (("draft", self.draft), ("target", self.target)):
            numbers = [waits.total() for waits in rounds]
            lines.append(f"{side}: {sum(numbers) / len(numbers):.2f} per round, at most {max(numbers)}")
            for (reason, line), count in sum(rounds, Waits()).most_common():
                lines.append(f"  {count / len(rounds):6.2f}  {line:32} {reason}")
        return "\n".join(lines)


@contextmanager
def counted_waits() -> Iterator[RoundWaits]:
    """Counts inside the block, for a draft in the target's process."""
    found = RoundWaits()
    drafting = Waits()
    ask, step = InProcess.ask, Engine.step

    def counted_ask(self: InProcess, *arguments: Any) -> Any:
        before = DEVICE.counts().synchronisations
        reply = ask(self, *arguments)
        drafting.update(DEVICE.counts().synchronisations - before)
        return reply

    def counted_step(self: Engine) -> Generator[Any, None, bool]:
        drafting.clear()
        before = DEVICE.counts().synchronisations
        is_over = yield from step(self)
        plan = self.round.plan
        if not (is_over or plan.chunks or plan.opened):
            found.draft.append(Waits(drafting))
            found.target.append(DEVICE.counts().synchronisations - before - drafting)
        return is_over

    with (
        patch.object(InProcess, "ask", counted_ask),
        patch.object(Engine, "step", counted_step),
    ):
        yield found
