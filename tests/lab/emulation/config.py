"""The options of ``python -m tests.lab.emulation --emulate``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from specdist.config.arguments import option
from specdist.lab.plan.hardware import GPUS
from specdist.lab.plan.simulate import MODES, Mode
from specdist.lab.synthetic.config import PAIR_SEED, SHAPES
from specdist.policies.choice import PolicyChoice
from specdist.policies.costs import BRANCH_COUNTS
from specdist.utils.errors import UserError
from specdist.utils.rules import Refusals, Rule, check_options, within
from tests.lab.emulation.choices import READERS, PolicyOptions, policy_choices

TARGET_ONLY: Mode = "target only"
# Every round is chosen, as by --overlap auto.
AUTO: Mode = "auto"
# As options are written: one word each.
MODE_OPTIONS: dict[str, Mode] = {mode.replace(" ", "_"): mode for mode in (*MODES, AUTO)}
DEFAULT_BATCH_SIZES = (1, 8, 32, 64, 128)
DEFAULT_POLICIES = ("fixed", "goodput")
DEFAULT_LENGTH = 5
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 1024, 32768
VOCABULARY = Rule(
    [2**power for power in range(10, 16)].__contains__,
    f"must be a power of two from {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY}",
)
STRETCH = Rule(
    [2**power for power in range(9)].__contains__,
    f"must be a power of two of at most {SMALLEST_VOCABULARY // 4}",
)


@dataclass(kw_only=True)
class EmulationConfig(PolicyOptions):
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
    tp_size: int = option(1, help="GPUs that share the target", at_least=1)
    target_quantization: Literal["float8", "int8", "int4"] | None = option(
        None, help="narrow weights of the target"
    )

    # The Markov pair
    acceptance: float = option(
        0.8,
        help="mean probability that a drafted token is accepted, 0 to 1",
        rule=within(at_least=0, at_most=1),
    )
    acceptance_then: float | None = option(
        None,
        help="the same in the second half of the measured rounds, all at once (default: no change)",
        rule=within(at_least=0, at_most=1),
    )
    variation: float = option(
        0.0,
        help="difference between easy and hard stretches of a text, from 0 = none to 1 = the largest that "
        "keeps the mean acceptance",
        rule=within(at_least=0, at_most=1),
    )
    stretch_tokens: int = option(32, help="length of a stretch; a power of two, at most 256", rule=STRETCH)
    vocab_size: int = option(
        SMALLEST_VOCABULARY,
        help=f"tokens of the pair, a power of two from {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY}; many "
        "take this machine longer than the emulated GPU, which the result then says",
        rule=VOCABULARY,
    )
    temperature: float = option(
        0.0, help="0 = greedy", rule=within(at_least=0, text="must be 0 (greedy) or a number above")
    )
    seed: int = option(0, help="seed of the pair, prompts and samples", rule=PAIR_SEED)

    # Work
    prompt_tokens: int = option(1000, help="tokens of every prompt", at_least=1)
    output_tokens: int = option(500, help="tokens of every completion", at_least=1)
    rows_per_shard: int = option(64, help="rows per output file", at_least=1)
    rounds: int = option(
        150, help="rounds that are measured for each batch size, mode and policy", at_least=1
    )
    repeats: int = option(
        1,
        help="measurements of every case, taking turns; the one with the median share of exposed host time "
        "counts",
        at_least=1,
    )
    slowdown: int = option(
        1,
        help="passes take so many times as long, and rates are given as if they did not: for a machine whose "
        "cores do not carry all processes at full pace; the host's share is then as many times too small",
        at_least=1,
    )

    # Methods
    batch_sizes: list[int] | None = option(
        None, help="numbers of running sequences (default: 1 8 32 64 128)", action="extend", at_least=1
    )
    modes: list[str] | None = option(
        None,
        help="target_only, colocated = both models on the target's GPUs; and with a GPU for the draft: "
        "synchronous, asynchronous, branches, or auto = every round is chosen (default: all but auto; the "
        "target alone is always measured)",
        action="extend",
        choices=tuple(MODE_OPTIONS),
    )
    num_branches: int | None = option(
        None,
        help="branches per sequence in the mode branches (default: from the passes' times, at least 1)",
        at_least=1,
        at_most=BRANCH_COUNTS[-1],
    )

    _refusals: ClassVar[Refusals] = (
        ("num_branches", lambda o: "branches" not in o.modes,
         "has no effect without --modes branches: add it, or leave it out"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        self.batch_sizes = sorted(set(self.batch_sizes or DEFAULT_BATCH_SIZES))
        chosen = self.modes or [name for name in MODE_OPTIONS if name != AUTO]
        self.modes = [name for name in MODE_OPTIONS if name in chosen]
        self.policies = self.policies or list(DEFAULT_POLICIES)
        check_options(self)
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
