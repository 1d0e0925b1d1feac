"""Products of few tokens, by the project's kernel (:mod:`specdist.kernels.products`) where it is right and
faster than torch's: cuBLAS's, or those of quantised numbers.

Such a product takes the time of reading its matrix, and how near a way comes to that depends on shape, format
and number of tokens. So both are tried on a model's own matrices when it is loaded, for every kind of them:
first whether the kernel's numbers are right, then, in turns, the times; the slowest rank decides. All ranks
choose alike, and a run that goes on keeps its choice. torch.cuda.tunable is not a third way: on CUDA it knows
cuBLAS's default alone (its manual, torch 2.13).

T tokens, N outputs, K inputs.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from specdist.models.passes import all_reduce
from specdist.models.passes.fused_modules import (
    MORE_NORMS,
    PLAIN,
    FusedDecoderLayer,
    FusedMlp,
    FusedProjection,
    JoinedProjections,
    layer_kernels,
)
from specdist.models.quantized.input_rounding import RoundedInput
from specdist.models.quantized.quantized_linear import MAX_DEQUANTIZED, QuantizedLinear
from specdist.utils.trial import check_difference, said_of, tolerance_of, why_not

TORCH, KERNEL = "torch", "split inputs"
# The choice, as an attribute of a model and in a manifest.
PRODUCTS = "products_of_few_tokens"
# Numbers of tokens that are tried; others go the way of the next larger one, and more torch's.
NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64)
# The norms after a product are one program's, which is slower for more tokens than a kernel.
NUM_NORMED = NUM_TOKENS[:4]
# The kernel has to be faster by so much, at its best of some turns: less might be noise.
LEAST_GAIN, NUM_TURNS = 1.05, 2
# Products of smaller matrices are launches.
MIN_WEIGHTS = 2**18

# By kind of matrix: the ways of products of up to so many tokens, ascending.
Choice = Mapping[str, Sequence[tuple[int, str]]]
# Seconds of what a function gives the device.
Measure = Callable[[Callable[[], object]], float]

logger = logging.getLogger(__name__)


class Product:
    """The product of a plain layer, or of joined ones. Called with inputs [.., K] and what torch's product
    takes beside them, it goes the way that was chosen."""

    num_tokens: Sequence[int] = ()  # that are tried, if not ``NUM_TOKENS``

    def __init__(self, layer: Any, weight_NK: Tensor, own: Callable[..., Tensor] = F.linear) -> None:
        self.layer, self.own, self.num_inputs = layer, own, weight_NK.shape[1]
        self.choice: Sequence[tuple[int, str]] = ()
        self.kind = f"{len(weight_NK)} × {weight_NK.shape[1]}"
        self.arrivals = torch.zeros(len(weight_NK), dtype=torch.int32, device=weight_NK.device)

    def __call__(self, inputs: Tensor, *others: Any) -> Tensor:
        return (self.by_kernel if self.is_by_kernel(inputs) else self.own)(inputs, *others)

    def is_by_kernel(self, inputs: Tensor) -> bool:
        """Whether so many tokens go that way."""
        num_tokens = inputs.numel() // inputs.shape[-1]
        return next((way for most, way in self.choice if num_tokens <= most), TORCH) == KERNEL

    def gated(self, inputs: Tensor, *, is_tanh: bool) -> Tensor:
        """[.., N / 2]: of joined gates and ups, as :func:`specdist.kernels.layers.gated_activation`."""
        gate = 2 if is_tanh else 1
        return self._split(inputs, self.layer.weight, self.layer.bias, dtype=inputs.dtype, gate=gate)

    def by_kernel(self, inputs: Tensor, *others: Any, **after: Any) -> Tensor:
        """[.., N], or what is ``after`` it."""
        return self._split(inputs, *others, dtype=inputs.dtype, **after)

    def _split(self, inputs: Tensor, numbers_NK: Tensor, bias_N: Any = None, **others: Any) -> Tensor:
        # Triton is not everywhere.
        from specdist.kernels.products import few_tokens_product

        x_TK = inputs.reshape(-1, inputs.shape[-1])
        found: Tensor = few_tokens_product(x_TK, numbers_NK, bias_N, self.arrivals, **others)
        return found.unflatten(-2, inputs.shape[:-1])

    def others(self, x_TK: Tensor) -> tuple[Any, ...]:
        """What it is called with beside an input."""
        return self.layer.weight, None if _is_summed(self.layer) else self.layer.bias

    def exact(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """In float32, of some outputs after the other."""
        parts = weight_NK.split(max(1, MAX_DEQUANTIZED // self.num_inputs))
        outputs = torch.cat([F.linear(x_TK.float(), part.float()) for part in parts], dim=1)
        return outputs if bias_N is None else outputs + bias_N.float()

    def place(self) -> None:
        """Let the layer call it from now on."""
        vars(self.layer)[all_reduce.PRODUCT] = self
        if not _is_summed(self.layer):
            self.layer.forward = functools.partial(_forward, self.layer, self)


class QuantizedProduct(Product):
    """Of weights of 8 bits, and of inputs that are rounded as they are for torch's."""

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__(layer, layer.weight.numbers, layer._product)
        self.kind = f"{self.kind}, {layer.form}"

    def by_kernel(self, inputs: Tensor, found: RoundedInput | None, **after: Any) -> Tensor:
        numbers, input_scales = (inputs, None) if found is None else found
        weight, form = self.layer.weight, self.layer.form
        options = {"dtype": inputs.dtype, "rows": form.rows, "columns": form.columns, **after}
        return self._split(
            numbers, weight.numbers, None, scales_AB=weight.scales_AB, input_scales=input_scales, **options
        )

    def exact(self, x_TK: Tensor, found: RoundedInput | None) -> Tensor:  # type: ignore[override]
        return self.layer.dequantized_product(x_TK, found)

    def others(self, x_TK: Tensor) -> tuple[RoundedInput | None]:
        return (self.layer.rounded(x_TK),)

    def place(self) -> None:
        self.layer._product = vars(self.layer)[all_reduce.PRODUCT] = self


