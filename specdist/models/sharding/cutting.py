"""Cuts a model over a group of ranks with DeepSpeed, and refuses by name one that its cut does not fit.

transformers' plan of a family says what is cut how; in a family without one, DeepSpeed cuts every linear
layer of the blocks along its outputs or its inputs. Not every family can be cut so. So before any weight is
read, a token without numbers runs through what was cut.

The output head of a sharded target is cut here: every rank computes the logits of its part of the vocabulary.
DeepSpeed's own head splits the sum over the hidden units, and all-reduces logits of the whole vocabulary. Its
vocabulary-parallel head is for training: the inference configuration refuses ``vocab_parallel_lm_head``, and
on the meta device it would always be tied to the embedding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from specdist.models.families.dry_run import dry_run
from specdist.models.files.checkpoint import Checkpoint, kv_heads_of
from specdist.models.recurrent.cuts import CUTS, Cut, cut_of
from specdist.models.sharding.experts import cut_experts
from specdist.models.sharding.tp_plan import largest_size, planned_cuts
from specdist.sampling.vocab_parallel import vocab_ranges
from specdist.utils.errors import UserError, short_text

logger = logging.getLogger(__name__)


def cut(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    vocab_size: int,
    is_expert_parallel: bool = False,
) -> PreTrainedModel:
    """This rank's part of a model on the meta device, there too; its head is cut along the first
    ``vocab_size`` ids. ``is_expert_parallel``: its experts are whole, each on one rank. All ranks of the
    world outside of the group must call :func:`join_sharding` at the same time.

    Raises :class:`UserError` on every rank for a model that cannot be cut.
    """
    head_name, head = find_head(model)
    ids = vocab_ranges(vocab_size, dist.get_world_size(group))[dist.get_rank(group)]
    reason_whole = _why_it_does_not_run(model)
    shapes = {name: weight.shape for name, weight in model.named_parameters(remove_duplicate=False)}
    reason = None
    try:
        shard = _cut_blocks(model, dtype, group, is_expert_parallel)
    except dist.DistError:
        raise
    except Exception as error:  # assertions and errors of many kinds, before its broadcast
        logger.debug("%s cannot be cut", checkpoint.name, exc_info=True)
        join_sharding()
        reason = short_text(error)
    else:
        shard_head(shard, head_name, head, ids)
        with _without_sums(shard):
            reason = _why_it_does_not_run(shard)
        # A whole model that looks at values stops there, and one that is cut wrongly often before.
        reason = None if reason == reason_whole else reason
        reason = reason or _why_it_takes_no_weights(shard, shapes)
    reasons = [reason] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    found = next(filter(None, reasons), None)
    if found is not None:
        num_ranks = dist.get_world_size(group)
        raise UserError(
            f"{checkpoint.option} {checkpoint.name} is of the family {model.config.model_type}, which "
            f"cannot be cut over {num_ranks} ranks ({found}): use --tp_size "
            f"{largest_size(checkpoint, num_ranks)}"
        )
    return shard


def _cut_blocks(
    model: PreTrainedModel, dtype: torch.dtype, group: dist.ProcessGroup, is_expert_parallel: bool
) -> PreTrainedModel:
    import deepspeed  # takes seconds, and a replica of one process does not need it
    from deepspeed.accelerator import get_accelerator

    cut_experts(model, group, is_expert_parallel=is_expert_parallel)
    if cuts := planned_cuts(model):
        from specdist.models.sharding.tp_layers import place_cut_layers

        place_cut_layers(model, cuts, group)
        join_sharding()
        return model
    num_kv_heads = kv_heads_of(model.config.get_text_config())
    if num_kv_heads % dist.get_world_size(group):
        raise ValueError(f"for DeepSpeed its {num_kv_heads} key/value heads are too few")
    with _without_memory(model):
        engine = deepspeed.init_inference(
            model,
            # Without tp_group nothing is sharded, silently.
            tensor_parallel={
                "tp_size": dist.get_world_size(group),
                "mpu": ModelParallelUnit(group),
                "tp_group": group,
            },
            # On a CPU it refuses float16, which its training does not support.
            dtype=dtype if dtype in get_accelerator().supported_dtypes() else torch.float32,
            replace_with_kernel_inject=False,
        )
    shard: PreTrainedModel = engine.module.to(dtype=dtype)
    return shard


@contextmanager
def _without_memory(model: PreTrainedModel) -> Iterator[None]:
    """A context in which DeepSpeed allocates no plain shard: a quantised one needs a half or a quarter."""
    model.to_empty = lambda **_: model
    try:
        yield
    finally:
        del model.to_empty


def _why_it_does_not_run(model: PreTrainedModel) -> str | None:
    try:
        dry_run(model)
    except Exception as error:  # of a whole model: code that looks at values, which are not there
        logger.debug("%s does not run without weights", type(model).__name__, exc_info=True)
        return f"{_innermost(model, error)}{short_text(error)}"
    return None


def _innermost(model: nn.Module, error: Exception) -> str:
    """The name of the model's innermost module in which an error was raised, for a message."""
    found = ""
    names = {id(module): f"{name}: " for name, module in model.named_modules() if name}
    traceback = error.__traceback__
    while traceback is not None:
        found = names.get(id(traceback.tb_frame.f_locals.get("self")), found)
        traceback = traceback.tb_next
    return found


