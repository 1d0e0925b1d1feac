"""GPU memory that a rank needs besides weights and cache, computed from a model's size and the run's limits.

The job reserves this memory before it sizes the cache; the planner uses the same formula. The terms for
tensors are upper bounds of the memory that a pass holds at a time, and tests compare them with passes. The
constants for the libraries' memory below were not measured, but for that of graphs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from specdist.models.attention.expanding import MAX_EXPANDED_BYTES
from specdist.models.attention.kernel import MAX_SPLIT_BYTES
from specdist.models.cache.prefix_states import NO_ROLLBACK, Rollback
from specdist.models.passes.graphs import MAX_GRAPHS
from specdist.models.passes.static import MAX_TOKENS, bucket_of_tokens
from specdist.models.passes.static_runs import MAX_RUN_GRAPHS, RECORDED_LENGTHS
from specdist.models.sizes.sizes import ModelSize
from specdist.utils.host import GIB, MIB

FLOAT_BYTES = 4
# Bytes per logit while distributions are computed by plain operations (kernels need less): float32 scores and
# probabilities, and a draw's float64 sums. Top-p sorts: scores, their order (int64) and its softmax. The
# noise of gumbel is float64.
DECISION_BYTES = {"greedy": 12, "rejection": 12, "gumbel": 32}
TOP_P_BYTES = 24
# Bytes per entry where a next token is sampled: target's and draft's distribution, residual, float64 sums.
RESIDUAL_BYTES = 32
# cuBLAS takes 32 MiB for each of the two streams (passes and captures) on recent GPUs, and cuBLASLt as much;
# the rest is for reductions and attention.
WORKSPACE_BYTES = 192 * MIB
# A few dozen channels of a communicator with some MiB each, which NCCL allocates at their first use.
COMMUNICATOR_BYTES = 512 * MIB
# What CUDA takes for each kernel of a recorded pass, beside the tensors: "around 10KB" (NVIDIA/cccl, pull
# request 3768); 64 KB have been seen with CUDA 11.2, and 3.4 KB on an H200 with CUDA 13.0. The job itself
# measures while it records, see :class:`specdist.models.passes.graphs.GraphMemory`.
GRAPH_NODE_BYTES = 10 * 1024
# Number of kernels in a Llama layer, and outside of layers.
KERNELS_PER_LAYER, OTHER_KERNELS = 16, 25
# The kernels of a recorded draw: most of them are the noise of gumbel, and features.
DRAW_KERNELS = 90
STATE_COPIES = 3
# What a token's experts hold, each with its own rows: the gate of gpt-oss holds seven products of the inner
# width at a time, others four; beside them are numbers of experts and places after sorting. Of the router,
# scores.
GATE_PRODUCTS, ORDER_BYTES, SCORE_BYTES = 7, 64, 16
# The share of the whole GPU: memory that the allocator cannot use because of fragmentation.
FRAGMENTED_FRACTION = 0.03
# Terms of a :class:`Reserve` that two models on one device need at the same time.
LASTING = ("kept_scores", "graphs", "graph_nodes")

Decisions = Literal["greedy", "rejection", "gumbel"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are sampled, which decides the memory per logit."""

    next_distributions: Decisions = "rejection"
    has_top_p: bool = False
    # The logits of all tokens of prompts are wanted, of every pass.
    scores_prompts: bool = False

    @property
    def bytes_per_logit(self) -> int:
        if self.has_top_p and self.next_distributions != "greedy":
            return max(TOP_P_BYTES, DECISION_BYTES[self.next_distributions])
        return DECISION_BYTES[self.next_distributions]


