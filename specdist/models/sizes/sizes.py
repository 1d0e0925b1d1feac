"""The size of a model: parameters, weights on each rank, keys and values per token; from its configuration.

The model is built without memory, so that every family is counted as transformers builds it. As in
:mod:`specdist.models.loading.loading`, DeepSpeed shards the linear layers inside the blocks, in equal parts
if 64 times the number of ranks divides their width, and the head is sharded along the vocabulary. Embeddings,
norms and biases after an all-reduce are whole on every rank.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from specdist.config.groups import ExpertParallel
from specdist.models.attention.expansion import can_absorb
from specdist.models.cache.prefix_states import Rollback
from specdist.models.draft_models.kinds import drafter_of
from specdist.models.files.checkpoint import UNSHARDABLE_FAMILIES, Checkpoint, build_model
from specdist.models.quantized.quantized import Quantization, linear_layers, quantization_of
from specdist.models.quantized.quantized_weights import ProductKind
from specdist.models.recurrent.cuts import NORM, ROWWISE
from specdist.models.recurrent.kinds import NO_STATES, StateSizes
from specdist.models.sharding.tp_plan import SUMMED, WHOLE, planned_cuts
from specdist.models.sizes.layer_sizes import Experts, LayerCache, layers_of

# One after attention, one after the feed-forward part.
ALL_REDUCES_PER_LAYER = 2
# How much more the fullest rank has where tokens of a text choose experts less evenly. Assumed.
UNEVEN_TEXT = 1.1


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Counts of numbers, each ``bytes_per_number`` wide.

    Attributes:
        num_parameters: of the model; tied parameters count once.
        num_cut: in matrices that tensor parallelism shards, but for ``experts``, which it shards, too;
            ``num_whole``: in plain tensors that are whole on every rank (norms, some biases, routers);
            ``num_embedding``: in tables of which a pass reads single rows.
        num_head: in the output head, sharded along the vocabulary. A head that is tied to the embedding takes
            memory of its own on several ranks, and none on one.
        num_of_keys: of those that are cut, what makes keys and values: several ranks may hold the same.
        widest_product: largest output width of a sharded matrix other than the head.
        keeps_scores: attention caps its scores or has sinks, which only kernels do without all scores.
        is_shardable: whether DeepSpeed can shard the family.
        num_whole_products: of the matrices among those that are whole on every rank.
        num_state_numbers: of the state that a drafter keeps of a token beside its keys and values;
            num_read_numbers: of those of the target that it reads of each token; ``num_block_tokens``: that
            it drafts in one pass, if it drafts blocks. ``shares_vocabulary``: see
            :class:`specdist.models.draft_models.declaration.Drafter`.
        num_quantized: numbers of those that are cut in quantised layers, which take ``quantized_bytes`` with
            their scales; ``num_whole_quantized``, ``whole_quantized_bytes``: of those that are whole.
            ``product``: the kind of kernel that multiplies most of them, None where they are dequantised.
        has_float8_cache: keys and values are kept in 8 bits (:mod:`specdist.models.cache.key_value`).
        has_whole_experts: on several ranks, each on one (expert parallelism), instead of a part on each.
        quantized_by: the option, with its value, that has linear layers quantised while it is loaded.
    """

    name: str
    bytes_per_number: int
    num_parameters: int
    num_cut: int
    num_whole: int
    num_embedding: int
    num_head: int
    is_tied: bool
    hidden_size: int
    num_query_heads: int
    vocab_size: int
    widest_product: int
    keeps_scores: bool
    is_shardable: bool
    layers: tuple[LayerCache, ...]
    max_positions: int
    num_whole_products: int = 0
    num_of_keys: int = 0
    num_state_numbers: int = 0
    num_read_numbers: int = 0
    num_block_tokens: int = 0
    shares_vocabulary: bool = False
    num_quantized: int = 0
    quantized_bytes: int = 0
    num_whole_quantized: int = 0
    whole_quantized_bytes: int = 0
    product: ProductKind | None = None
    experts: tuple[Experts, ...] = ()
    states: StateSizes = NO_STATES
    has_float8_cache: bool = False
    has_whole_experts: bool = False
    quantized_by: str | None = None

    @property
    def num_expert_numbers(self) -> int:
        return sum(each.num_all_numbers for each in self.experts)

    @property
    def num_active(self) -> int:
        """Parameters that a token's forward computes with: those of its own experts alone, and none of the
        embedding's table unless it is the head."""
        own = sum(each.num_own_numbers for each in self.experts)
        table = 0 if self.is_tied else self.num_embedding
        return self.num_parameters - self.num_expert_numbers + own - table

    def weight_bytes(self, tp_size: int) -> int:
        """Bytes of weights on one rank, that with the most experts: of all of them, whichever are chosen."""
        head = 0 if self.is_tied and tp_size == 1 else -(-self.num_head // tp_size)
        kv_heads = min(
            (layer.num_heads for layer in self.layers if layer.num_heads and not layer.is_latent),
            default=tp_size,
        )
        cut = (self.num_cut - self.num_quantized - self.num_of_keys) // tp_size
        plain = cut + self.num_of_keys // min(kv_heads, tp_size) + self.num_whole + self.num_embedding + head
        experts = sum(
            each.num_layers
            * (-(-each.num_experts // tp_size) if self.has_whole_experts else each.num_experts)
            * each.rank_bytes(self._parts_of_experts(tp_size), self.bytes_per_number)
            for each in self.experts
        )
        quantized = self.quantized_bytes_on(tp_size)
        return plain * self.bytes_per_number + quantized + int(experts)

    def shared_bytes(self, tp_size: int) -> int:
        """Bytes of a drafter's weights on one rank that a target, cut into so many parts, has there."""
        if not self.shares_vocabulary or (self.is_tied and tp_size > 1):
            return 0
        head = 0 if self.is_tied or tp_size > 1 else self.num_head
        return (self.num_embedding + head) * self.bytes_per_number

    def num_quantized_on(self, tp_size: int) -> float:
        """Quantised numbers on one rank."""
        return self.num_quantized / tp_size + self.num_whole_quantized

    def quantized_bytes_on(self, tp_size: int) -> int:
        """Bytes of these, with their scales."""
        return self.quantized_bytes // tp_size + self.whole_quantized_bytes

    def _parts_of_experts(self, tp_size: int) -> int:
        """The number of parts that each expert is cut into."""
        return 1 if self.has_whole_experts else tp_size

    def expert_bytes(self, tp_size: int, num_tokens: float) -> float:
        """Bytes of experts that a pass of so many tokens reads on the rank that reads the most: each distinct
        one once."""
        return sum(
            each.num_layers
            * each.num_read(num_tokens, tp_size, is_whole=self.has_whole_experts)
            * each.rank_bytes(self._parts_of_experts(tp_size), self.bytes_per_number)
            for each in self.experts
        )

    def expert_flops(self, tp_size: int, num_tokens: float, tile_rows: int = 1) -> float:
        """Operations of a pass in experts, in tiles of so many tokens, on the rank that computes the most."""
        computed = sum(
            each.num_layers
            * each.num_pairs(num_tokens, tp_size, tile_rows, is_whole=self.has_whole_experts)
            * each.num_numbers
            for each in self.experts
        )
        return 2 * computed

    def expert_width(self, experts: Experts, tp_size: int) -> int:
        """The width of what a rank computes within one of its experts. Room is there for the pairs of all
        ranks."""
        return experts.width // self._parts_of_experts(tp_size)

    def why_no_whole_experts(self, tp_size: int) -> str | None:
        """Why its experts cannot be given to so many ranks whole; None if they can."""
        if not self.experts or not all(each.is_known for each in self.experts):
            return "it has no experts that can be given to ranks"
        fewest = min(each.num_experts for each in self.experts)
        return None if fewest >= tp_size else f"its {fewest} experts are fewer than the {tp_size} ranks"

    def with_experts_for(
        self, tp_size: int, num_tokens: float, how: ExpertParallel = "auto"
    ) -> ModelSize | None:
        """The model with its experts as so many ranks share them; None where they cannot. ``auto``: whole
        where the ranks do not divide their width, or where, in passes of so many tokens, the tiles that a
        part of it leaves empty cost more than what the fullest rank has above the others, in experts to read
        and in pairs to compute."""
        if tp_size == 1 or not self.experts:
            return self
        parts, whole = (dataclasses.replace(self, has_whole_experts=is_whole) for is_whole in (False, True))
        can_be_cut = not any(each.width % tp_size for each in self.experts)
        can_be_whole = self.why_no_whole_experts(tp_size) is None
        if how == "never" or not can_be_whole:
            return parts if can_be_cut and how != "always" else None

        def cost(size: ModelSize) -> float:
            flops = size.expert_flops(tp_size, num_tokens) / self.expert_flops(1, num_tokens)
            return max(flops, size.expert_bytes(tp_size, num_tokens) / self.expert_bytes(1, num_tokens))

        is_cheaper = how == "always" or not can_be_cut or UNEVEN_TEXT * cost(whole) < cost(parts)
        return whole if is_cheaper else parts

    def streamed_bytes(self, tp_size: int, *, has_product: bool = True) -> int:
        """Bytes of weights that a pass of any size reads on one rank, but for experts. Without a ``product``
        on the device a quantised layer is dequantised in memory, and read again."""
        cut = (self.num_cut - self.num_quantized + self.num_head) // tp_size
        quantized = self.quantized_bytes_on(tp_size)
        if not has_product:
            quantized += int(2 * self.num_quantized_on(tp_size) * self.bytes_per_number)
        return (cut + self.num_whole) * self.bytes_per_number + quantized

    def flops_per_token(self, tp_size: int) -> float:
        """Operations per token on one rank without attention and experts: a multiplication and an addition
        per weight."""
        return 2 * ((self.num_cut + self.num_head) / tp_size + self.num_whole_products)

    def attention_flops(self, tp_size: int, context_tokens: float, num_queries: float = 1) -> float:
        """Operations of a token's attention on one rank, one of ``num_queries`` of its sequence: scores, and
        the sum of values."""
        products = sum(layer.attended(context_tokens, num_queries)[0] for layer in self.layers)
        return 2 * self.num_query_heads / tp_size * products

    def cache_bytes_per_token(self, tp_size: int) -> int:
        """Bytes of keys and values, and of states, per token on one rank."""
        of_layers = sum(self._cached_bytes(layer, tp_size) for layer in self.layers)
        return of_layers + self.num_state_numbers * self.bytes_per_number

    def windowed_bytes_per_token(self, tp_size: int, window: int) -> int:
        """The part of these bytes that layers take with a window of at most so many tokens."""
        layers = [layer for layer in self.layers if layer.window is not None and layer.window <= window]
        return sum(self._cached_bytes(layer, tp_size) for layer in layers)

    def state_bytes(self, tp_size: int, rollback: Rollback) -> int:
        """Bytes of recurrent layers' states on one rank, of a sequence of any length."""
        return self.states.slot_bytes(tp_size, rollback, self.bytes_per_number)

    def cache_read_bytes(self, tp_size: int, context_tokens: float, num_queries: float = 1) -> float:
        """Bytes of keys and values that the attention of a sequence's tokens reads on one rank, and of those
        that it makes of latents."""
        read = sum(
            self._cached_bytes(layer, tp_size) * layer.tokens_read(context_tokens) for layer in self.layers
        )
        expanded = sum(layer.attended(context_tokens, num_queries)[1] for layer in self.layers)
        return read + expanded * self.num_query_heads / tp_size

    def _cached_bytes(self, layer: LayerCache, tp_size: int) -> int:
        return layer.cached_bytes(tp_size, self.bytes_per_number, self.has_float8_cache)

    def tp_sizes(self, most: int) -> list[int]:
        """Numbers of ranks up to ``most`` that can shard it; several may share a key/value head."""
        kv_heads = {layer.num_heads for layer in self.layers if layer.num_heads and not layer.is_latent}
        most = most if self.is_shardable else min(most, 1)
        counts = {self.num_query_heads, *self.states.num_pieces}
        sizes = [size for size in range(1, most + 1) if not any(count % size for count in counts)]
        return [size for size in sizes if all(max(size, n) % min(size, n) == 0 for n in kv_heads)]


@functools.lru_cache(maxsize=8)
def size_of(checkpoint: Checkpoint, bytes_per_number: int) -> ModelSize:
    """The size of the model that a checkpoint becomes; counted once."""
    size = model_size(
        checkpoint.name,
        checkpoint.config,
        bytes_per_number,
        trusts_code=checkpoint.trusts_code,
        quantization=quantization_of(checkpoint),
    )
    asked = checkpoint.quantization and f"{checkpoint.option}_quantization {checkpoint.quantization}"
    return replace(size, has_float8_cache=checkpoint.has_float8_cache, quantized_by=asked)


def model_size(
    name: str,
    config: PretrainedConfig,
    bytes_per_number: int,
    *,
    trusts_code: bool = False,
    quantization: Quantization | None = None,
) -> ModelSize:
    """Count a model from its configuration. ``trusts_code``: custom code in its folder may be run to build
    it."""
    drafter = drafter_of(config)
    with torch.device("meta"):
        model = build_model(copy.deepcopy(config), trusts_code=trusts_code)
    text = config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    num_head = sum(weight.numel() for weight in head.parameters()) if head is not None else 0
    num_parameters = sum({id(weight): weight.numel() for weight in model.parameters()}.values())
    num_cut = num_embedding = num_whole_products = num_of_keys = 0
    cuts = planned_cuts(model)
    styles = {name: cut.style for name, cut in cuts.items() if cut.style not in WHOLE}
    experts = _experts(model, text.hidden_size, quantization)
    num_expert_numbers = sum(each.num_all_numbers for each in experts)
    widest = 0
    for module_name, module in model.named_modules():
        if module is head:
            continue
        if isinstance(module, nn.Embedding):
            num_embedding += module.weight.numel()
        elif isinstance(module, (nn.Linear, Conv1D)):
            widest = max(widest, module.nf if isinstance(module, Conv1D) else module.out_features)
            if cuts and module_name not in styles:
                num_whole_products += module.weight.numel()
                continue
            num_cut += module.weight.numel()
            num_of_keys += cuts[module_name].num_of_keys(module.weight.numel()) if cuts else 0
            is_summed = styles[module_name] == ROWWISE if cuts else module_name.endswith(SUMMED)
            if module.bias is not None and not is_summed:
                num_cut += module.bias.numel()
        elif styles.get(module_name) == NORM:
            num_cut += sum(weight.numel() for weight in module.parameters())
    whole = {name for name in linear_layers(model) if cuts and name not in styles}
    numbers, num_bytes = _quantized(model, quantization, linear_layers(model).keys() - whole)
    whole_numbers, whole_bytes = _quantized(model, quantization, whole)
    num_elsewhere = num_cut + num_embedding + num_head * (not is_tied) + num_expert_numbers
    return ModelSize(
        name=name,
        bytes_per_number=bytes_per_number,
        num_parameters=num_parameters,
        num_cut=num_cut,
        num_whole=num_parameters - num_elsewhere - sum(whole_numbers.values()),
        num_embedding=num_embedding,
        num_head=num_head,
        is_tied=is_tied,
        hidden_size=text.hidden_size,
        num_query_heads=getattr(text, "num_attention_heads", 0),
        vocab_size=text.vocab_size,
        widest_product=widest,
        keeps_scores=bool(getattr(text, "attn_logit_softcapping", None))
        or any(name.endswith(".sinks") for name, _ in model.named_parameters()),
        is_shardable=text.model_type not in UNSHARDABLE_FAMILIES,
        layers=layers_of(text, model, bytes_per_number),
        # A drafter's positions need no table: its configuration's number is that of its training.
        max_positions=getattr(None if drafter else text, "max_position_embeddings", sys.maxsize),
        num_whole_products=num_whole_products,
        num_of_keys=num_of_keys,
        num_state_numbers=drafter.num_kept_numbers(config) if drafter else 0,
        num_read_numbers=drafter.num_read_numbers(config) if drafter else 0,
        num_block_tokens=(drafter.max_draft_tokens(config) or 0) if drafter and drafter.drafts_blocks else 0,
        shares_vocabulary=drafter is not None and drafter.shares_vocabulary,
        num_quantized=sum(numbers.values()),
        quantized_bytes=num_bytes,
        num_whole_quantized=sum(whole_numbers.values()),
        whole_quantized_bytes=whole_bytes,
        product=max(numbers, key=numbers.__getitem__, default=None),
        experts=experts,
        states=StateSizes.of(model),
    )


def _experts(model: nn.Module, hidden_size: int, quantization: Quantization | None) -> tuple[Experts, ...]:
    """Experts as transformers has them: a layer's are joined, in parameters whose first dimension is theirs;
    how many a token chooses is said by their router, beside them. Equal layers are counted together."""
    found: Counter[Experts] = Counter()
    for name, module in model.named_modules():
        num_experts = getattr(module, "num_experts", None)
        own = [weight for weight in module.parameters(recurse=False) if weight.shape[:1] == (num_experts,)]
        matrices = [weight.numel() for weight in own if weight.dim() == 3]
        if not isinstance(num_experts, int) or not matrices:
            continue
        beside = model.get_submodule(name.rpartition(".")[0]).modules()
        chosen = [top_k for each in beside if isinstance(top_k := getattr(each, "top_k", None), int)]
        num_numbers = sum(weight.numel() for weight in own) // num_experts
        width = min(matrices) // (num_experts * hidden_size)
        form = None if quantization is None else quantization.format_of_experts(name)
        shapes = ((max(matrices) // (num_experts * hidden_size), hidden_size), (hidden_size, width))
        count = (num_experts, min([num_experts, *chosen]), num_numbers, width)
        is_known = hasattr(module, "is_transposed")  # by transformers' ExpertsInterface
        found[Experts(1, *count, form, () if form is None else shapes, is_known)] += 1
    return tuple(replace(each, num_layers=num_layers) for each, num_layers in found.items())


def _quantized(
    model: nn.Module, quantization: Quantization | None, names: Collection[str]
) -> tuple[Counter[ProductKind | None], int]:
    """Numbers in the quantised ones of these layers by the kind of their product, and bytes of all."""
    numbers: Counter[ProductKind | None] = Counter()
    num_bytes = 0
    absorbed = {f"{name}.kv_b_proj" for name, module in model.named_modules() if can_absorb(module)}
    for name, layer in linear_layers(model).items() if quantization is not None else ():
        assert quantization is not None
        if name not in names or name in absorbed:  # these are dequantised when they are loaded
            continue
        form = quantization.format_of(name, layer.in_features)
        if form is not None:
            numbers[form.product] += layer.weight.numel()
            num_bytes += form.num_bytes(layer.out_features, layer.in_features)
    return numbers, num_bytes
