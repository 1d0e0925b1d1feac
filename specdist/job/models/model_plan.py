"""The models of a run: opened and checked, not loaded; and the limits of a batch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from specdist.config.generate import GenerateConfig
from specdist.config.groups import HOST_SEQS, MTP
from specdist.config.speculation import SYNCHRONOUS
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.job.texts.constraints import RunConstraints
from specdist.job.texts.processing import sampling_settings
from specdist.job.texts.tokens import (
    check_chat_template,
    check_chat_variables,
    load_tokenizer,
)
from specdist.models.attention.rope import recomputed_from, rope_borders
from specdist.models.drafters.files import open_mtp
from specdist.models.drafters.runner import check_drafter
from specdist.models.families.family_check import check_family
from specdist.models.files.checkpoint import GENERATION_CONFIG_NAME, Checkpoint, open_checkpoint
from specdist.models.files.generation import default_options
from specdist.models.heads.head import DraftHead, open_draft_head
from specdist.models.loading.adapter_folder import open_adapter
from specdist.models.loading.places import check_weights
from specdist.models.passes import products
from specdist.models.passes.all_reduce import Choice
from specdist.models.sharding.tp_plan import check_heads
from specdist.models.sizes.reserve import gib
from specdist.models.sizes.sizes import ModelSize, size_of
from specdist.policies.registry import AUTO
from specdist.utils.errors import UserError

logger = logging.getLogger(__name__)

# Options of policies that are lengths of blocks.
BLOCK_LENGTHS = ("num_draft_tokens", "max_draft_tokens")


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The models, as every rank must know them. ``is_expert_parallel``: each of several ranks of the target
    has whole experts. ``sums``: over these ranks, and ``products`` of the target, as a run that goes on has
    chosen them."""

    target: Checkpoint
    draft: Checkpoint | None
    vocab_size: int
    max_seq_len: int
    constraints: RunConstraints
    is_expert_parallel: bool = False
    sums: Choice | None = None
    products: products.Choice | None = None
    head: DraftHead | None = None

    @property
    def has_experts(self) -> bool:
        """Whether what a pass takes depends on its tokens."""
        return any(model is not None and model.has_experts for model in (self.target, self.draft))


def plan_models_and_options(
    config: GenerateConfig, given: Collection[str] = ()
) -> tuple[GenerateConfig, ModelPlan]:
    """The models of a run, and its options as they need them: with the target's own settings as defaults of
    those that were not ``given``. Raises :class:`UserError`."""
    models = plan_models(config, may_read_states=True)
    return settled(with_model_defaults(config, models.target, given), models.draft), models


def plan_models(config: GenerateConfig, *, may_read_states: bool = False) -> ModelPlan:
    """Open and check both checkpoints. ``may_read_states``: the draft may be one that reads the
    target's. Raises :class:`UserError`."""
    target = _open_model("--target", config.target, config, config.tp_size)
    target = dataclasses.replace(target, chat_template=config.chat_template_text)
    draft = head = None
    if config.uses_draft_model:
        assert config.draft is not None
        if config.draft == MTP:
            draft = open_mtp(target, config.draft)
        else:
            draft = _open_model("--draft", config.draft, config)
            if draft.drafter is None:
                check_same_tokens(target, draft)
        if draft.drafter is not None:
            check_drafter_run(config, target, draft, may_read_states=may_read_states)
        head = open_draft_head(config, draft)
    for model in (target, draft):
        if model is not None and model.quantization is not None and model.drafter is None:
            note = unquantized_experts(size_of(model, model.torch_dtype(config.dtype).itemsize))
            if note is not None:
                logger.warning(note)
    chat = config.messages_column and f"--messages_column {config.messages_column}"
    chat = "--chat" if config.chat else chat
    check_chat_template(target, chat)
    check_chat_variables(target, config.chat_format)
    # Positions of a drafter need no table: its configuration's number is that of its training.
    longest = min(
        model.max_positions for model in (target, draft) if model is not None and model.drafter is None
    )
    if config.max_seq_len is not None and config.max_seq_len > longest:
        raise UserError(
            f"--max_seq_len {config.max_seq_len} is more than the {longest} positions that specdist and "
            "the models support: lower it"
        )
    vocab_size = common_vocab_size(target, draft)
    sampling_settings(config, target, vocab_size)
    return ModelPlan(
        target=target,
        draft=draft,
        vocab_size=vocab_size,
        max_seq_len=config.max_seq_len or longest,
        is_expert_parallel=gives_whole_experts(config, target),
        constraints=RunConstraints(config, target),
        head=head,
    )


