"""A run's options of logits processing, in the target's tokens."""

from __future__ import annotations

from specdist.config.generate import GenerateConfig
from specdist.config.processing import DISTRIBUTION_OPTIONS
from specdist.job.texts.tokens import ids_within, load_tokenizer
from specdist.models.files.checkpoint import Checkpoint
from specdist.sampling.distributions import SamplingSettings
from specdist.sampling.processing.row_table import Processing, TokenOptions
from specdist.utils.errors import UserError


def sampling_settings(config: GenerateConfig, target: Checkpoint, vocab_size: int) -> SamplingSettings:
    """How tokens are drawn. Raises :class:`UserError` for tokens that the target has not."""
    for name, value in (("logprobs", config.logprobs), ("prompt_logprobs", config.prompt_logprobs)):
        if (value or 0) > vocab_size:
            raise UserError(f"--{name} {value} is more than the {vocab_size} tokens that there are")
    is_coupled = config.acceptance == "gumbel"
    if not config.processes_logits:
        return SamplingSettings(
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            is_coupled=is_coupled,
            num_logprobs=config.logprobs,
            num_prompt_logprobs=config.prompt_logprobs,
        )
    options = TokenOptions(**{name: getattr(config, name) for name in DISTRIBUTION_OPTIONS})
    bad_words = _bad_words(config.bad_words or [], target)
    biases, suppressed = config.biases, tuple(config.suppress_tokens or [])
    for name, ids in (("logit_bias", biases), ("suppress_tokens", suppressed)):
        if max(ids, default=0) >= vocab_size:
            raise UserError(f"--{name} {max(ids)} is not a token of --target {target.name}: ids end at "
                            f"{vocab_size - 1}")  # fmt: skip
    return SamplingSettings(
        # Greedy only if all rows are.
        temperature=0.0 if config.is_greedy else config.temperature or 1.0,
        is_coupled=is_coupled,
        num_logprobs=config.logprobs,
        num_prompt_logprobs=config.prompt_logprobs,
        processing=Processing(
            defaults=options,
            logit_bias=tuple(biases.items()),
            # Others cannot be drawn: the tokenizer has tokens that the model has not.
            bad_words=tuple(ids for ids in bad_words if max(ids) < vocab_size),
            suppressed_ids=suppressed,
            min_new_tokens=config.min_new_tokens,
            end_ids=tuple(sorted(each for each in target.stop_token_ids() if each < vocab_size)),
            has_masks=config.is_constrained,
        ),
    )


def _bad_words(words: list[str], target: Checkpoint) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word, alone and after a space."""
    if not words:
        return ()
    tokenizer = load_tokenizer(target)
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            if token_ids := tuple(ids_within(tokenizer, text)):
                found[token_ids] = None
    return tuple(found)
