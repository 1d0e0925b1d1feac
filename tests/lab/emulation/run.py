"""The emulation from its options to its result."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdist.data.leases.heartbeat import now_utc
from specdist.data.store.files import write_json
from specdist.engine.assembly import PAGE_SIZE, Assembly
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.engine.schedule.stopping import StopRules
from specdist.job.costs.measuring import OWN_RANK
from specdist.job.replica.plan import plan_asynchronous
from specdist.lab.plan.hardware import find_gpu
from specdist.lab.plan.job import open_model
from specdist.lab.plan.roofline import DRAFT_PASS, TARGET_PASS, Placement, roofline_costs
from specdist.lab.plan.simulate import (
    OWN_GPU,
    PREFILL_CHUNK_TOKENS,
    Mode,
    ReplicaCosts,
    Settings,
    predict,
)
from specdist.policies.costs import BRANCH_COUNTS, CostModel
from specdist.policies.formulas import caught_share
from specdist.policies.payoff import ALONE, RoundChooser, RoundShape
from specdist.policies.registry import PolicyChoice, needs_costs
from specdist.sampling.distributions import SamplingSettings
from tests.lab.emulation.config import AUTO, MODE_OPTIONS, TARGET_ONLY, EmulationConfig, label_of
from tests.lab.emulation.markov import PairSettings, markov_pair
from tests.lab.emulation.results import EmulationResult, Outcome
from tests.lab.emulation.sides import EmulatedOrder
from tests.lab.emulation.virtual import VirtualRun, planned_host_times

# Before the batch is full, sequences that are in it generate; then come warm-ups.
NUM_MORE_ROUNDS = 100

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure."""

    batch_size: int
    mode: Mode
    choice: PolicyChoice

    @property
    def has_own_gpu(self) -> bool:
        return self.mode in (*OWN_GPU, AUTO)