class Norms(all_reduce.Sums):
    """In the place of sums over ranks where there are none: leaves products of few tokens to the residual and
    norms after them, which are in their kernel."""

    _left: tuple[Any, Any, Any] = (None, None, None)

    def joining(self, num_bytes: int) -> Norms:
        return self

    def _added(self, output: Tensor) -> Tensor:
        return output

    def product(self, product: Product, twin: Product, own: Callable[..., Tensor], inputs: Tensor) -> Tensor:
        """What a layer gives; of a product that is left what stands for that, and cannot be written to."""
        if not (self._is_left and twin.is_by_kernel(inputs)):
            return self.add(own(inputs))
        output = self.add(inputs.new_empty(1).expand(*inputs.shape[:-1], len(product.arrivals)))
        self._left = output, product, inputs.reshape(-1, product.num_inputs)
        return output

    def residual_norm(
        self, output: Tensor, residual: Tensor, weight_before_W: Tensor | None, weight_W: Tensor, **form: Any
    ) -> Any:
        """As :func:`specdist.kernels.layers.residual_norm`."""
        form |= {"residual": residual, "weight_before_W": weight_before_W, "weight_W": weight_W}
        (left, product, x_TK), self._left = self._left, (None, None, None)
        if left is not output:
            return layer_kernels().residual_norm(output, **form)
        return product.by_kernel(x_TK, *product.others(x_TK), **form).view(2, *residual.shape)


def _forward(layer: nn.Linear, product: Product, inputs: Tensor) -> Tensor:
    return product(inputs, layer.weight, layer.bias)


def _is_summed(layer: Any) -> bool:
    """Whether its products are terms of sums over ranks."""
    forward = vars(layer).get("forward")
    return isinstance(forward, functools.partial) and forward.func is all_reduce.summed_product


