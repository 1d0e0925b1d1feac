"""What a comparison runs on besides: groups of rows, a head, and the draft's own process."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdist.engine.messages.interfaces import Proposer
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.stopping import StopRules
from specdist.lab.benchmark.methods import Row
from specdist.lab.benchmark.pair import DraftOrder, PagedPair, Pair
from specdist.lab.benchmark.results import WorkSize
from specdist.lab.benchmark.setting import (
    Setting,
    cache_sizes,
    limited,
    make_pair,
    make_rows,
    model_sizes,
    open_file,
)
from specdist.models.heads.drafts import identify_draft
from specdist.models.heads.head import TokenHead, load_head
from specdist.models.passes.runner import ModelRunner
from specdist.policies import reads_head
from specdist.utils.errors import UserError
from tests.lab.benchmark.config import ComparisonConfig
from tests.lab.benchmark.overhead import OVERHEAD_BATCH_SIZES
from tests.lab.draft_rank import DraftRank, DraftSource

# The group of all rows without --group_column.
EVERYTHING = "all"

logger = logging.getLogger(__name__)


class HeadedPair(PagedPair):
    """``head``: for the policies that read one; the others run the draft without it."""

    def __init__(self, pair: Pair, head: TokenHead | None, **sizes: Any) -> None:
        super().__init__(pair, **sizes)
        self.head = head
        if head is not None:
            self._headed = ModelRunner(pair.draft, pair.device, model_impl=pair.model_impl, head=head)
            self.assembly.allocate_draft(self._headed)

    def local_draft(self, order: DraftOrder) -> Proposer:
        policy = order.policy(self.settings)
        runner = self._headed if reads_head(policy) else self.draft
        clock = order.timeline("idle", self.pair.device)
        return order.assembly(self.assembly).local_draft(runner, policy, clock)


@dataclass(frozen=True, kw_only=True)
class ComparedSetting(Setting):
    """``groups`` are timed separately; without ``--group_column`` there is one."""

    paged: HeadedPair
    groups: dict[str, list[Row]]

    def start_draft_rank(self) -> DraftRank:
        """Start the draft's process, with half of the threads, or on the second GPU.

        Raises :class:`UserError` without a second GPU, or if the process fails.
        """
        device, checkpoint, assembly = self.device, self.pair.draft_checkpoint, self.paged.assembly
        if device.type == "cuda":
            if torch.cuda.device_count() < 2:
                raise UserError(
                    "--placements separate runs the draft on a GPU of its own, but torch finds only one: use "
                    "--placements colocated, or --device cpu"
                )
            device = torch.device("cuda", 1)
        logger.info("starting the draft's process")
        source = DraftSource(
            checkpoint=str(checkpoint.folder),
            quantization=checkpoint.quantization,
            trust_remote_code=checkpoint.trusts_code,
            allow_pickle=checkpoint.is_pickled,
            dtype=str(self.pair.draft.dtype).removeprefix("torch."),
            model_impl=self.pair.model_impl,
            device=device,
            num_threads=max(1, torch.get_num_threads() // 2),
            num_context_tokens=self.paged.num_context_tokens,
            # Texts are decoded here, where the engine is.
            assembly=dataclasses.replace(
                assembly, stop_rules=StopRules(NO_TEXT, assembly.stop_rules.token_ids)
            ),
        )
        return DraftRank(source, self.device)


def set_up_comparison(config: ComparisonConfig) -> ComparedSetting:
    """Build or load the pair, and make the rows. Raises :class:`UserError` before anything is measured."""
    pair, synthetic = make_pair(config)
    groups = make_workload(config, pair)
    rows = list(itertools.chain.from_iterable(groups.values()))
    head = None
    if config.head is not None:
        [kind] = config.head_kinds
        head = load_head(config.head, kind=kind, draft=identify_draft(pair.draft_checkpoint))
    sizes = cache_sizes(config, rows)
    sizes["max_num_seqs"] = max(sizes["max_num_seqs"], *OVERHEAD_BATCH_SIZES)
    return ComparedSetting(
        pair=pair,
        synthetic=synthetic,
        rows=rows,
        groups=groups,
        work=WorkSize.of(rows),
        paged=HeadedPair(pair, head, **sizes),
        models=model_sizes(config, pair),
    )


def make_workload(config: ComparisonConfig, pair: Pair) -> dict[str, list[Row]]:
    """Rows of every group: equally many of each, spread evenly over it. Raises :class:`UserError` for a group
    without a usable prompt; for any other prompt that cannot be used another takes its place."""
    column = config.group_column
    if column is None:
        return {EVERYTHING: make_rows(config, pair)}
    prompts, encoder = open_file(config, pair, num_rows=None, num_new_tokens=config.max_new_tokens)
    groups = prompts.groups("--group_column", column)
    share = config.num_prompts // len(groups)
    if not share:
        raise UserError(
            f"--num_prompts {config.num_prompts} is less than one row for each of the {len(groups)} groups "
            f"of --group_column {column} ({', '.join(groups)}): raise it"
        )
    generator, found = np.random.default_rng(config.seed), {}
    for name, rows in groups.items():
        usable = [prompt_ids for _, prompt_ids in encoder.usable_prompts(prompts, rows, share)]
        if not usable:
            raise UserError(
                f"--prompts {config.prompts}: no row of the group {name} can be used with --max_new_tokens "
                f"{config.max_new_tokens}: lower it, or leave the group out"
            )
        found[name] = limited(config, pair, usable, generator)
    return found
