"""Predicted seconds from logits to tokens: what the kernels of :mod:`specdist.kernels.sampling` read, and how
often. Every distribution is one program's, on one multiprocessor: few of them leave most of a GPU idle.

What policies compute of a draft's distributions (entropies) is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdist.lab.plan.model.calibration import Filters
from specdist.lab.plan.model.hardware import Gpu
from specdist.models.files.sizes import ModelSize
from specdist.sampling.distributions import SamplingSettings

# The job's own.
DEFAULTS = SamplingSettings()
# A program has four warps for each of a multiprocessor's four schedulers, and two fit on one.
WARPS_PER_SCHEDULER, PROGRAMS_PER_MULTIPROCESSOR = 4, 2
# Ids of a row that a loop reads at a time, and the instructions of its loops for these, compiled for sm_90:
# the largest logit, the sum and the probabilities; with filters the listing of likely ids for the sum.
PROCESS_BLOCK, PLAIN_LOOPS, FILTERED_LOOPS = 4096, (64, 103, 131), (64, 167, 147)
DRAW_BLOCK, DRAW_INSTRUCTIONS = 2048, 80
# A search for a threshold: of a digit of four bits, and of 512 listed ids. How many of these there are is
# assumed: a few ids of a thousand are likely.
DIGIT_INSTRUCTIONS, LISTED_INSTRUCTIONS, NUM_LISTED = 300, 68, 4
NUM_DIGITS = {2: 4, 4: 8}
# From a load to the first instruction that needs it, and the clock of a busy GPU. Assumed.
LOAD_CYCLES = 600
CYCLES_PER_S = 1.7e9
FLOAT_BYTES = 4
# Plain operations of torch on a number of a sharded target's logits: in float32, its score after temperature
# (6 bytes), the largest (4), differences and exponentials (8 each) and their sum (4).
NORMALISER_BYTES = 30
# The same on a row from which a next token is drawn: copies of it and of the draft's (8 bytes each), their
# difference (12), its positive part (8), its sum (4), the quotient (8), and the choice of a row (12).
RESIDUAL_BYTES = 60


@dataclass(frozen=True, kw_only=True)
class SamplingTimes:
    """Of one model's logits on a GPU. ``settings``: the same of target and draft."""

    gpu: Gpu
    model: ModelSize
    settings: SamplingSettings

    def draft_s(self, num_rows: float) -> float:
        """Seconds of a draft step beside its pass: a distribution of every sequence, and a draw from it."""
        if self.settings.is_greedy:
            return self._moving_s(num_rows * self.model.bytes_per_number)
        return self.process_s(num_rows) + self.draw_s(num_rows)

    def target_s(self, num_logits: float, num_rows: float, tp_size: int) -> float:
        """Seconds of verifying so many tokens of ``num_rows`` sequences and of drawing their next tokens, on
        the rank that has the most to do."""
        number = self.model.bytes_per_number
        if self.settings.is_greedy:
            return self._moving_s(num_logits * number / tp_size)
        next_s = self._moving_s(num_rows * RESIDUAL_BYTES) + self.draw_s(num_rows)
        if tp_size == 1:
            return self.process_s(num_logits) + next_s
        if self.settings.top_p < 1:
            # The nucleus needs all logits on one rank.
            return self._gathering_s(num_logits, tp_size) + self.process_s(num_logits) + next_s
        normalising_s = self._moving_s(num_logits * NORMALISER_BYTES / tp_size)
        return normalising_s + self._gathering_s(num_rows, tp_size) + self.process_s(num_rows) + next_s

    def process_s(self, num_rows: float) -> float:
        """Seconds from logits to as many distributions."""
        measured = self.gpu.sampling_curves.get(self._filters)
        if measured is not None:
            return measured.process_s(num_rows, self.model.vocab_size)
        num_searches = int(self._has_top_k) + int(self.settings.top_p < 1)
        loops = FILTERED_LOOPS if num_searches else PLAIN_LOOPS
        num_blocks = -(-self.model.vocab_size // PROCESS_BLOCK)
        num_digits = num_searches * NUM_DIGITS[self.model.bytes_per_number]
        return self._programs_s(
            num_rows,
            bytes_per_id=len(loops) * self.model.bytes_per_number + FLOAT_BYTES,
            num_loads=num_blocks * len(loops) + num_digits * NUM_LISTED,
            num_instructions=num_blocks * sum(loops)
            + num_digits * (DIGIT_INSTRUCTIONS + NUM_LISTED * LISTED_INSTRUCTIONS),
        )

    def draw_s(self, num_rows: float) -> float:
        """Seconds to draw from as many distributions."""
        measured = self.gpu.sampling_curves.get(self._filters)
        if measured is not None:
            return measured.draw_s(num_rows, self.model.vocab_size)
        num_blocks = -(-self.model.vocab_size // DRAW_BLOCK)
        return self._programs_s(
            num_rows,
            bytes_per_id=FLOAT_BYTES,
            num_loads=num_blocks,
            num_instructions=num_blocks * DRAW_INSTRUCTIONS,
        )

    @property
    def _has_top_k(self) -> bool:
        return 0 < self.settings.top_k < self.model.vocab_size

    @property
    def _filters(self) -> Filters:
        has_top_p = self.settings.top_p < 1
        if self._has_top_k:
            return "top_k and top_p" if has_top_p else "top_k"
        return "top_p" if has_top_p else "none"

    def _programs_s(
        self, num_rows: float, *, bytes_per_id: float, num_loads: int, num_instructions: int
    ) -> float:
        """Of a program per row. Two on a multiprocessor wait for their loads together, and issue their
        instructions one after the other."""
        moving_s = self._moving_s(num_rows * bytes_per_id)
        if self.gpu.is_host:
            return moving_s
        num_places = PROGRAMS_PER_MULTIPROCESSOR * self.gpu.num_multiprocessors
        cycles = LOAD_CYCLES * num_loads * math.ceil(num_rows / num_places)
        each = WARPS_PER_SCHEDULER * num_instructions
        cycles += each * math.ceil(num_rows / self.gpu.num_multiprocessors)
        return max(moving_s, cycles / CYCLES_PER_S)

    def _gathering_s(self, num_rows: float, tp_size: int) -> float:
        """Of whole logits on one rank, where the parts are joined."""
        row_bytes = self.model.bytes_per_number * self.model.vocab_size
        return self.gpu.send_s(num_rows * row_bytes * (tp_size - 1) / tp_size) + self._moving_s(
            num_rows * 2 * self.model.bytes_per_number
        )

    def _moving_s(self, bytes_per_id: float) -> float:
        """Of so many bytes for every id of the vocabulary, read or written by all of the GPU."""
        return bytes_per_id * self.model.vocab_size / self.gpu.sustained_bytes_per_s