class Emulation:
    """A pair of models on a GPU that is not there."""

    def __init__(self, config: EmulationConfig) -> None:
        """Raises :class:`UserError` for models or a GPU that cannot be used."""
        self.config = config
        target, dtype = open_model("--target", config.target, "auto", quantization=config.target_quantization)
        draft, _ = open_model("--draft", config.draft, "auto")
        shared: dict[str, Any] = {
            "gpu": find_gpu(config.emulate, dtype, config.calibration),
            "context_tokens": config.prompt_tokens + config.output_tokens / 2,
            "prompt_tokens": config.prompt_tokens,
            "sampling": SamplingSettings(temperature=config.temperature),
        }
        self.target = Placement(model=target, tp_size=config.tp_size, counts=TARGET_PASS, **shared)
        self.draft = Placement(model=draft, counts=DRAFT_PASS, drafts=True, **shared)
        self.pair = PairSettings(
            vocab_size=config.vocab_size,
            acceptance=config.acceptance,
            variation=config.variation,
            temperature=config.temperature,
            seed=config.seed,
        )

    def cases(self) -> Iterator[Case]:
        config = self.config
        modes = [MODE_OPTIONS[name] for name in config.modes or []]
        for batch_size in config.batch_sizes or []:
            yield Case(batch_size=batch_size, mode=TARGET_ONLY, choice=PolicyChoice())
            for mode in modes:
                for choice in config.choices if mode != TARGET_ONLY else []:
                    yield Case(batch_size=batch_size, mode=mode, choice=choice)

    def costs(self, case: Case) -> ReplicaCosts:
        """The planner's, with nothing for the host."""
        most = case.batch_size * (case.choice.max_draft_tokens + 1) + PREFILL_CHUNK_TOKENS
        costs = roofline_costs(
            self.target,
            self.draft,
            num_rows=case.batch_size,
            most_tokens=most,
            most_draft_rows=case.batch_size * (1 + BRANCH_COUNTS[-1]),
        )
        return dataclasses.replace(costs, round_s=0.0, proposal_s=0.0)

    def order(self, case: Case, costs: CostModel) -> EmulatedOrder:
        """The assembly as the main job would make it from these costs."""
        config, choice, num_slots = self.config, case.choice, case.batch_size
        ahead = ALONE
        if case.mode in ("asynchronous", "branches"):
            sizes: dict[str, Any] = {
                "num_rows": num_slots,
                "max_draft_tokens": choice.max_draft_tokens,
                "acceptance": config.acceptance,
            }
            ahead = plan_asynchronous(costs, **sizes, num_branches=None if case.mode == "branches" else 0)
            if case.mode == "branches" and not ahead.num_branches:
                ahead = plan_asynchronous(costs, **sizes, num_branches=1)
        block, chooser = choice.max_draft_tokens + 1, None
        if case.mode == AUTO:
            fixed_length = choice.first_length if choice.policy == "fixed" else None
            ahead = RoundShape(num_ahead=choice.max_draft_tokens + 1, num_branches=BRANCH_COUNTS[-1])
            chooser = RoundChooser(costs, max_draft_tokens=choice.max_draft_tokens, fixed_length=fixed_length)
        max_seq_len = config.prompt_tokens + config.output_tokens
        row_pages = -(-(max_seq_len + block + ahead.num_ahead) // PAGE_SIZE) + 1
        assembly = Assembly(
            settings=SamplingSettings(temperature=config.temperature),
            vocab_size=config.vocab_size,
            stop_rules=StopRules(NO_TEXT),
            scheduling=SchedulerSettings(
                max_num_seqs=num_slots,
                max_num_batched_tokens=max(PREFILL_CHUNK_TOKENS, 2 * num_slots * block),
                max_draft_tokens=block - 1,
                num_ahead_tokens=ahead.num_ahead,
                max_new_tokens=config.output_tokens,
                max_seq_len=max_seq_len,
                seed=config.seed,
            ),
            num_pages=(2 * num_slots + 1) * row_pages,
            max_cache_len=max_seq_len + block + ahead.num_ahead,
            ahead=ahead,
            chooser=chooser,
        )
        return EmulatedOrder(
            assembly=assembly,
            choice=choice,
            costs=costs if needs_costs(choice.policy) else None,
            num_full=num_slots,
            prompt_tokens=config.prompt_tokens,
            num_branch_slots=num_slots * max(1, ahead.num_branches),
            max_branch_tokens=block,
        )

    def run_of(self, case: Case) -> VirtualRun:
        """With times of hosts as the main job assumes them."""
        order = self.order(case, OWN_RANK.added_to(self.costs(case).passes))
        pair = markov_pair(self.pair)
        return VirtualRun(order, pair, self.target, self.draft, has_own_gpu=case.has_own_gpu)

    def measure(self, case: Case) -> Outcome:
        """One case, beside what the planner predicts with the same times of hosts and messages."""
        config, run = self.config, self.run_of(case)
        ahead = run.order.assembly.ahead
        num_tokens, seconds = run.steady_rounds(config.rounds, self.num_rows(case))
        return Outcome(
            batch_size=case.batch_size,
            mode=case.mode,
            policy=label_of(case.choice),
            num_gpus=config.tp_size + case.has_own_gpu,
            num_branches=ahead.num_branches,
            tokens_per_s=num_tokens / seconds,
            planned_tokens_per_s=self._planned(case, ahead, planned_host_times(self.costs(case), case.mode)),
            tokens_per_round=num_tokens / config.rounds / case.batch_size,
        )

    def num_rows(self, case: Case) -> int:
        """Requests of which enough are left at the end: more cannot end in these rounds."""
        num_rounds = self.config.rounds + NUM_MORE_ROUNDS
        most_new = num_rounds * case.batch_size * (case.choice.max_draft_tokens + 2)
        return 2 * case.batch_size + most_new // self.config.output_tokens

    def _planned(self, case: Case, ahead: RoundShape, costs: ReplicaCosts) -> float | None:
        """The planner's tokens per second; None for lengths that are not fixed."""
        config, choice = self.config, case.choice
        if choice.policy not in ("fixed", "none") or case.mode == AUTO:
            return None
        settings = Settings(
            mode=case.mode,
            num_rows=case.batch_size,
            num_draft_tokens=ahead.num_ahead - 1 if ahead.num_ahead else choice.max_draft_tokens,
            acceptance=config.acceptance,
            caught=caught_share(ahead.num_branches),
        )
        lengths = {"prompt_tokens": config.prompt_tokens, "output_tokens": config.output_tokens}
        return predict(costs, settings, **lengths).tokens_per_s


def run_emulation(config: EmulationConfig, command: str) -> EmulationResult:
    """Measure every case, and write ``--output`` at the end.

    Raises :class:`UserError` before anything is measured.
    """
    emulation, outcomes = Emulation(config), []
    cases = list(emulation.cases())
    for number, case in enumerate(cases, 1):
        outcomes.append(emulation.measure(case))
        logger.info(
            "%d of %d: batch %d, %s, %s: %.1f tokens/s",
            *(number, len(cases), case.batch_size, case.mode, label_of(case.choice)),
            outcomes[-1].tokens_per_s,
        )
    result = EmulationResult(
        command=command,
        date=now_utc(),
        settings=dataclasses.asdict(config),
        figures=emulation.target.gpu.figures,
        outcomes=outcomes,
    )
    if config.output is not None:
        Path(config.output).parent.mkdir(parents=True, exist_ok=True)
        write_json(Path(config.output), result.to_json())
    return result
