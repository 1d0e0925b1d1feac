"""Predicted pass times, from sizes and peaks: the roofline model (Williams, Waterman, Patterson 2009).

Matrices, experts and attention run one after the other, each for the longer of reading and arithmetic;
quantised layers at the rates that were measured of their products, experts in whole tiles of tokens, and
attention at a rate of its own. Then come the all-reduces, two per layer, and what the roofline does not know.
Of experts a pass reads the distinct ones of all its tokens, as many as uniform routing is expected to choose,
which is an upper bound: see
:class:`specdist.models.sizes.sizes.Experts`. The context length enters through reading the
cache. The small kernels between matrices, launches and synchronisations are as many as ``python -m
tests.gpu.counts`` has counted in the engine (``counted.json``); what each of them costs is a figure of the
GPU. Sampling is what the kernels of :mod:`specdist.kernels.sampling` read and write; what policies compute
of a draft's distributions (entropies) is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from specdist.data.stats.regression import NS_PER_S
from specdist.lab.plan.calibration import Filters
from specdist.lab.plan.hardware import Gpu
from specdist.lab.plan.simulate import ReplicaCosts
from specdist.models.sizes.sizes import ALL_REDUCES_PER_LAYER, ModelSize
from specdist.policies.costs import ContextCosts, CostModel, Curve
from specdist.sampling.distributions import SamplingSettings

Side = Literal["target", "draft"]

# The host's work for a pass: choosing the bucket, packing the inputs. Assumed.
PACKING_S = 100e-6
# How much faster than memory kernels read what the kernels before them have just written, which is still in
# the device's cache. Assumed.
CACHED_FACTOR = 2.0
# The job's own.
DEFAULTS = SamplingSettings()
# Kernels that read a row's logits, the last of which writes probabilities: with filters also sums from limits
# on, and the list of the logits between two of them, which another kernel searches.
PLAIN_KERNELS, FILTERING_KERNELS = 2, 4
FLOAT_BYTES = 4
# Plain operations of torch on a number of a sharded target's logits: in float32, its score after temperature
# (6 bytes), the largest (4), differences and exponentials (8 each) and their sum (4).
NORMALISER_BYTES = 30
# The same on a row from which a next token is drawn: copies of it and of the draft's (8 bytes each), their
# difference (12), its positive part (8), its sum (4), the quotient (8), and the choice of a row (12).
RESIDUAL_BYTES = 60
# Assumed for the host between two target passes: scheduling, committing, stop conditions.
ROUND_S = 0.5e-3
# The same for each running sequence. Fitted to published figures; this engine's own took 4 to 5 microseconds
# on a CPU (jobs/benchmarks/tables/emulation.md).
ROW_S = 3e-6
# Assumed for the messages to the draft's rank and back; in one process it is less.
PROPOSAL_S = 0.2e-3
# Kernels for a layer's seven products with four inputs: one that rounds an input, and of integers three that
# scale their sums.
ROUNDING_KERNELS: dict[str | None, int] = {"float8": 4, "int8": 4 + 7 * 3}
# Of a layer with experts beside a dense one, by transformers' router and grouped products: operations, each
# of at least a kernel, and what they read or write for every expert of a token, in rows of the hidden size
# and of the inner width. Counted from the code.
ROUTING_KERNELS, ROUTED_ROWS, ROUTED_PRODUCTS = 16, 8, 7
# Tokens that a product of an expert computes at a time; the last tile of each is half empty. Fitted to
# published figures, as the nearest of the sizes that kernels have.
EXPERT_TILE_ROWS = 64
# Operations that make keys and values of the target's states, and put them into a layer's pages. Counted from
# the code.
CONTEXT_KERNELS = 8
# Ratio of neighbouring sizes of a curve, which is linear between them.
STEP = 1.25
# Of a prompt that the draft runs, as the main job measures it.
PROMPT_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class PassCounts:
    """A pass of one side, with the sampling and the bookkeeping around it: rejection rule, fixed lengths.

    Attributes:
        kernels_per_layer, kernels_outside_of_layers: in graphs.
        eager_kernels: launched by themselves; ``copies``: between host and device.
        replays: of graphs.
        synchronisations: waits of the host for the device.
        tensors_per_layer: read and written between the kernels of a layer, in tensors of [tokens, hidden
            size].
    """

    kernels_per_layer: float = 0.0
    kernels_outside_of_layers: float = 0.0
    eager_kernels: float = 0.0
    copies: float = 0.0
    replays: float = 0.0
    synchronisations: float = 0.0
    tensors_per_layer: float = 0.0

    def kernels(self, num_layers: int) -> float:
        """Kernels of the pass in graphs."""
        return num_layers * self.kernels_per_layer + self.kernels_outside_of_layers

    def seconds(self, num_layers: int, gpu: Gpu) -> float:
        """Seconds of a pass beside what its kernels read, write and compute."""
        return (
            self.kernels(num_layers) * gpu.kernel_s
            + self.replays * gpu.graph_s
            + (self.eager_kernels + self.copies) * gpu.eager_kernel_s
            + self.synchronisations * gpu.wait_s
            + (PACKING_S if self.replays else 0.0)
        )


def _read(side: Side) -> PassCounts:
    text = (Path(__file__).parent / "counted.json").read_text(encoding="utf-8")
    return PassCounts(**json.loads(text)[side])


TARGET_PASS, DRAFT_PASS = _read("target"), _read("draft")
NO_COUNTS = PassCounts()


@dataclass(frozen=True, kw_only=True)
class SamplingTimes:
    """Times of one model's logits on a GPU. ``settings``: the same of target and draft."""

    gpu: Gpu
    model: ModelSize
    settings: SamplingSettings

    def draft_s(self, num_rows: float) -> float:
        """Seconds of a draft step beside its pass: a distribution of every sequence, and a draw from it."""
        if self.settings.is_greedy:
            return self._moving_s(num_rows * self.model.bytes_per_number)
        return self.process_s(num_rows) + self.draw_s(num_rows)

    def target_s(self, num_logits: float, num_rows: float, tp_size: int) -> float:
        """Seconds of verifying so many tokens of ``num_rows`` sequences and of drawing their next tokens, on
        the rank that has the most to do."""
        number = self.model.bytes_per_number
        if self.settings.is_greedy:
            return self._moving_s(num_logits * number / tp_size)
        next_s = self._moving_s(num_rows * RESIDUAL_BYTES) + self.draw_s(num_rows)
        if tp_size == 1:
            return self.process_s(num_logits) + next_s
        if self.settings.top_p < 1:
            # The nucleus needs all logits on one rank.
            return self._gathering_s(num_logits, tp_size) + self.process_s(num_logits) + next_s
        normalising_s = self._moving_s(num_logits * NORMALISER_BYTES / tp_size)
        return normalising_s + self._gathering_s(num_rows, tp_size) + self.process_s(num_rows) + next_s

    def process_s(self, num_rows: float) -> float:
        """Seconds from logits to as many distributions."""
        measured = self.gpu.sampling_curves.get(self._filters)
        if measured is not None:
            return measured.process_s(num_rows, self.model.vocab_size)
        has_filter = self._filters != "none"
        num_reads = FILTERING_KERNELS if has_filter else PLAIN_KERNELS
        moved = num_reads * self.model.bytes_per_number + FLOAT_BYTES
        return self._moving_s(num_rows * moved) + (num_reads - 1 + has_filter) * self.gpu.kernel_s

    def draw_s(self, num_rows: float) -> float:
        """Seconds to draw from as many distributions."""
        measured = self.gpu.sampling_curves.get(self._filters)
        if measured is not None:
            return measured.draw_s(num_rows, self.model.vocab_size)
        return self._moving_s(num_rows * FLOAT_BYTES) + self.gpu.kernel_s

    @property
    def _filters(self) -> Filters:
        has_top_p = self.settings.top_p < 1
        if 0 < self.settings.top_k < self.model.vocab_size:
            return "top_k and top_p" if has_top_p else "top_k"
        return "top_p" if has_top_p else "none"

    def _gathering_s(self, num_rows: float, tp_size: int) -> float:
        """Seconds of gathering whole logits on one rank, where the parts are joined."""
        row_bytes = self.model.bytes_per_number * self.model.vocab_size
        return self.gpu.send_s(num_rows * row_bytes * (tp_size - 1) / tp_size) + self._moving_s(
            num_rows * 2 * self.model.bytes_per_number
        )

    def _moving_s(self, bytes_per_id: float) -> float:
        """Seconds of moving so many bytes for every id of the vocabulary, by all of the GPU."""
        return bytes_per_id * self.model.vocab_size / self.gpu.sustained_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A model on ``tp_size`` equal GPUs; all sequences have ``context_tokens`` in the cache, and had prompts
    of ``prompt_tokens`` (None: as many).

    ``counts`` are those of the model's side of a round, a draft's or a target's. ``sampling``: how tokens are
    drawn, by a draft or a target; None counts nothing for it. ``rounds_apart``: inputs of products of 8 bits
    are rounded by operations of their own, with scales that are found; not so in engines whose checkpoint
    has the scales, and whose kernels before the products round. ``reads_peers``: sums over ranks go through
    the peers' memory where that is faster, which some engines lack.
    """

    model: ModelSize
    gpu: Gpu
    tp_size: int = 1
    context_tokens: float
    prompt_tokens: float | None = None
    counts: PassCounts = TARGET_PASS
    sampling: SamplingSettings | None = None
    drafts: bool = False
    rounds_apart: bool = True
    reads_peers: bool = True

    def pass_s(self, num_tokens: float, num_rows: float, num_logits: float | None = None) -> float:
        """Seconds of a pass of ``num_tokens`` spread over ``num_rows`` sequences. ``num_logits``: tokens
        whose logits are wanted; None: of all."""
        sampling_s = self.sampling_s(num_tokens if num_logits is None else num_logits, num_rows)
        return self._shared_s(num_tokens) + self.attention_s(num_tokens, num_rows) + sampling_s

    def prompt_s(self, num_tokens: float) -> float:
        """Seconds of a pass of so many tokens of prompts, none of which is sampled from. On average they
        attend to half of their prompt."""
        prompt_tokens = self.context_tokens if self.prompt_tokens is None else self.prompt_tokens
        flops_s = self._attention_flops_s(prompt_tokens / 2, min(prompt_tokens, num_tokens))
        return self._shared_s(num_tokens) + num_tokens * flops_s

    def _shared_s(self, num_tokens: float) -> float:
        """Seconds of a pass's parts that are the same whichever sequences the tokens are of."""
        message_bytes = num_tokens * self.model.hidden_size * self.model.bytes_per_number
        sum_s = self.gpu.all_reduce_s(message_bytes, self.tp_size, reads_peers=self.reads_peers)
        sums_s = ALL_REDUCES_PER_LAYER * len(self.model.layers) * sum_s
        return self.matrices_s(num_tokens) + self.experts_s(num_tokens) + sums_s + self.overhead_s(num_tokens)

    def matrices_s(self, num_tokens: float) -> float:
        """Seconds of all products but those of experts."""
        model, gpu, tp_size = self.model, self.gpu, self.tp_size
        flops_per_s = gpu.sustained_flops_per_s(model.bytes_per_number)
        rates = gpu.products.get(model.product or "")
        streamed = model.streamed_bytes(tp_size, has_product=rates is not None)
        flops = model.flops_per_token(tp_size)
        narrow_s = 0.0
        if rates is not None:
            narrow_bytes = model.quantized_bytes_on(tp_size)
            narrow_flops = 2 * model.num_quantized_on(tp_size)
            streamed, flops = streamed - narrow_bytes, flops - narrow_flops
            narrow_s = max(
                narrow_bytes / (rates.reads * gpu.sustained_bytes_per_s),
                num_tokens * narrow_flops / (rates.computes * flops_per_s),
            )
        return narrow_s + max(streamed / gpu.sustained_bytes_per_s, num_tokens * flops / flops_per_s)

    def experts_s(self, num_tokens: float) -> float:
        """Seconds of the products of experts, each of which computes whole tiles of tokens."""
        model, gpu = self.model, self.gpu
        flops_per_s = gpu.experts_rate * gpu.sustained_flops_per_s(model.bytes_per_number)
        return max(
            model.expert_bytes(self.tp_size, num_tokens) / gpu.sustained_bytes_per_s,
            model.expert_flops(self.tp_size, num_tokens, EXPERT_TILE_ROWS) / flops_per_s,
        )

    def attention_s(self, num_tokens: float, num_rows: float) -> float:
        """Seconds of attention, and of recurrent layers' states, of tokens spread over sequences."""
        model, gpu, num_queries = self.model, self.gpu, num_tokens / num_rows
        read = model.cache_read_bytes(self.tp_size, self.context_tokens, num_queries) / gpu.cache_rate
        read += 2 * model.states.state_bytes(self.tp_size)
        return max(
            num_rows * read / gpu.sustained_bytes_per_s,
            num_tokens * self._attention_flops_s(self.context_tokens, num_queries),
        )

    def _attention_flops_s(self, context_tokens: float, num_queries: float) -> float:
        """Seconds of the operations of a token of a sequence's ``num_queries``."""
        model, tp_size = self.model, self.tp_size
        flops = model.attention_flops(tp_size, context_tokens, num_queries) / self.gpu.attention_rate
        flops += model.states.flops(tp_size)
        return flops / self.gpu.sustained_flops_per_s(model.bytes_per_number)

    def contexts_s(self, num_tokens: float) -> float:
        """Seconds in which a drafter of blocks makes keys and values of the target's states of so many
        tokens."""
        model, gpu = self.model, self.gpu
        numbers = model.num_read_numbers + sum(layer.num_numbers(1) for layer in model.layers)
        products = numbers * model.hidden_size
        flops_s = 2 * products / gpu.sustained_flops_per_s(model.bytes_per_number)
        read_s = products * model.bytes_per_number / gpu.sustained_bytes_per_s
        num_kernels = (1 + len(model.layers)) * CONTEXT_KERNELS
        return max(read_s, num_tokens * flops_s) + num_kernels * gpu.eager_kernel_s

    def sampling_s(self, num_logits: float, num_rows: float) -> float:
        """Seconds from the logits of so many tokens to what is drawn from them."""
        if self.sampling is None or not num_logits:
            return 0.0
        times = SamplingTimes(gpu=self.gpu, model=self.model, settings=self.sampling)
        if self.drafts:
            return times.draft_s(num_logits)
        return times.target_s(num_logits, min(num_rows, num_logits), self.tp_size)

    def overhead_s(self, num_tokens: float) -> float:
        """Seconds of small kernels, launches and synchronisations."""
        model, gpu, num_layers = self.model, self.gpu, len(self.model.layers)
        numbers = num_layers * self.counts.tensors_per_layer * model.hidden_size
        num_kernels = num_layers * ROUNDING_KERNELS.get(model.product, 0) if self.rounds_apart else 0
        for each in model.experts if self.counts is not NO_COUNTS else ():
            rows = ROUTED_ROWS * model.hidden_size + ROUTED_PRODUCTS * model.expert_width(each, self.tp_size)
            numbers += each.num_layers * each.num_chosen * rows
            num_kernels += each.num_layers * ROUTING_KERNELS
        between_s = (
            num_tokens * numbers * model.bytes_per_number / (CACHED_FACTOR * gpu.sustained_bytes_per_s)
        )
        return between_s + self.counts.seconds(num_layers, gpu) + num_kernels * gpu.kernel_s


