"""How many pages of keys and values fit into a rank's memory, by the sizes of the models that it holds.

On a GPU the cache gets the memory that is free after the models are loaded, less the reserve of the passes
(:mod:`specdist.models.sizes.reserve`). On a host, whose memory is shared with other processes, it gets at
most a fraction of the available memory; pages that are never written take none.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from specdist.config.generate import GenerateConfig
from specdist.engine.assembly import PAGE_SIZE
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.engine.target.sharded_target import RANK_ZERO
from specdist.job.models.model_plan import ModelPlan
from specdist.job.ranks.topology import Topology
from specdist.models.cache.key_value import pages_per_branch
from specdist.models.cache.windowed_pages import WindowedLayers
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.loading.memory import DeviceMemory, available_memory_bytes, device_memory
from specdist.models.passes.runner import ModelRunner
from specdist.models.passes.static_runs import LONGEST_RUN
from specdist.models.sizes.reserve import PassLimits, Reserve, Sampling, gib, page_overhead, reserve
from specdist.models.sizes.sizes import ModelSize, size_of

# The number of pages where a model has no room.
NO_ROOM = -1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """How much may run at a time.

    Attributes:
        num_branch_slots, max_branch_tokens: of the draft, on the rank that holds it.
        is_asynchronous: the draft works while the target does.
        num_state_numbers: of every token, that a drafter reads.
    """

    scheduling: SchedulerSettings
    num_branch_slots: int = 0
    max_branch_tokens: int = 0
    is_asynchronous: bool = False
    num_state_numbers: int = 0

    @property
    def pages_per_seq(self) -> int:
        """Pages of a sequence of ``max_seq_len`` tokens."""
        return -(-self.scheduling.max_seq_len // PAGE_SIZE)

    @property
    def num_seq_pages(self) -> int:
        """Pages of as many sequences of ``max_seq_len`` tokens as may run at a time."""
        return self.scheduling.num_slots * self.pages_per_seq

    @property
    def num_branch_pages(self) -> int:
        return self.num_branch_slots * pages_per_branch(self.max_branch_tokens, PAGE_SIZE)


@dataclass(frozen=True, kw_only=True)
class HeldModel:
    """A model, or a rank's shard of one, on a GPU, and its largest pass there; windowed layers of a target
    have pages of their own."""

    size: ModelSize
    tp_size: int
    limits: PassLimits
    windowed: WindowedLayers | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, without windowed layers that have others."""
        return PAGE_SIZE * (self.size.cache_bytes_per_token(self.tp_size) - self._windowed_token_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a sequence's, or a branch's, states of recurrent layers."""
        return self.size.state_bytes(self.tp_size, self.limits.rollback)

    @property
    def state_bytes(self) -> int:
        """Bytes of all states: of sequences and branches, and those that are kept for prefixes."""
        return (self.limits.num_seqs + self.limits.num_prefix_states) * self.slot_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes of what does not follow the page table: pages of windowed layers, states, and the pages that
        the sequences' blocks have for themselves."""
        num_windowed = 0 if self.windowed is None else self.windowed.num_pages
        num_own = self.limits.num_seqs * -(-self.size.num_block_tokens // PAGE_SIZE)
        windowed_bytes = num_windowed * PAGE_SIZE * self._windowed_token_bytes
        return windowed_bytes + self.state_bytes + num_own * self.page_bytes

    @property
    def _windowed_token_bytes(self) -> int:
        if self.windowed is None:
            return 0
        return self.size.windowed_bytes_per_token(self.tp_size, self.windowed.window)

    @property
    def copied_page_bytes(self) -> int:
        """Bytes of one layer's page, which a pass without an attention kernel may copy."""
        return 0 if self.limits.has_kernel else PAGE_SIZE * page_overhead(self.size, self.tp_size)


@dataclass(frozen=True, kw_only=True)
class CacheRoom:
    """The number of pages that fit into one rank's memory, and how it was computed.

    Attributes:
        num_pages: pages of sequences; those of branches are not counted. Negative if not even those fit.
        windowed: layers that have pages of their own beside them.
        cache_bytes: memory of all.
        budget_bytes: the most that the cache may take.
        state_bytes: of the cache, that of recurrent layers.
        memory, needs: memory and reserve of a GPU; None on a host.
        can_share_more: the target's weights here can be cut into more parts.
    """

    name: str
    num_pages: int
    cache_bytes: int
    budget_bytes: int
    state_bytes: int = 0
    windowed: WindowedLayers | None = None
    memory: DeviceMemory | None = None
    needs: Reserve | None = None
    can_share_more: bool = True

    @property
    def graph_bytes(self) -> int:
        """Bytes of a GPU's memory that recorded passes may take beside tensors: what is reserved for that, or
        more where the cache leaves it."""
        if self.memory is None or self.needs is None:
            return 0
        left = self.memory.free_bytes - self.cache_bytes - (self.needs.total - self.needs.graph_nodes)
        return max(left, self.needs.graph_nodes)

    def __str__(self) -> str:
        """The use of the memory, in GiB."""
        pages = f"{self.num_pages} pages, {self.num_pages * PAGE_SIZE} tokens"
        if self.windowed is not None:
            pages += f", and {self.windowed.num_pages} pages of layers with windows"
        if self.state_bytes:
            pages += f", and {gib(self.state_bytes)} for states of recurrent layers"
        used = f"cache {gib(self.cache_bytes)} ({pages})"
        if self.memory is None or self.needs is None:
            return f"{self.name} in GiB: {gib(self.budget_bytes)} for the cache at most; {used}"
        taken = self.memory.total_bytes - self.memory.free_bytes
        return (
            f"{self.name} in GiB: {gib(self.memory.total_bytes)} in all = {gib(taken)} taken by weights and "
            f"libraries + {gib(self.needs.total)} reserved ({self.needs}) + {gib(self.budget_bytes)} for the "
            f"cache at most; {used}"
        )


def target_limits(
    limits: BatchLimits, sampling: Sampling, *, decides: bool = True, has_kernel: bool = True
) -> PassLimits:
    """The largest target pass: chunks of prompts and verification blocks fill it up to
    ``max_num_batched_tokens``."""
    batch = limits.scheduling
    # Where blocks have half of the tokens, prompts that end have one more each.
    num_logits = batch.most_block_tokens + (batch.num_slots if batch.shares_room else 0)
    if sampling.scores_prompts:
        num_logits = batch.max_num_batched_tokens
    # The distributions of the next tokens are kept until they are drawn. A draft in this process takes them
    # from those of the whole pass: what this took for its logits is free meanwhile.
    num_kept = batch.num_slots if decides and sampling.next_distributions == "rejection" else 0
    return PassLimits(
        num_tokens=batch.max_num_batched_tokens,
        num_logits=min(batch.max_num_batched_tokens, num_logits),
        num_seqs=batch.num_slots,
        max_seq_len=batch.max_seq_len,
        num_kept=num_kept,
        num_drawn=num_kept,
        decides=decides,
        has_kernel=has_kernel,
        num_state_numbers=limits.num_state_numbers,
        rollback=batch.target_rollback,
        num_prefix_states=batch.num_prefix_states,
    )


def draft_limits(limits: BatchLimits, sampling: Sampling, *, has_kernel: bool = True) -> PassLimits:
    """The draft's largest passes: chunks of the same prompts, and steps of all sequences and branches."""
    batch = limits.scheduling
    num_seqs = batch.num_slots + limits.num_branch_slots
    is_random = sampling.next_distributions == "rejection"
    steps = (1 + limits.is_asynchronous) * (batch.max_draft_tokens + 1)
    num_kept = batch.num_slots * steps + limits.num_branch_slots * limits.max_branch_tokens
    return PassLimits(
        # The first step of a round runs two tokens of a sequence whose last block was accepted whole.
        num_tokens=max(batch.max_num_batched_tokens, 2 * num_seqs),
        num_logits=num_seqs,
        num_seqs=num_seqs,
        max_seq_len=batch.max_seq_len,
        num_kept=num_kept if is_random or limits.num_branch_slots else 0,
        num_drawn=batch.num_slots if is_random else 0,
        num_run_steps=LONGEST_RUN,
        has_kernel=has_kernel,
        num_state_numbers=limits.num_state_numbers,
        rollback=batch.draft_rollback,
    )


def sampling_of(config: GenerateConfig) -> Sampling:
    """The run's sampling, as far as memory depends on it."""
    if config.is_greedy:
        return Sampling(next_distributions="greedy", scores_prompts=config.prompt_logprobs is not None)
    return Sampling(
        next_distributions=config.acceptance,
        has_top_p=config.top_p < 1 or config.processes_logits,
        scores_prompts=config.prompt_logprobs is not None,
    )


def room_on_gpu(
    models: Sequence[HeldModel],
    limits: BatchLimits,
    sampling: Sampling,
    memory: DeviceMemory,
    *,
    num_communicators: int = 0,
    given_bytes: int | None = None,
    name: str = "memory",
) -> CacheRoom:
    """The pages of a GPU on which the models have been loaded; pure arithmetic.

    Args:
        models: the model on the GPU, or two that take turns.
        num_communicators: NCCL communicators of this rank that are not connected yet.
        given_bytes: size of the cache; None takes the memory that is left.
    """
    reserves = (
        reserve(
            held.size,
            held.limits,
            sampling,
            device_bytes=memory.total_bytes,
            tp_size=held.tp_size,
            num_communicators=num_communicators,
        )
        for held in models
    )
    needs = functools.reduce(Reserve.beside, reserves)
    if given_bytes is not None:
        found = room_within(models, limits, given_bytes, name=name)
    else:
        # Passes may copy pages: these copies are a part of the memory that is left, but not of a given size.
        copied_bytes = max(held.copied_page_bytes for held in models)
        budget = max(0, memory.free_bytes - needs.total)
        found = room_within(models, limits, budget, copied_bytes=copied_bytes, name=name)
    return dataclasses.replace(found, memory=memory, needs=needs)


def room_within(
    models: Sequence[HeldModel],
    limits: BatchLimits,
    budget: int,
    *,
    copied_bytes: int = 0,
    name: str = "memory",
) -> CacheRoom:
    """The pages of a cache of at most so many bytes; ``copied_bytes``: beside each page. Pages of windowed
    layers, and states, are as many as they need, whatever is left."""
    page_bytes, fixed_bytes = page_bytes_of(models), sum(held.fixed_bytes for held in models)
    left = budget - fixed_bytes
    if page_bytes:
        num_pages = min(left // (page_bytes + copied_bytes) - limits.num_branch_pages, limits.num_seq_pages)
    else:
        num_pages = limits.num_seq_pages if left >= 0 else NO_ROOM
    return CacheRoom(
        name=name,
        num_pages=num_pages,
        windowed=next((held.windowed for held in models if held.windowed is not None), None),
        cache_bytes=fixed_bytes + max(0, num_pages + limits.num_branch_pages) * page_bytes,
        budget_bytes=budget,
        state_bytes=sum(held.state_bytes for held in models),
    )


def page_bytes_of(models: Sequence[HeldModel]) -> int:
    """Bytes of a page of the table that all models follow."""
    return sum(held.page_bytes for held in models)


def room_for_cache(
    config: GenerateConfig,
    models: ModelPlan,
    topology: Topology,
    limits: BatchLimits,
    *,
    target: ModelRunner | None,
    draft: ModelRunner | None,
    windowed: WindowedLayers | None = None,
    is_connected: bool = True,
) -> CacheRoom:
    """The pages that fit into this rank's memory beside the models that it has loaded.
    ``windowed``: layers of the target that have pages of their own.

    ``is_connected``: NCCL has taken its buffers. If not they are estimated.
    """
    given, name, sampling = config.cache_bytes(), f"memory of {topology.device}", sampling_of(config)
    held, most_ranks = [], 1
    if models.draft is not None and models.draft.drafter is not None:
        num_numbers = models.draft.drafter.num_read_numbers(models.draft.config)
        limits = dataclasses.replace(limits, num_state_numbers=num_numbers)
    if target is not None:
        decides, has_kernel = topology.rank == RANK_ZERO, target.has_kernel(PAGE_SIZE)
        passes = target_limits(limits, sampling, decides=decides, has_kernel=has_kernel)
        size = _size(models.target, target)
        size = dataclasses.replace(size, has_whole_experts=models.is_expert_parallel)
        held.append(HeldModel(size=size, tp_size=topology.tp_size, limits=passes, windowed=windowed))
        most_ranks = max(size.tp_sizes(size.num_query_heads), default=1)
    if draft is not None:
        assert models.draft is not None
        passes = draft_limits(limits, sampling, has_kernel=draft.has_kernel(PAGE_SIZE))
        drafter = models.draft.drafter
        if drafter is not None and drafter.drafts_blocks:
            # Logits of whole blocks, whatever is drawn of them.
            block = 1 + (drafter.max_draft_tokens(models.draft.config) or 0)
            num_kept = passes.num_kept + passes.num_seqs * block
            passes = dataclasses.replace(passes, num_kept=num_kept, num_run_steps=0)
        held.append(HeldModel(size=_size(models.draft, draft), tp_size=1, limits=passes))
    if topology.device.type != "cuda":
        num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        budget = available_memory_bytes(num_local_ranks) if given is None else given
        return room_within(held, limits, budget, name=name)
    room = room_on_gpu(
        held,
        limits,
        sampling,
        device_memory(topology.device),
        num_communicators=0 if is_connected else _num_communicators(topology),
        given_bytes=given,
        name=name,
    )
    assert room.memory is not None and room.needs is not None
    missing = room.cache_bytes + room.needs.total - room.memory.free_bytes
    if missing > 0 and given is not None and is_connected:
        logger.warning(
            "--cache_memory %s leaves %s GiB less than passes may need: lower it if memory runs out",
            config.cache_memory,
            gib(missing),
        )
    return dataclasses.replace(room, can_share_more=most_ranks > topology.tp_size)


def refusal(config: GenerateConfig, limits: BatchLimits, room: CacheRoom) -> str:
    """The error message where memory does not hold one sequence; ``room`` is the rank's with the least."""
    num_tokens = max(0, room.num_pages) * PAGE_SIZE
    lower = f", or lower --max_seq_len to {num_tokens}" if num_tokens else ""
    longest = limits.scheduling.max_seq_len
    if room.num_pages < 0 and room.state_bytes:
        return (
            f"states of recurrent layers take {gib(room.state_bytes)} GiB for "
            f"{limits.scheduling.num_slots} sequences at a time, more than memory holds ({room}): lower "
            "--max_num_seqs" + ("" if config.cache_memory is None else ", or raise --cache_memory")
        )
    short = f"can hold {num_tokens} tokens, fewer than one sequence of --max_seq_len {longest}"
    if config.cache_memory is not None:
        return f"--cache_memory {config.cache_memory} {short}: raise --cache_memory{lower}"
    if room.needs is None:
        return (
            f"--cache_memory was not given, and the {room.budget_bytes} bytes of free memory {short}: raise "
            f"--cache_memory{lower}"
        )
    reduce = "Share the weights among more ranks (--tp_size); reduce" if room.can_share_more else "Reduce"
    return (
        f"the GPU memory left for keys and values {short}. {room}. "
        f"{reduce} the reserve with a lower --max_num_batched_tokens and "
        f"--max_num_seqs{lower or ', or lower --max_seq_len'}; or give --cache_memory, which is not checked "
        "against the reserve"
    )


def _size(checkpoint: Checkpoint, runner: ModelRunner) -> ModelSize:
    """The checkpoint's size, with the windows that the runner found."""
    size = size_of(checkpoint, runner.dtype.itemsize)
    layers = enumerate(size.layers)
    own = tuple(dataclasses.replace(layer, window=runner.windows.get(index)) for index, layer in layers)
    return dataclasses.replace(size, layers=own)


def _num_communicators(topology: Topology) -> int:
    """The communicators: that of the target's ranks, and that of rank 0 with the draft's."""
    of_target = topology.tp_size > 1 and topology.holds_target
    of_draft = topology.has_draft_rank and topology.rank in (RANK_ZERO, topology.draft_rank)
    return int(of_target) + int(of_draft)