@dataclass(frozen=True, kw_only=True)
class PassLimits:
    """The largest pass of one model on one rank.

    Attributes:
        num_tokens: of a pass.
        num_logits: tokens whose logits are wanted.
        num_seqs: sequences that take part, and with a draft their branches.
        max_seq_len: tokens of the longest sequence.
        num_kept: vectors of float32 scores over the vocabulary that are kept between passes.
        num_drawn: sequences whose recovered or bonus token is sampled here.
        decides: this rank gets logits of the whole vocabulary, others only of their part.
        num_run_steps: of the longest recorded run, of a draft.
        has_kernel: attention reads pages where they lie, without a mask.
        num_state_numbers: that the target's pass leaves of every token for a drafter.
        rollback: of recurrent layers; num_prefix_states: more of their states than sequences.
    """

    num_tokens: int
    num_logits: int
    num_seqs: int
    max_seq_len: int
    num_kept: int = 0
    num_drawn: int = 0
    decides: bool = True
    num_run_steps: int = 0
    has_kernel: bool = True
    num_state_numbers: int = 0
    rollback: Rollback = NO_ROLLBACK
    num_prefix_states: int = 0


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """Bytes, by what needs them.

    Attributes:
        activations: hidden states and the widest products of a layer, in the largest pass.
        attention: what is joined of long sequences; without a kernel masks and scores, and the copies of
            pages of :func:`page_overhead`.
        logits: logits, and the distributions computed from them.
        kept_scores: the distributions of drafted tokens until they are verified, and the target's
            distributions for next tokens.
        graphs: memory of the largest recorded pass, and buffers for results.
        graph_nodes: what CUDA keeps of every recorded kernel, outside of torch's allocator.
        libraries: workspaces of cuBLAS and others.
        nccl: buffers of communicators that are not connected yet.
        margin: lost by fragmentation.
    """

    activations: int = 0
    attention: int = 0
    logits: int = 0
    kept_scores: int = 0
    graphs: int = 0
    graph_nodes: int = 0
    libraries: int = 0
    nccl: int = 0
    margin: int = 0

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    def beside(self, other: Reserve) -> Reserve:
        """The sum for two models on one device that take turns: only lasting memory is added."""
        both = {name: (value, getattr(other, name)) for name, value in vars(self).items()}
        return Reserve(**{name: sum(each) if name in LASTING else max(each) for name, each in both.items()})

    def __str__(self) -> str:
        """The terms as text, without those that are zero."""
        names = {
            "kept_scores": "kept scores",
            "graphs": "CUDA graphs",
            "graph_nodes": "their kernels",
            "nccl": "NCCL",
        }
        terms = ((names.get(name, name), value) for name, value in dataclasses.asdict(self).items())
        return ", ".join(f"{name} {gib(value)}" for name, value in terms if value)


def gib(num_bytes: int) -> str:
    """Bytes as GiB with two decimals."""
    return f"{num_bytes / GIB:.2f}"


def reserve(
    model: ModelSize,
    limits: PassLimits,
    sampling: Sampling,
    *,
    device_bytes: int,
    tp_size: int = 1,
    num_communicators: int = 0,
) -> Reserve:
    """The reserve of one model on one GPU of ``device_bytes``. ``num_communicators``: of NCCL, on this
    rank, which are not connected yet."""
    # States as they leave the layers, side by side, and those of committed tokens.
    states = STATE_COPIES * limits.num_tokens * limits.num_state_numbers * model.bytes_per_number
    return Reserve(
        activations=activation_bytes(model, limits.num_tokens, tp_size)
        + model.states.pass_bytes(tp_size, limits.num_seqs, limits.num_tokens, model.bytes_per_number)
        + states,
        attention=expanded_bytes(model, limits)
        + (MAX_SPLIT_BYTES if limits.has_kernel else mask_bytes(model, limits, tp_size)),
        logits=logit_bytes(model, limits, sampling, tp_size),
        kept_scores=limits.num_kept * model.vocab_size * FLOAT_BYTES,
        graphs=_graph_bytes(model, limits, sampling, tp_size),
        graph_nodes=num_graph_nodes(model, limits) * GRAPH_NODE_BYTES,
        libraries=WORKSPACE_BYTES,
        nccl=num_communicators * COMMUNICATOR_BYTES,
        margin=int(FRAGMENTED_FRACTION * device_bytes),
    )