def _products_of(model: nn.Module, dtype: torch.dtype) -> Iterator[Product]:
    """Joined layers first: their parts are multiplied together."""
    modules: list[Any] = list(model.modules())
    joined = [
        each for owner in modules for each in vars(owner).values() if isinstance(each, JoinedProjections)
    ]
    for layer in (*(each.whole for each in joined), *modules):
        is_plain = type(layer) is nn.Linear or getattr(layer, PLAIN, False)
        if all_reduce.PRODUCT in vars(layer):  # of a model that shares it
            continue
        if isinstance(layer, QuantizedLinear):
            form, is_joined = layer.form, layer.whole is not None
            if form.numbers in ("float8", "int8") and not (form.has_zeros or form.has_powers or is_joined):
                yield QuantizedProduct(layer)
        elif is_plain or _is_summed(layer):
            is_joined = isinstance(vars(layer).get("forward"), FusedProjection)
            if not is_joined and layer.weight.dtype == dtype:
                yield Product(layer, layer.weight)


def _followed(model: nn.Module) -> Iterator[Product]:
    """Products with what follows them: the activation of gates and ups; a residual and norms, if no sum over
    ranks lies between."""
    norms = Norms(None, {}, ())  # type: ignore[arg-type]
    for module in model.modules():
        fused, joined = vars(module).get("forward"), vars(module).get("joined_gate_proj")
        if isinstance(fused, FusedMlp) and joined is not None:
            product = vars(joined.whole).get(all_reduce.PRODUCT)
            if product is not None and not isinstance(product, QuantizedProduct):
                yield _gated(product, fused)
        elif isinstance(fused, FusedDecoderLayer) and fused.sums is None:
            width = len(cast(Any, module).input_layernorm.weight)
            for product in filter(None, [vars(each).get(all_reduce.PRODUCT) for each in module.modules()]):
                layer, is_quantized = product.layer, isinstance(product, QuantizedProduct)
                does_more = is_quantized and (layer.sums_over_ranks or layer.bias is not None)
                if len(product.arrivals) == width and not (does_more or _is_summed(layer)):
                    yield _normed(product, fused, norms)


def _gated(product: Product, fused: FusedMlp) -> Product:
    """A twin: apart, and with the activation in its kernel."""
    twin: Any = copy.copy(product)
    gate = functools.partial(layer_kernels().gated_activation, is_tanh=fused.is_tanh)
    twin.kind, twin.place = f"{product.kind}, activation", functools.partial(setattr, fused, "product", twin)
    twin.own = lambda *inputs: gate(*product(*inputs).chunk(2, dim=1))
    twin.exact = lambda *inputs: gate(*product.exact(*inputs).chunk(2, dim=1))
    twin.by_kernel = lambda x_TK, *_: product.gated(x_TK, is_tanh=fused.is_tanh)
    return twin


def _normed(product: Product, fused: FusedDecoderLayer, norms: Norms) -> Product:
    """A twin: apart, and with a residual and the norms of the layer in its kernel."""
    twin: Any = copy.copy(product)
    layer, owner, add = product.layer, cast(Any, fused.module), layer_kernels().residual_norm
    weight = owner.input_layernorm.weight
    weights = {"weight_before_W": weight if hasattr(owner, MORE_NORMS[-1]) else None, "weight_W": weight}

    def after(x_TK: Tensor) -> dict[str, Any]:
        residual = weight.repeat(len(x_TK), 1)
        return {"residual": residual, **weights, "epsilon": fused.epsilon, **fused.form._asdict()}

    def place() -> None:
        layer.forward, fused.sums = functools.partial(norms.product, product, twin, layer.forward), norms

    twin.kind, twin.num_tokens, twin.place = f"{product.kind}, residual and norm", NUM_NORMED, place
    twin.own = lambda x_TK, *others: add(product(x_TK, *others), **after(x_TK))
    twin.exact = lambda x_TK, *others: torch.stack(add(product.exact(x_TK, *others), **after(x_TK)))
    twin.by_kernel = lambda x_TK, *others: product.by_kernel(x_TK, *others, **after(x_TK))
    return twin