def _why_it_takes_no_weights(shard: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> str | None:
    """Let every parameter tell its cut (:func:`specdist.models.recurrent.cuts.cut_of`); why that is not
    possible, if it is not."""
    num_cut = 0
    for name, weight in shard.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        layer = shard.get_submodule(owner)
        if weight.shape != shapes[name] and cut_of(layer, leaf) is None:
            try:
                vars(layer).setdefault(CUTS, {})[leaf] = _cut_by(layer, weight.shape, shapes[name])
            except Exception as error:
                logger.debug("%s of %s cannot be cut", name, list(shapes[name]), exc_info=True)
                return f"{name}: {short_text(error)}"
        num_cut += cut_of(layer, leaf) is not None and not isinstance(layer, VocabParallelHead)
    return None if num_cut else "every weight is whole on every rank"


def _cut_by(layer: Any, own: torch.Size, whole: torch.Size) -> Cut:
    """The cut of a layer of DeepSpeed: the numbers of rows or columns that it keeps of all."""
    (dim,) = (dim for dim, (part, length) in enumerate(zip(own, whole, strict=True)) if part != length)
    shape = [length if index == dim else 1 for index, length in enumerate(whole)]
    numbers = nn.Parameter(torch.arange(whole[dim]).view(shape), requires_grad=False)
    layer._tp_partition([numbers, None][: len(whole)])
    kept = numbers.flatten().tolist()
    if len(kept) != own[dim]:
        raise RuntimeError(f"a shard of {tuple(whole)} has {len(kept)} of dimension {dim}, not {own[dim]}")
    begins = [place for place in range(len(kept)) if not place or kept[place] != kept[place - 1] + 1]
    runs = pairwise([*begins, len(kept)])
    return Cut(dim, tuple(range(kept[begin], kept[begin] + end - begin) for begin, end in runs))


@contextmanager
def _without_sums(shard: nn.Module) -> Iterator[None]:
    """A context in which no layer sums over the ranks: numbers that are not there cannot be sent."""
    groups = {module: module.mp_group for module in shard.modules() if hasattr(module, "mp_group")}
    try:
        for module in groups:
            module.mp_group = None  # type: ignore[assignment]
        yield
    finally:
        for module, group in groups.items():
            module.mp_group = group


def join_sharding() -> None:
    """DeepSpeed broadcasts rank 0's random state over the whole world while it shards: receive it.

    It is the accelerator's state, on the accelerator: a tensor on another device would use another backend,
    and all ranks would wait forever.
    """
    import deepspeed.comm
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    deepspeed.comm.broadcast(accelerator.get_rng_state().to(accelerator.current_device_name()), 0)


class ModelParallelUnit:
    """Keeps DeepSpeed from creating its own group, for which it would wait for the draft's rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._group


class VocabParallelHead(nn.Linear):
    """The rows ``ids`` of a head, weight and bias. Padding ids after the vocabulary are on no rank."""

    def __init__(self, whole: nn.Linear, ids: range) -> None:
        super().__init__(
            whole.in_features, len(ids), bias=whole.bias is not None, device="meta", dtype=whole.weight.dtype
        )
        self.ids = ids
        vars(self)[CUTS] = dict.fromkeys(("weight", "bias"), Cut(0, (ids,)))


def find_head(model: PreTrainedModel) -> tuple[str, nn.Module | None]:
    """The output head of a whole model, and its name there (empty where it has none)."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), ""), head


def shard_head(model: PreTrainedModel, name: str, whole: nn.Module | None, ids: range) -> None:
    """Put this rank's part of the head, on the meta device, into the model that DeepSpeed has sharded.

    Raises :class:`UserError` if the whole head is not a plain linear layer.
    """
    if type(whole) is not nn.Linear:
        raise UserError(
            f"--target {model.name_or_path or model.config.model_type}: its output head is a "
            f"{type(whole).__name__}, which cannot be cut along the vocabulary: use --tp_size 1"
        )
    model.set_submodule(name, VocabParallelHead(whole, ids))