def unquantized_experts(model: ModelSize | None) -> str | None:
    """A note that the option for quantised layers leaves a model's experts as they are, and what these take;
    None where there is nothing to say."""
    if model is None or model.quantized_by is None or not model.experts:
        return None
    whole, others = model.weight_bytes(1), dataclasses.replace(model, experts=()).weight_bytes(1)
    return (
        f"{model.quantized_by} quantises linear layers, and not the experts of {model.name}, which take "
        f"{gib(whole - others)} of its {gib(whole)} GiB"
    )


def gives_whole_experts(config: GenerateConfig, target: Checkpoint) -> bool:
    """Whether each expert of the target is on one rank. Raises :class:`UserError` where it cannot be."""
    if config.tp_size == 1 or config.expert_parallel == "never":
        return False
    if not target.has_experts and config.expert_parallel == AUTO:
        return False
    size = size_of(target, target.torch_dtype(config.dtype).itemsize)
    if config.expert_parallel == AUTO:
        num_tokens = (config.max_num_seqs or HOST_SEQS) * config.block_tokens
        shared = size.with_experts_for(config.tp_size, num_tokens)
        return shared is not None and shared.has_whole_experts
    reason = size.why_no_whole_experts(config.tp_size)
    if reason is not None:
        raise UserError(f"--expert_parallel always, but of --target {target.name} {reason}: leave it out")
    return True


def with_model_defaults(
    config: GenerateConfig, target: Checkpoint, given: Collection[str] = ()
) -> GenerateConfig:
    """The options; with ``--generation_config model`` the target's own settings are defaults of those that
    were not ``given``. Raises :class:`UserError`."""
    if config.generation_config == "none":
        return config
    defaults = {name: value for name, value in default_options(target).items() if name not in given}
    try:
        config = dataclasses.replace(config, **defaults)
    except UserError as error:
        raise UserError(
            f"--generation_config model: {target.name}/{GENERATION_CONFIG_NAME} has a value that "
            f"cannot be used: {error}"
        ) from error
    shown = ", ".join(f"--{name} {value}" for name, value in defaults.items()) or "nothing"
    logger.info("from the target's %s: %s", GENERATION_CONFIG_NAME, shown)
    return config


def batch_limits(
    config: GenerateConfig,
    models: ModelPlan,
    device_type: str,
    *,
    num_halvings: int = 0,
    num_seqs: int | None = None,
) -> SchedulerSettings:
    """How many sequences and tokens may run at a time. ``num_seqs``: for which memory has room."""
    both = [model for model in (models.target, models.draft) if model is not None]
    configs = [model.config for model in both]
    limits = SchedulerSettings(
        max_num_seqs=num_seqs or config.most_seqs(device_type),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_draft_tokens=config.block_tokens - 1,
        max_new_tokens=config.max_new_tokens,
        max_seq_len=models.max_seq_len,
        seed=config.seed,
        shares_room=config.shares_room,
        rope_borders=rope_borders(*configs),
        recomputed_from=recomputed_from(models.target.config),
        target_keeps_states=models.target.keeps_states,
        draft_keeps_states=models.draft is not None and models.draft.keeps_states,
    )
    for _ in range(num_halvings):
        limits = limits.halved()
    return limits


def _open_model(option: str, name: str, config: GenerateConfig, tp_size: int = 1) -> Checkpoint:
    role = option.removeprefix("--")
    quantization, adapter = (getattr(config, f"{role}_{what}") for what in ("quantization", "adapter"))
    checkpoint = open_checkpoint(option, name, trust_remote_code=config.trust_remote_code)
    checkpoint = dataclasses.replace(
        checkpoint, quantization=quantization, has_float8_cache=config.cache_dtype is not None
    )
    if checkpoint.drafter is not None and option == "--draft":
        return checkpoint
    check_family(checkpoint, tp_size)
    check_heads(checkpoint, tp_size)
    check_weights(checkpoint, tp_size)
    if adapter is not None:
        found = open_adapter(f"{option}_adapter", adapter, checkpoint)
        checkpoint = dataclasses.replace(checkpoint, adapter=found)
    return checkpoint