@torch.no_grad()
def choose_products(
    model: nn.Module,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    frozen: Choice | None = None,
    measure: Measure | None = None,
) -> Choice:
    """Let a model's products of few tokens go the faster way, of those that are right on all ranks that have
    such a matrix; the log says which, and why. Returns the choice, which is the model's ``PRODUCTS``, too.

    Args:
        group: the ranks that share the model, which call it at the same time.
        frozen: an earlier choice, which stands as far as its ways are right here.
    """
    if PRODUCTS in vars(model):  # of another runner
        return vars(model)[PRODUCTS]
    known, choice, refused = frozen or {}, dict[str, Sequence[tuple[int, str]]](), dict[str, str]()
    # The second of what the first has placed.
    for products in (_products_of(model, dtype), _followed(model)):
        kinds = dict[str, list[Product]]()
        for product in products:
            if len(product.arrivals) * product.num_inputs >= MIN_WEIGHTS:
                kinds.setdefault(product.kind, []).append(product)
        own = {
            kind: _tried(each[0], dtype, device, measure or _cold_s, kind in known)
            for kind, each in kinds.items()
        }
        of_ranks: list[Any] = [own]
        if group is not None:
            of_ranks *= dist.get_world_size(group)
            dist.all_gather_object(of_ranks, own, group=group)
        for kind in dict.fromkeys(itertools.chain(*of_ranks)):
            tried = [of_rank[kind] for of_rank in of_ranks if kind in of_rank]
            if reason := next((reason for reason, _ in tried if reason), ""):
                refused.setdefault(KERNEL, f"{kind}: {reason}")
            wrong = [(NUM_TOKENS[-1], TORCH)] if reason else None
            choice[kind] = wrong or known.get(kind) or _fastest([times for _, times in tried])
        for product in itertools.chain(*kinds.values()):
            product.choice = choice[product.kind]
            product.place()
    setattr(model, PRODUCTS, choice)
    if choice:
        ways = [(kind, most, way) for kind, pairs in choice.items() for most, way in pairs if way != TORCH]
        used = ", ".join(f"{kind} by {way} up to {most} tokens" for kind, most, way in ways)
        logger.info("products of few tokens: %s%s", used or TORCH, said_of(refused))
    return choice


def _tried(
    product: Product, dtype: torch.dtype, device: torch.device, measure: Measure, is_known: bool
) -> tuple[str, list[list[float]]]:
    """Why the kernel cannot be used, empty if it can; and torch's seconds and the kernel's for each of
    ``NUM_TOKENS``, unless a choice is known."""
    times: list[list[float]] = []

    def try_all() -> None:
        generator = torch.Generator().manual_seed(0)
        for num_tokens in product.num_tokens or NUM_TOKENS:
            x_TK = torch.randn(num_tokens, product.num_inputs, generator=generator).to(device, dtype)
            others = product.others(x_TK)
            _check(product, x_TK, others)
            ways = [functools.partial(way, x_TK, *others) for way in (product.own, product.by_kernel)]
            turns = [[measure(way) for way in ways] for _ in range(0 if is_known else NUM_TURNS)]
            times.append([min(turn) for turn in zip(*turns, strict=True)])

    return why_not(try_all) or "", times


def _check(product: Product, x_TK: Tensor, others: Sequence[Any]) -> None:
    """Raises ValueError if a number of the kernel is not that of the product in float32."""
    found, expected = product.by_kernel(x_TK, *others).float(), product.exact(x_TK, *others).float()
    difference = ((found - expected).abs() / (expected.square().mean().sqrt() + expected.abs())).max()
    check_difference("its numbers differ", float(difference), tolerance_of("quantised product", x_TK.dtype))


def _cold_s(run: Callable[[], object]) -> float:
    """The device's, with an empty cache, in a graph, as the host would take longer: the best of several."""
    from triton.testing import do_bench

    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return float(do_bench(graph.replay, warmup=2, rep=10, return_mode="min"))


def _fastest(of_ranks: Sequence[Sequence[Sequence[float]]]) -> list[tuple[int, str]]:
    """The way of each number of tokens, by the slowest rank; neighbours of one way are one."""
    found: list[tuple[int, str]] = []
    for num_tokens, *times in zip(NUM_TOKENS, *of_ranks, strict=False):
        of_torch, of_kernel = map(max, zip(*times, strict=True))
        way = KERNEL if LEAST_GAIN * of_kernel <= of_torch else TORCH
        if found and found[-1][1] == way:
            found.pop()
        found.append((num_tokens, way))
    return found
