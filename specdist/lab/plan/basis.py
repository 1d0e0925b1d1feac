"""What a plan's figures rest on: what was measured, what was fitted to figures that other engines have
published, what is assumed and agrees with those, and what is assumed and was confirmed by nobody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from specdist.lab.plan.advise import Plan, Site
from specdist.lab.plan.hardware import MEASURED_RATES, PUBLISHED
from specdist.lab.plan.simulate import OWN_GPU
from specdist.models.sizes.sizes import ModelSize

Basis = Literal[
    "measured",
    "fitted to published figures",
    "assumed, near published figures",
    "assumed, confirmed by nobody",
]
BASES = MEASURED, FITTED, NEAR, ASSUMED = get_args(Basis)
# Forwards on an H200, or figures of other engines, are near those of the assumed shares of these GPUs' peaks.
CONFIRMED = ("b200", "h200", "h100-sxm", "a100-80")


def bases(plan: Plan, target: ModelSize, draft: ModelSize | None, site: Site) -> dict[Basis, list[str]]:
    """What the plan rests on, by how it is known. ``draft``: None of one without."""
    found: dict[Basis, list[str]] = {basis: [] for basis in BASES}
    for basis, what in _found(plan, target, None if plan.settings.mode == "target only" else draft, site):
        found[basis].append(what)
    return found


def bases_lines(found: dict[Basis, list[str]]) -> str:
    """The same as text."""
    lines = [f"- {basis}: {'; '.join(whats)}" for basis, whats in found.items() if whats]
    return "\n".join(["The plan rests on figures that are", *lines])


def _found(plan: Plan, target: ModelSize, draft: ModelSize | None, site: Site) -> Iterator[tuple[Basis, str]]:
    gpu, is_calibrated = site.gpu, site.gpu.figures != PUBLISHED
    models = [target] if draft is None else [target, draft]
    shares = "what kernels reach of the GPU's peaks, and a kernel's, a launch's and a wait's times"
    if is_calibrated:
        yield MEASURED, "the GPU's memory, products, launches and waits"
    elif gpu.name in CONFIRMED:
        yield NEAR, shares
    else:
        yield ASSUMED, shares
    yield ASSUMED, "products of few tokens as fast as cuBLAS's (the project's kernel was never timed)"
    yield MEASURED, "kernels and waits of a pass (counted); attention's rate (one H200)"
    yield FITTED, "rates of reading the cache, and a sequence's host time"
    yield ASSUMED, "0.5 ms of the host's in a round (1.0 to 2.6 on one H200)"
    for kind in dict.fromkeys(model.product for model in models if model.num_quantized):
        if kind in gpu.products:
            elsewhere = "" if gpu.name == "h200" else f", taken for the {gpu.name}"
            if gpu.products[kind] == MEASURED_RATES[kind]:  # else among the GPU's own
                yield MEASURED, f"{kind} products (one matrix on one H200{elsewhere})"
            elif not is_calibrated:
                yield ASSUMED, f"{kind} products at the {gpu.name}'s published rate"
        else:
            yield ASSUMED, "quantised layers are written in 16 bits and read again"
    if any(model.experts for model in models):
        yield FITTED, "experts (TensorRT-LLM's: this engine's were never timed)"
        yield ASSUMED, "tokens choose experts uniformly"
    if plan.tp_size > 1 and not any(one.num_ranks == plan.tp_size for one in gpu.sums):
        yield ASSUMED, f"sums over {plan.tp_size} GPUs"
    if plan.settings.mode in OWN_GPU:
        yield ASSUMED, "0.2 ms for messages to the draft's GPU and back"
    if (mode := plan.settings.mode) == "n-grams":
        yield MEASURED, "the lookup's time (a host's core)"
    if mode != "target only":
        match = ", and a match in every round" * (mode == "n-grams")
        yield ASSUMED, f"an acceptance of {plan.settings.acceptance:g} for every token (--acceptance){match}"