def roofline_costs(
    target: Placement, draft: Placement | None, *, num_rows: int, most_tokens: int, most_draft_rows: int
) -> ReplicaCosts:
    """The curves that a replica with ``num_rows`` running sequences would measure.

    Args:
        most_tokens: of a target pass, with prompts.
        most_draft_rows: of a draft step, with branches.
    """
    target_curve = _curve(lambda tokens: target.pass_s(tokens, min(tokens, num_rows)), most_tokens)
    target_prefill = _curve(target.prompt_s, most_tokens)
    round_s = ROUND_S + num_rows * ROW_S
    if draft is None:
        nothing = Curve([1], [0])
        alone = CostModel(target_curve, nothing)
        return ReplicaCosts(alone, nothing, round_s, proposal_s=0.0, target_prefill=target_prefill)
    state_bytes = draft.model.num_read_numbers * target.model.bytes_per_number
    num_block_tokens = draft.model.num_block_tokens
    if num_block_tokens:
        # As the main job measures it: steps only draw, and the one pass over blocks is beside them.
        passes = CostModel(
            target_curve,
            _curve(lambda rows: draft.sampling_s(rows, rows), num_rows),
            synchronous=_curve(lambda rows: draft.pass_s(rows * (1 + num_block_tokens), rows, 0), num_rows),
        )
        draft_prefill = _curve(draft.contexts_s, most_tokens)
    else:
        passes = CostModel(target_curve, _curve(lambda rows: draft.pass_s(rows, rows), most_draft_rows))
        draft_prefill = _curve(draft.prompt_s, most_tokens)
    context = ContextCosts(draft_prefill_ns=float(draft_prefill(PROMPT_TOKENS)) / PROMPT_TOKENS)
    passes = replace(passes, context=context)
    return ReplicaCosts(
        passes=passes,
        draft_prefill=draft_prefill,
        round_s=round_s,
        proposal_s=PROPOSAL_S,
        state_bytes=state_bytes,
        state_s=target.gpu.send_s(state_bytes),
        drafts_blocks=num_block_tokens > 0,
        target_prefill=target_prefill,
    )


def _curve(seconds: Callable[[int], float], largest: int) -> Curve:
    sizes = list(_sizes(largest))
    return Curve(sizes, [round(seconds(size) * NS_PER_S) for size in sizes])


def _sizes(largest: int) -> Iterable[int]:
    """1 .. ``largest``, at growing distances."""
    size = 1
    while size < largest:
        yield size
        size = max(size + 1, int(size * STEP))
    yield largest
