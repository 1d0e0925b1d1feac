"""What a benchmark runs on: the pair, its caches, and the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdist.config.groups import QuantizationOptions, TrustOptions, values_of
from specdist.data.formats.prompts import Prompts, RowError, open_prompts
from specdist.data.leases.heartbeat import now_utc
from specdist.job.ranks.topology import local_device
from specdist.job.run.workload import NUM_TEXT_TOKENS, typical_context
from specdist.job.texts.tokens import PromptEncoder, check_chat_variables, check_split_special_tokens
from specdist.lab.benchmark.config import BenchmarkConfig
from specdist.lab.benchmark.methods import Row
from specdist.lab.benchmark.pair import PagedPair, Pair
from specdist.lab.benchmark.results import Hardware, ModelSizes, WorkSize, versions
from specdist.lab.synthetic.build import SyntheticRecord, build_synthetic
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.sizes.sizes import model_size
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Setting:
    """``synthetic`` is the record of a random pair, None for trained models."""

    pair: Pair
    synthetic: SyntheticRecord | None
    rows: list[Row]
    work: WorkSize
    paged: PagedPair
    models: ModelSizes

    @property
    def device(self) -> torch.device:
        return self.pair.device

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


def set_up(config: BenchmarkConfig) -> Setting:
    """Build or load the pair, and make the rows. Raises :class:`UserError` before anything is measured."""
    pair, synthetic = make_pair(config)
    rows = make_rows(config, pair)
    return Setting(
        pair=pair,
        synthetic=synthetic,
        rows=rows,
        work=WorkSize.of(rows),
        paged=PagedPair(pair, **cache_sizes(config, rows)),
        models=model_sizes(config, pair),
    )


def cache_sizes(config: BenchmarkConfig, rows: Sequence[Row]) -> dict[str, Any]:
    """Arguments of a :class:`PagedPair` with room for every method."""
    assert config.batch_sizes
    lengths = [(len(row.prompt_ids), row.max_new_tokens) for row in rows]
    return {
        "max_num_seqs": config.batch_sizes[-1],
        "max_seq_len": sum(map(max, zip(*lengths, strict=True))),
        "max_draft_tokens": config.longest_draft,
        "settings": SamplingSettings(
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            is_coupled=config.acceptance_rule == "gumbel",
        ),
        "seed": config.seed,
        "num_context_tokens": typical_context(lengths),
        "text_ids": tuple(token_id for row in rows for token_id in row.prompt_ids[-NUM_TEXT_TOKENS:]),
    }


def model_sizes(config: BenchmarkConfig, pair: Pair) -> ModelSizes:
    shape = config.synthetic

    def name(name: str, quantization: str | None) -> str:
        return name if quantization is None else f"{name} in {quantization}"

    return ModelSizes(
        target=name(config.target or f"synthetic {shape}", config.target_quantization),
        draft=name(config.draft or f"first layers of synthetic {shape}", config.draft_quantization),
        num_target_parameters=_num_parameters(pair.target_checkpoint),
        num_draft_parameters=_num_parameters(pair.draft_checkpoint),
        dtype=pair.dtype,
    )


def _num_parameters(checkpoint: Checkpoint) -> int:
    """Also of quantised layers, whose weights are not parameters of the loaded model."""
    return model_size("it", checkpoint.config, 1, trusts_code=checkpoint.trusts_code).num_parameters


def make_pair(config: BenchmarkConfig) -> tuple[Pair, SyntheticRecord | None]:
    """Load the pair, or build a random one unless it is there."""
    options = {
        "device": local_device(config.device),
        "model_impl": config.model_impl,
        **values_of(config, QuantizationOptions),
    }
    if config.synthetic is None:
        assert config.target is not None and config.draft is not None
        options |= {"dtype": config.dtype, **values_of(config, TrustOptions)}
        return Pair(config.target, config.draft, **options), None
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
        device=options["device"],
    )
    return Pair(str(folder / "target"), str(folder / "draft"), dtype=dtype, **options), record


def make_rows(config: BenchmarkConfig, pair: Pair) -> list[Row]:
    """From ``--prompts`` or random; limits are uniform from a quarter of ``--max_new_tokens`` up.

    Raises :class:`UserError` for a prompt that cannot be used.
    """
    generator = np.random.default_rng(config.seed)
    if config.prompts is None:
        lengths = _spread(generator, config.max_prompt_tokens, config.num_prompts)
        prompts = [generator.integers(pair.vocab_size, size=length).tolist() for length in lengths]
    else:
        file, encoder = open_file(config, pair, num_rows=config.num_prompts)
        prompts = [_encoded(config.prompts, encoder, file, row) for row in range(file.num_rows)]
    return limited(config, pair, prompts, generator)


def limited(
    config: BenchmarkConfig, pair: Pair, prompts: Sequence[list[int]], generator: np.random.Generator
) -> list[Row]:
    """Rows of these prompts, with random limits. Raises :class:`UserError` for a prompt that is too long."""
    longest = max(map(len, prompts)) + config.max_new_tokens
    if longest > pair.max_positions:
        raise UserError(
            f"the longest prompt and --max_new_tokens {config.max_new_tokens} make {longest} tokens, but the "
            f"models support {pair.max_positions}: lower it, or leave long prompts out"
        )
    limits = _spread(generator, config.max_new_tokens, len(prompts))
    return [Row(prompt_ids, limit) for prompt_ids, limit in zip(prompts, limits, strict=True)]


def _spread(generator: np.random.Generator, longest: int, count: int) -> list[int]:
    return generator.integers(max(1, longest // 4), longest, size=count, endpoint=True).tolist()


def open_file(
    config: BenchmarkConfig, pair: Pair, *, num_rows: int | None, num_new_tokens: int = 1
) -> tuple[Prompts, PromptEncoder]:
    """``--prompts``, or its first ``num_rows``, and what makes token ids of them that leave room for a
    completion. Raises :class:`UserError`."""
    assert config.prompts is not None
    prompts = open_prompts(
        config.prompts,
        prompt_column=config.prompt_column,
        messages_column=config.messages_column,
        limit=num_rows,
    )
    prompts.check_no_batch("a benchmark")
    check_chat_variables(pair.target_checkpoint, config.chat_format)
    check_split_special_tokens(pair.target_checkpoint, config.split_special_tokens)
    encoder = PromptEncoder(
        pair.tokenizer,
        max_prompt_tokens=pair.max_positions - num_new_tokens,
        split_special_tokens=config.split_special_tokens,
        chat_format=config.chat_format,
    )
    return prompts, encoder


def _encoded(path: str, encoder: PromptEncoder, prompts: Prompts, row: int) -> list[int]:
    try:
        return encoder.prompt_ids(prompts.prompt(row))
    except RowError as error:
        raise UserError(f"--prompts {path}, row {row}: {error.reason}; leave the row out") from error
