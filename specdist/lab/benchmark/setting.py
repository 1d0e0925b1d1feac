"""What a benchmark runs on: the pair, its caches, the rows, and the draft's own process if asked for."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdist.config.groups import QuantizationOptions, TrustOptions, values_of
from specdist.data.formats.prompts import Prompts, RowError, open_prompts
from specdist.data.leases.heartbeat import now_utc
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.stopping import StopRules
from specdist.job.ranks.topology import local_device
from specdist.job.texts.tokens import PromptEncoder, check_chat_variables, check_split_special_tokens
from specdist.job.workload import typical_context
from specdist.lab.benchmark.config import BenchmarkConfig
from specdist.lab.benchmark.methods import Row
from specdist.lab.benchmark.results import Hardware, ModelSizes, WorkSize, versions
from specdist.lab.benchmark.sides.draft_rank import DraftRank, DraftSource
from specdist.lab.benchmark.sides.overhead import OVERHEAD_BATCH_SIZES
from specdist.lab.benchmark.sides.pair import PagedPair, Pair
from specdist.lab.synthetic.build import SyntheticRecord, build_synthetic
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.files.sizes import model_size
from specdist.models.heads.drafts import identify_draft
from specdist.models.heads.head import load_head
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError

# The group of all rows without --group_column.
EVERYTHING = "all"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """``synthetic`` is the record of a random pair, None for trained models. ``groups`` are timed separately;
    without ``--group_column`` there is one."""

    device: torch.device
    pair: Pair
    synthetic: SyntheticRecord | None
    groups: dict[str, list[Row]]
    work: WorkSize
    paged: PagedPair
    models: ModelSizes

    @property
    def rows(self) -> list[Row]:
        """All rows, of every group."""
        return list(itertools.chain.from_iterable(self.groups.values()))

    def circumstances(self, config: BenchmarkConfig, command: str) -> dict[str, Any]:
        """The fields of a :class:`Circumstances`, for a measurement that ends now."""
        return {
            "command": command,
            "date": now_utc(),
            "hardware": Hardware.of_this_process(self.device),
            "versions": versions(),
            "settings": dataclasses.asdict(config),
            "synthetic": self.synthetic,
            "models": self.models,
            "work": self.work,
        }

    def start_draft_rank(self) -> DraftRank:
        """Start the draft's process, with half of the threads, or on the second GPU.

        Raises :class:`UserError` without a second GPU, or if the process fails.
        """
        device = self.device
        if device.type == "cuda":
            if torch.cuda.device_count() < 2:
                raise UserError(
                    "--placements separate runs the draft on a GPU of its own, but torch finds only one: use "
                    "--placements colocated, or --device cpu"
                )
            device = torch.device("cuda", 1)
        logger.info("starting the draft's process")
        source = DraftSource(
            checkpoint=str(self.pair.draft_checkpoint.folder),
            quantization=self.pair.draft_checkpoint.quantization,
            trust_remote_code=self.pair.draft_checkpoint.trusts_code,
            allow_pickle=self.pair.draft_checkpoint.is_pickled,
            dtype=str(self.pair.draft.dtype).removeprefix("torch."),
            model_impl=self.pair.model_impl,
            device=device,
            num_threads=max(1, torch.get_num_threads() // 2),
            num_context_tokens=self.paged.num_context_tokens,
            # Texts are decoded here, where the engine is.
            assembly=dataclasses.replace(
                self.paged.assembly, stop_rules=StopRules(NO_TEXT, self.paged.assembly.stop_rules.token_ids)
            ),
        )
        return DraftRank(source, self.device)


def set_up(config: BenchmarkConfig) -> Setting:
    """Build or load the pair, and make the rows. Raises :class:`UserError` before anything is measured."""
    assert config.batch_sizes
    device = local_device(config.device)
    pair, synthetic = _make_pair(config, device)
    groups = make_workload(config, pair)
    rows = list(itertools.chain.from_iterable(groups.values()))
    prompts, limits = [len(row.prompt_ids) for row in rows], [row.max_new_tokens for row in rows]
    head = None
    if config.head is not None:
        [kind] = config.head_kinds
        head = load_head(config.head, kind=kind, draft=identify_draft(pair.draft_checkpoint))
    paged = PagedPair(
        pair,
        max_num_seqs=max(*config.batch_sizes, *OVERHEAD_BATCH_SIZES),
        max_seq_len=max(prompts) + max(limits),
        max_draft_tokens=config.longest_draft,
        settings=SamplingSettings(
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            is_coupled=config.acceptance_rule == "gumbel",
        ),
        seed=config.seed,
        num_context_tokens=typical_context(zip(prompts, limits, strict=True)),
        head=head,
    )
    models = ModelSizes(
        target=_name(config.target or f"synthetic {config.synthetic}", config.target_quantization),
        draft=_name(
            config.draft or f"first layers of synthetic {config.synthetic}", config.draft_quantization
        ),
        num_target_parameters=_num_parameters(pair.target_checkpoint),
        num_draft_parameters=_num_parameters(pair.draft_checkpoint),
        dtype=pair.dtype,
    )
    work = WorkSize(
        num_rows=len(rows),
        shortest_prompt=min(prompts),
        longest_prompt=max(prompts),
        shortest_limit=min(limits),
        longest_limit=max(limits),
    )
    return Setting(
        device=device, pair=pair, synthetic=synthetic, groups=groups, work=work, paged=paged, models=models
    )


def _name(name: str, quantization: str | None) -> str:
    return name if quantization is None else f"{name} in {quantization}"


def _num_parameters(checkpoint: Checkpoint) -> int:
    """Also of quantised layers, whose weights are not parameters of the loaded model."""
    return model_size("it", checkpoint.config, 1, trusts_code=checkpoint.trusts_code).num_parameters


def _make_pair(config: BenchmarkConfig, device: torch.device) -> tuple[Pair, SyntheticRecord | None]:
    options = {"model_impl": config.model_impl, **values_of(config, QuantizationOptions)}
    if config.synthetic is None:
        assert config.target is not None and config.draft is not None
        options |= {"dtype": config.dtype, **values_of(config, TrustOptions)}
        return Pair(config.target, config.draft, device=device, **options), None
    dtype = "float32" if config.dtype == "auto" else config.dtype
    dial = f"epsilon-{config.epsilon:g}" if config.acceptance is None else f"acceptance-{config.acceptance:g}"
    folder = Path(config.synthetic_folder) / f"{config.synthetic}-{dial}-{dtype}-seed-{config.seed}"
    record = build_synthetic(
        folder,
        config.synthetic,
        acceptance=config.acceptance,
        epsilon=config.epsilon,
        seed=config.seed,
        dtype=getattr(torch, dtype),
        device=device,
    )
    pair = Pair(str(folder / "target"), str(folder / "draft"), dtype=dtype, device=device, **options)
    return pair, record


def make_workload(config: BenchmarkConfig, pair: Pair) -> dict[str, list[Row]]:
    """Rows of every group, from ``--prompts`` or random; limits are uniform from a quarter of
    ``--max_new_tokens`` up.

    Raises :class:`UserError` for a prompt that cannot be used; in groups another takes its place.
    """
    generator = np.random.default_rng(config.seed)
    if config.prompts is None:
        lengths = _spread(generator, config.max_prompt_tokens, config.num_prompts)
        groups = {
            EVERYTHING: [generator.integers(pair.vocab_size, size=length).tolist() for length in lengths]
        }
    else:
        groups = _prompts_of_file(config, config.prompts, pair)
    longest = max(len(prompt) for prompts in groups.values() for prompt in prompts) + config.max_new_tokens
    if longest > pair.max_positions:
        raise UserError(
            f"the longest prompt and --max_new_tokens {config.max_new_tokens} make {longest} tokens, but the "
            f"models support {pair.max_positions}: lower it, or leave long prompts out"
        )
    return {
        name: [
            Row(prompt_ids, limit)
            for prompt_ids, limit in zip(
                prompts, _spread(generator, config.max_new_tokens, len(prompts)), strict=True
            )
        ]
        for name, prompts in groups.items()
    }


def _spread(generator: np.random.Generator, longest: int, count: int) -> list[int]:
    return generator.integers(max(1, longest // 4), longest, size=count, endpoint=True).tolist()


def _prompts_of_file(config: BenchmarkConfig, path: str, pair: Pair) -> dict[str, list[list[int]]]:
    """The first rows of the file; or equally many of each group, spread evenly over it."""
    column = config.group_column
    prompts = open_prompts(
        path,
        prompt_column=config.prompt_column,
        messages_column=config.messages_column,
        limit=config.num_prompts if column is None else None,
    )
    prompts.check_no_batch("a benchmark")
    # Without groups a prompt that is too long is an error of :func:`make_workload`.
    room = 1 if column is None else config.max_new_tokens
    check_chat_variables(pair.target_checkpoint, config.chat_format)
    check_split_special_tokens(pair.target_checkpoint, config.split_special_tokens)
    encoder = PromptEncoder(
        pair.tokenizer,
        max_prompt_tokens=pair.max_positions - room,
        split_special_tokens=config.split_special_tokens,
        chat_format=config.chat_format,
    )

    if column is None:
        return {EVERYTHING: [_encoded(path, encoder, prompts, row) for row in range(prompts.num_rows)]}
    groups = prompts.groups("--group_column", column)
    share = config.num_prompts // len(groups)
    if not share:
        raise UserError(
            f"--num_prompts {config.num_prompts} is less than one row for each of the {len(groups)} groups "
            f"of --group_column {column} ({', '.join(groups)}): raise it"
        )
    found = {
        name: [prompt_ids for _, prompt_ids in encoder.usable_prompts(prompts, rows, share)]
        for name, rows in groups.items()
    }
    for name, usable in found.items():
        if not usable:
            raise UserError(
                f"--prompts {path}: no row of the group {name} can be used with --max_new_tokens "
                f"{config.max_new_tokens}: lower it, or leave the group out"
            )
    return found


def _encoded(path: str, encoder: PromptEncoder, prompts: Prompts, row: int) -> list[int]:
    try:
        return encoder.prompt_ids(prompts.prompt(row))
    except RowError as error:
        raise UserError(f"--prompts {path}, row {row}: {error.reason}; leave the row out") from error
