"""What runs at a time on a rank, and what a model that it holds takes for that."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdist.engine.assembly import PAGE_SIZE
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.models.cache.branch_pages import pages_per_branch
from specdist.models.cache.windowed_pages import WindowedLayers
from specdist.models.sizes.reserve import PassLimits, gib, page_overhead
from specdist.models.sizes.sizes import ModelSize


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
        """Of a page, without windowed layers that have others."""
        return PAGE_SIZE * (self.size.cache_bytes_per_token(self.tp_size) - self._windowed_token_bytes)

    @property
    def windowed_bytes(self) -> int:
        """Of all pages of windowed layers."""
        return PAGE_SIZE * self._windowed_token_bytes * (self.windowed.num_pages if self.windowed else 0)

    @property
    def slot_bytes(self) -> int:
        """Of a sequence's, or a branch's, states of recurrent layers."""
        return self.size.state_bytes(self.tp_size, self.limits.rollback)

    @property
    def state_bytes(self) -> int:
        """Of all sequences and branches, and those that are kept for prefixes."""
        return (self.limits.num_seqs + self.limits.num_prefix_states) * self.slot_bytes

    @property
    def block_bytes(self) -> int:
        """Of pages that the sequences' blocks have for themselves."""
        return self.limits.num_seqs * -(-self.size.num_block_tokens // PAGE_SIZE) * self.page_bytes

    @property
    def fixed_bytes(self) -> int:
        """Of what does not follow the page table."""
        return self.windowed_bytes + self.state_bytes + self.block_bytes

    @property
    def _windowed_token_bytes(self) -> int:
        if self.windowed is None:
            return 0
        return self.size.windowed_bytes_per_token(self.tp_size, self.windowed.window)

    @property
    def copied_page_bytes(self) -> int:
        """Of one layer, which a pass without an attention kernel may copy."""
        return 0 if self.limits.has_kernel else PAGE_SIZE * page_overhead(self.size, self.tp_size)


def unquantized_experts(model: ModelSize | None) -> str | None:
    """That the option which has a model's layers quantised leaves its experts as they are, and what these
    take; None where there is nothing to say."""
    if model is None or model.quantized_by is None or not model.experts:
        return None
    whole, others = model.weight_bytes(1), replace(model, experts=()).weight_bytes(1)
    return (
        f"{model.quantized_by} quantises linear layers, and not the experts of {model.name}, which take "
        f"{gib(whole - others)} of its {gib(whole)} GiB"
    )
