"""The options of ``python -m tests.lab.emulation``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specdist.config.arguments import option
from specdist.lab.plan.hardware import GPUS
from specdist.lab.plan.shapes import SHAPES
from specdist.lab.plan.simulate import MODES, Mode
from specdist.policies.registry import (
    HEAD_KINDS,
    OPTIONS,
    PolicyChoice,
    resolve_policy_options,
    rule_of,
)
from specdist.utils.errors import UserError
from specdist.utils.rules import Rule, check_options, within

TARGET_ONLY: Mode = "target only"
# Every round is chosen, as by --overlap auto.
AUTO: Mode = "auto"
# As options are written: one word each.
MODE_OPTIONS: dict[str, Mode] = {mode.replace(" ", "_"): mode for mode in (*MODES, AUTO)}
DEFAULT_BATCH_SIZES = (1, 8, 32, 64, 128)
DEFAULT_POLICIES = ("fixed", "goodput")
# Draft tokens per round of fixed, and of the first round of policies that learn their length.
DEFAULT_LENGTH = 5
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 1024, 32768
PAIR_SEED = Rule(lambda value: 0 <= value < 2**31, "must be in [0, 2**31)")
VOCABULARY = Rule(
    [2**power for power in range(10, 16)].__contains__,
    f"must be a power of two from {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY}",
)
# The emulated policies that need no trained head.
POLICIES = tuple(name for name in OPTIONS if name not in HEAD_KINDS)


@dataclass(kw_only=True)
class EmulationConfig:
    """Every option. Raises :class:`UserError` for values that do not go together."""

    _argument_group_name = "Emulation"

    emulate: str = option(
        help=f"emulate this GPU: {', '.join(GPUS)}. Scheduler, engine, draft and policies are "
        "real; the models are Markov tables whose passes take the time that jobs/plan.py predicts, and hosts "
        "and messages a fixed time, so that results are the same on every machine"
    )
    calibration: str | None = option(
        None,
        help="calibration.json of a first day on such a GPU (python -m tests.gpu.first_day): what was "
        "measured there, instead of published and assumed figures",
    )
    output: str | None = option(None, help="JSON file for the result")

    # Models: their sizes are enough
    target: str = option(help=f"hub id or folder of the large model, or a shape: {', '.join(SHAPES)}")
    draft: str = option(help="the same of the small model")
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
    variation: float = option(
        0.0,
        help="difference between easy and hard stretches of a text, from 0 = none to 1 = the largest that "
        "keeps the mean acceptance",
        rule=within(at_least=0, at_most=1),
    )
    vocab_size: int = option(
        SMALLEST_VOCABULARY,
        help=f"tokens of the pair, a power of two from {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY}",
        rule=VOCABULARY,
    )
    temperature: float = option(
        0.0, help="0 = greedy", rule=within(at_least=0, text="must be 0 (greedy) or a number above")
    )
    seed: int = option(0, help="seed of the pair, prompts and samples", rule=PAIR_SEED)

    # Work
    prompt_tokens: int = option(1000, help="tokens of every prompt", at_least=1)
    output_tokens: int = option(500, help="tokens of every completion", at_least=1)
    rounds: int = option(
        150, help="rounds that are measured for each batch size, mode and policy", at_least=1
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
    policies: list[str] | None = option(
        None,
        help="length policies, optionally with options: svip:stop_root_entropy=0.5 (default: fixed and "
        "goodput)",
        action="extend",
    )

    def __post_init__(self) -> None:
        self.batch_sizes = sorted(set(self.batch_sizes or DEFAULT_BATCH_SIZES))
        chosen = self.modes or [name for name in MODE_OPTIONS if name != AUTO]
        self.modes = [name for name in MODE_OPTIONS if name in chosen]
        self.policies = self.policies or list(DEFAULT_POLICIES)
        check_options(self)
        assert self.choices  # also refuses what the main job would refuse

    @property
    def choices(self) -> list[PolicyChoice]:
        """The settings of ``--policies``, each once. Raises :class:`UserError` as the main job does."""
        choices = [policy_choice(entry) for entry in self.policies or []]
        return list({label_of(choice): choice for choice in choices}.values())


def label_of(choice: PolicyChoice) -> str:
    """The policy in tables, with its options that are not defaults and the length of its first block."""
    length = choice.first_length
    if choice.policy in ("none", "fixed"):
        return TARGET_ONLY if choice.policy == "none" else f"K = {length}"
    changed = [
        f"{name}={value:g}"
        for name, value in choice.options.items()
        if name not in ("num_draft_tokens", "max_draft_tokens")
        and value != OPTIONS[choice.policy][name].default
    ]
    label = " ".join([choice.policy, *changed])
    return label if length is None else f"{label} from {length}"


def policy_choice(entry: str) -> PolicyChoice:
    """A policy as ``--policies`` names it: ``svip`` or ``fixed:num_draft_tokens=3``. Raises
    :class:`UserError`."""
    policy, _, settings = entry.partition(":")
    if policy not in POLICIES:
        raise UserError(
            f"--policies {entry} is not a policy without a head: choose from {', '.join(POLICIES)}"
        )
    given = dict(_option(policy, item) for item in settings.split(",") if item)
    if "num_draft_tokens" in OPTIONS[policy]:
        given.setdefault("num_draft_tokens", DEFAULT_LENGTH)
    return choice_of(policy, **given)


def choice_of(policy: str, **given: float) -> PolicyChoice:
    """The choice with defaults for the other options. Raises :class:`UserError` as the main job does."""
    for name, value in given.items():
        rule_of(name).check(name, value)
    return PolicyChoice(policy, resolve_policy_options(policy, given))


def _option(policy: str, item: str) -> tuple[str, float]:
    name, _, value = item.partition("=")
    options = OPTIONS[policy]
    try:
        return name, type(options[name].default)(value)
    except (KeyError, ValueError) as error:
        raise UserError(
            f"--policies {policy}:{item} is not an option of {policy}, which takes {', '.join(options)}"
        ) from error
