"""What learning on the way costs at a GPU's pace, in virtual time.

    python -m tests.emulation.learning --output FILE

Engine, draft, rounds and the choice of the time to learn (:mod:`specdist.engine.spare_time`) are real; what
is learned changes nothing. A piece of a training step takes the planner's time of a layer's part of a pass
over a chunk of tokens, twice that backward, and no less than the host needs to queue it; the optimizer reads
and writes 28 bytes of a weight.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdist.data.files import write_json
from specdist.data.heartbeat import now_utc
from specdist.emulation.config import EmulationConfig
from specdist.emulation.run import Emulation
from specdist.engine.proposals import ProposalReply, ProposalRequest
from specdist.engine.spare_time import SpareTime
from specdist.engine.timeline import Timeline
from specdist.policies.choice import PolicyChoice
from tests.emulation import virtual
from tests.emulation.virtual import MESSAGE_NS, VirtualRank, tokens_per_s

PAIR: dict[str, Any] = {"emulate": "h100-sxm", "target": "70b", "draft": "1b", "tp_size": 4}
BATCH_SIZES, MODES = (1, 8, 32, 128), ("in_turns", "ahead", "branches", "auto")
CHUNK, NUM_LAYERS, NUM_WEIGHTS, NUM_RANGES = 128, 16, 1.2e9, 64
# Of the host per piece; bytes per second of the memory.
QUEUE_S, BANDWIDTH = 0.4e-3, 3.35e12
NS_PER_S = 1e9


def pieces_s(config: EmulationConfig) -> Iterator[float]:
    """Seconds of one piece after the other: four chunks, and a step of the optimizer."""
    layer_s = Emulation(config).draft.pass_s(CHUNK, 1) / NUM_LAYERS
    chunk = [layer_s] * NUM_LAYERS + [2 * layer_s] * NUM_LAYERS
    step = 4 * chunk + [28 * NUM_WEIGHTS / BANDWIDTH / NUM_RANGES] * NUM_RANGES
    return (max(QUEUE_S, seconds) for seconds in itertools.cycle(step))


class LearningRank(VirtualRank):
    """Learns until the next request has come; one that comes meanwhile waits for the piece to end."""

    pieces: Iterator[float]
    learned_s = late_s = 0.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._spare = SpareTime(lambda: self._own.now_ns / NS_PER_S)
        self._piece = next(self.pieces)

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        came_ns = self._target.now_ns + MESSAGE_NS // 2
        if request.next_distributions_W is not None:
            came_ns = max(came_ns, self._target.free_at_ns + MESSAGE_NS // 2)
        self._learn_until(came_ns)
        return super().propose(request, clock)

    def _learn_until(self, came_ns: int) -> None:
        own, spare = self._own, self._spare
        spare.begin()
        is_late, before_ns = False, own.now_ns
        while own.now_ns < came_ns:
            is_late, before_ns = False, own.now_ns
            if spare.may_take(self._piece):
                # The device does what was drafted ahead first.
                own.now_ns = max(own.now_ns, own.free_at_ns) + round(self._piece * NS_PER_S)
                LearningRank.learned_s += self._piece
                self._piece, is_late = next(self.pieces), True
            else:
                chance_ns = round(spare.next_chance_s(self._piece) * NS_PER_S) + 1
                own.now_ns = min(came_ns, own.now_ns + chance_ns)
        LearningRank.late_s += max(0, own.now_ns - came_ns) / NS_PER_S
        spare.end((before_ns if is_late else own.now_ns) / NS_PER_S, is_late=is_late)


def compared(mode: str, batch_size: int, temperature: float, rounds: int) -> dict[str, Any]:
    """Tokens per second without and with it."""
    config = EmulationConfig(
        **PAIR, batch_sizes=[batch_size], temperature=temperature, acceptance=0.8, rounds=rounds
    )
    choice = PolicyChoice("fixed", {"num_draft_tokens": 5}) if mode != "auto" else PolicyChoice(
        "goodput", {"max_draft_tokens": 16}
    )  # fmt: skip
    without = tokens_per_s(config, mode, choice)
    LearningRank.pieces, LearningRank.learned_s, LearningRank.late_s = pieces_s(config), 0.0, 0.0
    virtual.VirtualRank = LearningRank  # type: ignore[misc]
    try:
        with_it = tokens_per_s(config, mode, choice)
    finally:
        virtual.VirtualRank = VirtualRank  # type: ignore[misc]
    return {
        "mode": mode, "batch_size": batch_size, "temperature": temperature, "rounds": rounds,
        "tokens_per_s": round(without, 1), "with_learning": round(with_it, 1),
        "ratio": round(with_it / without, 4), "learned_s": round(LearningRank.learned_s, 3),
        "late_s": round(LearningRank.late_s, 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    options = parser.parse_args()
    settings = []
    for temperature, batch, mode in itertools.product(
        options.temperatures, options.batch_sizes, options.modes
    ):
        settings.append(compared(mode, batch, temperature, options.rounds))
        sys.stderr.write(f"{settings[-1]}\n")
        write_json(
            options.output,
            {
                "command": "python " + " ".join(["-m", "tests.emulation.learning", *sys.argv[1:]]),
                "date": now_utc(),
                "settings": settings,
            },
        )


if __name__ == "__main__":
    main()
