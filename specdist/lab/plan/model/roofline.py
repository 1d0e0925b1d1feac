"""Predicted pass times, from sizes and peaks: the roofline model (Williams, Waterman, Patterson 2009).

Matrices and attention run one after the other, each for the longer of reading and arithmetic; then come the
all-reduces, two per layer, and what the roofline does not know: the small kernels between them, launches and
synchronisations, as many as are counted in the engine (counted.py), and sampling (sampling.py). The context
length enters through reading the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specdist.data.stats.regression import NS_PER_S
from specdist.lab.plan.model.counted import CACHED_FACTOR, TARGET_PASS, PassCounts
from specdist.lab.plan.model.hardware import Gpu
from specdist.lab.plan.model.simulate import ReplicaCosts
from specdist.lab.plan.sampling import SamplingTimes
from specdist.models.files.sizes import ALL_REDUCES_PER_LAYER, ModelSize
from specdist.models.quantized.quantized_weights import SCALE_BYTES
from specdist.policies.costs import CostModel, Curve
from specdist.sampling.distributions import SamplingSettings

# Assumed for the host between two target passes: scheduling, committing, stop conditions.
ROUND_S = 0.5e-3
# Assumed for the messages to the draft's rank and back; in one process it is less.
PROPOSAL_S = 0.2e-3
# Plain operations of a layer's seven products: six that find scales and round inputs, and of integers one
# more and three that scale the sums.
ROUNDING_KERNELS: dict[str | None, int] = {"float8": 7 * 6, "int8": 7 * 10}
# Ratio of neighbouring sizes of a curve, which is linear between them.
STEP = 1.25


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A model on ``tp_size`` equal GPUs; all sequences have ``context_tokens`` in the cache.

    ``counts`` are those of the model's side of a round, a draft's or a target's. ``sampling``: how tokens are
    drawn, by a draft or a target; None counts nothing for it.
    """

    model: ModelSize
    gpu: Gpu
    tp_size: int = 1
    context_tokens: float
    counts: PassCounts = TARGET_PASS
    sampling: SamplingSettings | None = None
    drafts: bool = False

    def pass_s(self, num_tokens: float, num_rows: float, num_logits: float | None = None) -> float:
        """Seconds of a pass of ``num_tokens`` spread over ``num_rows`` sequences. ``num_logits``: tokens
        whose logits are wanted; None: of all."""
        model, gpu, tp_size = self.model, self.gpu, self.tp_size
        flops_per_s = gpu.sustained_flops_per_s(model.bytes_per_number)
        narrow_flops = 2 * model.num_quantized / tp_size
        narrow_per_s = gpu.narrow_flops_per_s(model.product, model.bytes_per_number)
        flops_s = (model.flops_per_token(tp_size) - narrow_flops) / flops_per_s + narrow_flops / narrow_per_s
        streamed = model.streamed_bytes(tp_size, has_product=gpu.has_product(model.product))
        matrices_s = max(streamed / gpu.sustained_bytes_per_s, num_tokens * flops_s)
        attention_s = max(
            num_rows * model.cache_read_bytes(tp_size, self.context_tokens) / gpu.sustained_bytes_per_s,
            num_tokens * model.attention_flops(tp_size, self.context_tokens) / flops_per_s,
        )
        message_bytes = num_tokens * model.hidden_size * model.bytes_per_number
        sums_s = ALL_REDUCES_PER_LAYER * len(model.layers) * gpu.all_reduce_s(message_bytes, tp_size)
        if model.product in ROUNDING_KERNELS:
            # The largest input of a token over all ranks, before each of these sums.
            scales_s = gpu.all_reduce_s(num_tokens * SCALE_BYTES, tp_size)
            sums_s += ALL_REDUCES_PER_LAYER * len(model.layers) * scales_s
        sampling_s = self.sampling_s(num_tokens if num_logits is None else num_logits, num_rows)
        return matrices_s + attention_s + sums_s + self.overhead_s(num_tokens) + sampling_s

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
        tensor_bytes = num_tokens * model.hidden_size * model.bytes_per_number
        between_s = (
            num_layers
            * self.counts.tensors_per_layer
            * tensor_bytes
            / (CACHED_FACTOR * gpu.sustained_bytes_per_s)
        )
        rounding_s = num_layers * ROUNDING_KERNELS.get(model.product, 0) * gpu.kernel_s
        return between_s + self.counts.seconds(num_layers, gpu) + rounding_s


def roofline_costs(
    target: Placement, draft: Placement | None, *, num_rows: int, most_tokens: int, most_draft_rows: int
) -> ReplicaCosts:
    """The curves that a replica with ``num_rows`` running sequences would measure.

    Args:
        most_tokens: of a target pass, with prompts.
        most_draft_rows: of a draft step, with branches.
    """
    target_curve = _curve(lambda tokens: target.pass_s(tokens, min(tokens, num_rows)), most_tokens)
    target_prefill = _curve(lambda tokens: target.pass_s(tokens, min(tokens, num_rows), 0), most_tokens)
    if draft is None:
        nothing = Curve([1], [0])
        return ReplicaCosts(
            CostModel(target_curve, nothing),
            nothing,
            round_s=ROUND_S,
            proposal_s=0.0,
            target_prefill=target_prefill,
        )
    state_bytes = draft.model.num_read_numbers * target.model.bytes_per_number
    return ReplicaCosts(
        passes=CostModel(target_curve, _curve(lambda rows: draft.pass_s(rows, rows), most_draft_rows)),
        draft_prefill=_curve(lambda tokens: draft.pass_s(tokens, 1, 0), most_tokens),
        round_s=ROUND_S,
        proposal_s=PROPOSAL_S,
        state_bytes=state_bytes,
        state_s=target.gpu.send_s(state_bytes),
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