def check_goes_back(draft: Checkpoint | None, use: str) -> None:
    """Raises :class:`UserError` for a draft that cannot go back to any token, as ``use`` does."""
    if draft is not None and draft.keeps_states:
        raise UserError(
            f"--draft {draft.name} has recurrent layers, whose state is of a text's end alone, and {use}: "
            "choose a draft without such layers"
        )


def check_drafter_run(
    config: GenerateConfig, target: Checkpoint, draft: Checkpoint, *, may_read_states: bool
) -> None:
    """Raises :class:`UserError` for a draft that does not fit the target, and for options that it cannot
    have."""
    assert draft.drafter is not None
    what = f"--draft {draft.name} is {draft.drafter.what}"
    if not may_read_states:
        raise UserError(
            f"{what}, which jobs/generate.py alone can use: name a draft that runs "
            "without the target's states"
        )
    why = f"{what}, which reads the states of its one target, and takes turns with it"
    given = {
        "overlap asynchronous": config.overlap == "asynchronous",
        "head": config.head is not None,
        "draft_quantization": config.draft_quantization is not None,
        "draft_adapter": config.draft_adapter is not None,
        f"model_impl {config.model_impl}": config.model_impl == "specdist",
    }
    for name, is_given in given.items():
        if is_given:
            raise UserError(f"{why}: leave out --{name}, or choose a draft model of its own")
    check_drafter(draft, target)


def settled(config: GenerateConfig, draft: Checkpoint | None) -> GenerateConfig:
    """The options as the draft needs them: one of the target's states takes turns with it, and a block
    has so many tokens."""
    if draft is None or draft.drafter is None:
        return config
    what, most = f"--draft {draft.name} is {draft.drafter.what}", draft.drafter.max_draft_tokens(draft.config)
    changes: dict[str, Any] = {}
    if config.overlap == AUTO:
        logger.info("%s, which takes turns with its target", what)
        changes["overlap"] = SYNCHRONOUS
    for name in BLOCK_LENGTHS:
        given = config.policy_options.get(name, 0)
        if most is not None and given > most:
            logger.info("%s, and drafts at most %d tokens: --%s %d is lowered", what, most, name, given)
            changes[name] = most
    return dataclasses.replace(config, **changes)


def check_same_tokens(target: Checkpoint, draft: Checkpoint) -> None:
    """Raises :class:`UserError` unless the same ids are the same tokens in both.

    Either may have more at the end, as a chat model has that is drafted for by its base model. Which tokens
    begin and end a text is the target's tokenizer's to say.
    """
    target_tokens, draft_tokens = (
        {token_id: token for token, token_id in load_tokenizer(model).get_vocab().items()}
        for model in (target, draft)
    )
    common = range(min(max(target_tokens), max(draft_tokens)) + 1)
    first = next((each for each in common if target_tokens.get(each) != draft_tokens.get(each)), None)
    if first is not None:
        raise UserError(
            f"--target {target.name} and --draft {draft.name} have different tokenizers: token {first} is "
            f"{target_tokens.get(first)!r} for the target and {draft_tokens.get(first)!r} for the draft; "
            "choose a draft of the target's family"
        )


def common_vocab_size(target: Checkpoint, draft: Checkpoint | None) -> int:
    """Number of ids with logits in both models, whose logits may be padded to different widths.

    A token that the tokenizer has and the target has not cannot be generated, and makes a prompt unusable.
    Raises :class:`UserError` if the target can generate one that the draft has no logits for.
    """
    # Read once: a configuration's attributes take a while, and there may be 150,000 tokens.
    width = target.vocab_width
    if draft is None or draft.vocab_width >= width:
        return width
    last = max(token_id for token_id in load_tokenizer(target).get_vocab().values() if token_id < width)
    if last >= draft.vocab_width:
        raise UserError(
            f"--target {target.name} has token {last}, but --draft {draft.name} has logits of only "
            f"{draft.vocab_width} ids: choose a draft of the target's family that has as many"
        )
    return draft.vocab_width
