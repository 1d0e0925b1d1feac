"""The options of ``python -m tests.lab.emulation --emulate``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specdist.config.arguments import option
from specdist.lab.plan.hardware import GPUS
from specdist.lab.plan.simulate import MODES, Mode
from specdist.lab.synthetic.config import SHAPES
from specdist.policies.choice import PolicyChoice
from specdist.policies.costs import BRANCH_COUNTS
from specdist.utils.errors import UserError
from tests.lab.benchmark.choices import READERS, policy_choices

TARGET_ONLY: Mode = "target only"
# Every round is chosen, as by --overlap auto.
AUTO: Mode = "auto"
# As options are written: one word each.
MODE_OPTIONS: dict[str, Mode] = {mode.replace(" ", "_"): mode for mode in (*MODES, AUTO)}
DEFAULT_BATCH_SIZES = (1, 8, 32, 64, 128)
DEFAULT_POLICIES = ("fixed", "goodput")
DEFAULT_LENGTH = 5
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 1024, 32768


@dataclass(kw_only=True)
class EmulationConfig:
    """Every option of ``python -m tests.lab.emulation --emulate``. Raises :class:`UserError` for values that
    do not go together."""

    _argument_group_name = "Emulation"

    emulate: str = option(
        help=f"emulate this GPU: {', '.join(GPUS)}. Scheduler, engine, draft, policies, messages between two "
        "processes, statistics and files are real; the models are Markov tables whose passes take the time "
        "that jobs/plan.py predicts. The defaults take about five minutes on two cores; fewer --rounds, "
        "--modes or --batch_sizes take less"
    )
    calibration: str | None = option(
        None,
        help="calibration.json of a first day on such a GPU (python -m tests.gpu.first_day): what was "
        "measured there, instead of published and assumed figures",
    )
    output: str | None = option(None, help="JSON file for the result")
    picture: str | None = option(
        None, help="PNG file for a picture of two rounds of every mode, at the first batch size and policy"
    )

    # Models: their sizes are enough
    target: str = option(help=f"hub id or folder of the large model, or a shape: {', '.join(SHAPES)}")
    draft: str = option(help="the same of the small model")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto", help="auto = the configuration's; bfloat16 for a shape"
    )
    tp_size: int = option(1, help="GPUs that share the target")

    # The Markov pair
    acceptance: float = option(0.8, help="mean probability that a drafted token is accepted, 0 to 1")
    acceptance_then: float | None = option(
        None, help="the same in the second half of the measured rounds, all at once (default: no change)"
    )
    variation: float = option(
        0.0,
        help="difference between easy and hard stretches of a text, from 0 = none to 1 = the largest that "
        "keeps the mean acceptance",
    )
    stretch_tokens: int = option(32, help="length of a stretch; a power of two, at most 256")
    vocab_size: int = option(
        SMALLEST_VOCABULARY,
        help=f"tokens of the pair, a power of two from {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY}; many "
        "take this machine longer than the emulated GPU, which the result then says",
    )
    temperature: float = option(0.0, help="0 = greedy")
    seed: int = option(0, help="seed of the pair, prompts and samples")

    # Work
    prompt_tokens: int = option(1000, help="tokens of every prompt")
    output_tokens: int = option(500, help="tokens of every completion")
    rows_per_shard: int = option(64, help="rows per output file")
    rounds: int = option(150, help="rounds that are measured for each batch size, mode and policy")
    repeats: int = option(
        1,
        help="measurements of every case, all in turns; the one with the median share of exposed host time "
        "counts",
    )
    slowdown: int = option(
        1,
        help="passes take so many times as long, and rates are given as if they did not: for a machine whose "
        "cores do not carry all processes at full pace; the host's share is then as many times too small",
    )

    # Methods
    batch_sizes: list[int] | None = option(
        None, help="numbers of running sequences (default: 1 8 32 64 128)", action="extend"
    )
    modes: list[str] | None = option(
        None,
        help="target_only, colocated = both models on the target's GPUs; and with a GPU for the draft: "
        "in_turns, ahead, branches, or auto = every round is chosen (default: all but auto; the target alone "
        "is always measured)",
        action="extend",
        choices=tuple(MODE_OPTIONS),
    )
    policies: list[str] | None = option(
        None,
        help="length policies: all, or names, optionally with options: svip:stop_root_entropy=0.5 "
        f"(default: {' '.join(DEFAULT_POLICIES)})",
        action="extend",
    )
    initial_lengths: list[int] | None = option(
        None,
        help="draft tokens in the first round, for policies that have --num_draft_tokens (default: "
        f"{DEFAULT_LENGTH})",
        action="extend",
    )
    max_draft_tokens: int | None = option(
        None, help="maximum draft tokens per round, not for fixed (default: 20)"
    )
    num_branches: int | None = option(
        None, help="branches per sequence in the mode branches (default: from the passes' times, at least 1)"
    )

    def __post_init__(self) -> None:
        self.batch_sizes = sorted(set(self.batch_sizes or DEFAULT_BATCH_SIZES))
        chosen = self.modes or [name for name in MODE_OPTIONS if name != AUTO]
        self.modes = [name for name in MODE_OPTIONS if name in chosen]
        self.policies = self.policies or list(DEFAULT_POLICIES)
        for name in (
            "tp_size",
            "prompt_tokens",
            "output_tokens",
            "rows_per_shard",
            "rounds",
            "repeats",
            "slowdown",
        ):
            self._require(name, getattr(self, name) >= 1, "must be at least 1")
        self._require("batch_sizes", self.batch_sizes[0] >= 1, "must be at least 1")
        self._require("acceptance", 0 <= self.acceptance <= 1, "must be in [0, 1]")
        then = self.acceptance_then
        self._require("acceptance_then", then is None or 0 <= then <= 1, "must be in [0, 1]")
        self._require("variation", 0 <= self.variation <= 1, "must be in [0, 1]")
        self._require("temperature", self.temperature >= 0, "must be 0 (greedy) or a number above")
        self._require("seed", 0 <= self.seed < 2**31, "must be in [0, 2**31)")
        self._require(
            "vocab_size",
            _is_power_of_two(self.vocab_size)
            and SMALLEST_VOCABULARY <= self.vocab_size <= LARGEST_VOCABULARY,
            f"must be a power of two from {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY}",
        )
        self._require(
            "stretch_tokens",
            _is_power_of_two(self.stretch_tokens) and self.stretch_tokens <= SMALLEST_VOCABULARY // 4,
            f"must be a power of two of at most {SMALLEST_VOCABULARY // 4}",
        )
        most = BRANCH_COUNTS[-1]
        self._require(
            "num_branches",
            self.num_branches is None or 1 <= self.num_branches <= most,
            f"must be in 1 .. {most}",
        )
        if self.num_branches is not None and "branches" not in self.modes:
            raise UserError(
                f"--num_branches {self.num_branches} has no effect without --modes branches: add it, or "
                "leave it out"
            )
        readers = [name for name in self.policies if name.partition(":")[0] in READERS]
        if readers:
            raise UserError(
                f"--policies {readers[0]} needs a trained head, and an emulated draft has none: leave it out"
            )
        assert self.choices  # also refuses what the main job would refuse

    @property
    def choices(self) -> list[PolicyChoice]:
        """The settings of ``--policies``, each once. Raises :class:`UserError` as the main job does."""
        lengths = self.initial_lengths
        if lengths is None:
            without = ("goodput", "num_draft_tokens=")
            has_lengths = any(not any(part in name for part in without) for name in self.policies or [])
            lengths = [DEFAULT_LENGTH] if has_lengths else None
        return policy_choices(self.policies or [], lengths, self.max_draft_tokens)

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise UserError(f"--{name} {getattr(self, name)!r} {rule}")


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