def activation_bytes(model: ModelSize, num_tokens: int, tp_size: int) -> int:
    """The most that a layer holds at a time: the residual and its norm, and either the norm's float32 copies,
    or the widest products (gate, its activation, the other half and their product), or queries, keys and
    values with their rotated copies, or what every chosen expert takes in, computes and gives back."""
    number, hidden = model.bytes_per_number, model.hidden_size
    widest_kv = max((layer.num_heads * layer.width for layer in model.layers), default=0)
    query = max((model.num_query_heads * layer.width for layer in model.layers), default=0)
    beside = max(
        3 * FLOAT_BYTES * hidden,
        4 * number * model.widest_product // tp_size,
        number * (6 * query + 6 * widest_kv) // tp_size,
        *(
            2 * number * hidden
            + each.num_chosen * (ORDER_BYTES + number * max(hidden + GATE_PRODUCTS * width, 4 * hidden))
            + each.num_experts * SCORE_BYTES
            for each in model.experts
            for width in [model.expert_width(each, tp_size)]
        ),
    )
    if model.num_quantized:
        # An input of a product in float32, twice, and its rounded numbers; the sums of the product.
        width = max(hidden, model.widest_product // tp_size)
        beside += (3 * FLOAT_BYTES + 1) * width
    return num_tokens * (2 * number * hidden + beside)


def logit_bytes(model: ModelSize, limits: PassLimits, sampling: Sampling, tp_size: int) -> int:
    """Logits, their copy in a recorded pass, and the distributions: on a sharded target of the rank's part of
    the vocabulary, and for top-p of the whole vocabulary on rank 0."""
    number = model.bytes_per_number
    width = -(-model.vocab_size // tp_size)
    own = limits.num_logits * width * (2 * number + sampling.bytes_per_logit)
    own = max(own, limits.num_drawn * model.vocab_size * RESIDUAL_BYTES)
    if tp_size == 1 or not limits.decides:
        return own
    # Parts of other ranks are gathered and joined: for top-p of all logits, else of one token per sequence.
    num_whole = limits.num_logits if sampling.has_top_p else min(limits.num_logits, limits.num_seqs)
    whole = num_whole * model.vocab_size * (3 * number + sampling.bytes_per_logit)
    return max(own, limits.num_logits * width * 2 * number + whole)


def page_overhead(model: ModelSize, tp_size: int) -> int:
    """Bytes per token of the cache that a pass without a kernel may copy: the pages of one layer. Sequences
    that share pages may copy them several times; if memory runs out, the batch is halved."""
    return max((layer.num_numbers(tp_size) for layer in model.layers), default=0) * model.bytes_per_number


def mask_bytes(model: ModelSize, limits: PassLimits, tp_size: int) -> int:
    """A number per query head of a group, query and key, and a flag per query and key; with a soft cap or
    sinks, which are computed in plain operations, also two copies of all heads' scores, and their softmax in
    float32."""
    has_latents = any(layer.is_latent for layer in model.layers)
    num_kv_heads = max((layer.num_heads for layer in model.layers), default=1)
    repeats = model.num_query_heads // (tp_size if has_latents else max(tp_size, num_kv_heads))
    number = model.bytes_per_number
    per_pair = repeats * number + number + 1
    if model.keeps_scores:
        per_pair += model.num_query_heads // tp_size * (2 * number + FLOAT_BYTES)
    return limits.num_tokens * limits.max_seq_len * per_pair


def expanded_bytes(model: ModelSize, limits: PassLimits) -> int:
    """Keys and values that a long chunk of a prompt makes of latents: of one head, or of more within a
    bound."""
    found = [layer.expansion for layer in model.layers if layer.expansion is not None]
    expanding = [each for each in found if each.fewest_queries < limits.num_tokens]
    if not expanding:
        return 0
    return max(MAX_EXPANDED_BYTES, limits.max_seq_len * max(each.held_bytes for each in expanding))


def _graph_bytes(model: ModelSize, limits: PassLimits, sampling: Sampling, tp_size: int) -> int:
    """Recorded passes and runs share a pool, as large as the largest of them needs, and buffers for results
    outside of it: a run's scores, if they are kept, in one for all and in those that were too small for
    others."""
    num_tokens = min(MAX_TOKENS, bucket_of_tokens(limits.num_tokens))
    num_logits = min(num_tokens, bucket_of_tokens(max(1, limits.num_logits)))
    logits = 2 * num_logits * -(-model.vocab_size // tp_size) * model.bytes_per_number
    score_bytes = FLOAT_BYTES * (2 if sampling.next_distributions == "gumbel" else 1)
    num_scores = 2 * limits.num_run_steps * num_logits if limits.num_kept else 0
    run_scores = num_scores * model.vocab_size * score_bytes
    return activation_bytes(model, num_tokens, tp_size) + logits + run_scores + MAX_SPLIT_BYTES


def num_graph_nodes(model: ModelSize, limits: PassLimits) -> int:
    """Kernels of as many recorded passes and runs as there may be, and of runs as many of each length."""
    of_pass = KERNELS_PER_LAYER * len(model.layers) + OTHER_KERNELS
    steps_per_run = sum(RECORDED_LENGTHS) / len(RECORDED_LENGTHS) if limits.num_run_steps else 0
    return int(MAX_GRAPHS * of_pass + MAX_RUN_GRAPHS * steps_per_run * (of_pass + DRAW_KERNELS))
