"""Where stored tensors lie in parameters that transformers joins or splits while it loads a model.

Single experts in files are one parameter of all experts in a model. How is said by transformers' own
conversions, each a list of operations. They run once before anything is read, on tensors without numbers that
note where every part of them comes from. So a stored tensor is copied to its place as soon as it is read, and
the tensors of a layer do not wait for one another. An operation that is not known here gives no places: what
it joins is collected, and transformers converts it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, dot_natural_key

from specdist.models.files.checkpoint import Checkpoint
from specdist.models.loading.weight_names import WeightNames
from specdist.models.recurrent.cuts import Cut
from specdist.utils.errors import UserError

Shape = tuple[int, ...]
VIEWS: dict[str, Callable[..., Tensor]] = {
    "unsqueeze": torch.unsqueeze,
    "transpose": torch.transpose,
    "narrow": torch.narrow,
}


class UnknownOperationError(Exception):
    """A conversion has an operation that is not known here."""


@dataclass(frozen=True)
class Piece:
    """A part of a stored tensor, and where it lies in what is made of it: from ``begin`` on along each
    dimension, of ``shape``. ``steps``: of :data:`VIEWS`, of the stored tensor, that give the part."""

    source: str
    begin: Shape
    shape: Shape
    steps: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @staticmethod
    def whole(source: str, shape: Sequence[int]) -> Piece:
        """All of a stored tensor, as it is."""
        return Piece(source, (0,) * len(shape), tuple(shape))

    def after(self, name: str, arguments: tuple[int, ...], begin: Shape, shape: Shape) -> Piece:
        """The piece after one more step, which brings it there."""
        return replace(self, begin=begin, shape=shape, steps=(*self.steps, (name, arguments)))

    def of(self, whole: Tensor) -> Tensor:
        """The part of the stored tensor, a view of it."""
        for name, arguments in self.steps:
            whole = VIEWS[name](whole, *arguments)
        return whole

    def within(self, dim: int, begin: int, end: int) -> Piece | None:
        """The part that lies between two places of a dimension, seen from the first of them."""
        first, last = max(self.begin[dim], begin), min(self.begin[dim] + self.shape[dim], end)
        if first >= last:
            return None
        steps = self.steps
        if last - first < self.shape[dim]:
            steps = (*steps, ("narrow", (dim, first - self.begin[dim], last - first)))
        return replace(
            self,
            begin=_changed(self.begin, dim, first - begin),
            shape=_changed(self.shape, dim, last - first),
            steps=steps,
        )

    def on_rank(self, cut: Cut | None) -> list[Piece]:
        """What of it one rank has, seen from the first of the rank's own places."""
        if cut is None:
            return [self]
        begins = [0, *accumulate(map(len, cut.ranges))]
        return [
            replace(part, begin=_changed(part.begin, cut.dim, begin + part.begin[cut.dim]))
            for own, begin in zip(cut.ranges, begins, strict=False)
            if (part := self.within(cut.dim, own.start, own.stop)) is not None
        ]


class TracedTensor:
    """Stands in for a tensor in a conversion, and knows the pieces that it is made of."""

    def __init__(self, shape: Shape, pieces: Sequence[Piece]) -> None:
        self.shape, self.pieces = torch.Size(shape), pieces

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known: dict[Any, Callable[..., Any]] = {
            torch.stack: _stack, torch.cat: _cat, torch.transpose: _transpose, torch.chunk: _chunk,
            torch.split: _split,
        }  # fmt: skip
        if func not in known:
            raise UnknownOperationError(str(func))
        return known[func](*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        raise UnknownOperationError(name)

    def contiguous(self) -> TracedTensor:
        return self

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)


def _stack(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    def with_dim(numbers: Shape, number: int) -> Shape:
        return (*numbers[:dim], number, *numbers[dim:])

    _check_fit(tensors, None)
    raised = []
    for tensor in tensors:
        pieces = [
            piece.after("unsqueeze", (dim,), with_dim(piece.begin, 0), with_dim(piece.shape, 1))
            for piece in tensor.pieces
        ]
        raised.append(TracedTensor(with_dim(tensor.shape, 1), pieces))
    return _cat(raised, dim)


def _cat(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    _check_fit(tensors, dim)
    begins = [0, *accumulate(tensor.shape[dim] for tensor in tensors)]
    pieces = [
        replace(piece, begin=_changed(piece.begin, dim, begin + piece.begin[dim]))
        for tensor, begin in zip(tensors, begins, strict=False)
        for piece in tensor.pieces
    ]
    return TracedTensor(_changed(tensors[0].shape, dim, begins[-1]), pieces)


def _check_fit(tensors: Sequence[TracedTensor], dim: int | None) -> None:
    """Raises ValueError for tensors of different shapes but for that dimension, or none."""
    if not tensors:
        raise ValueError("there are none of some of them")
    for one, other in pairwise(tensors):
        if _changed(one.shape, dim, 0) != _changed(other.shape, dim, 0):
            raise ValueError(f"those of {list(one.shape)} and {list(other.shape)} do not fit together")


def _transpose(tensor: TracedTensor, dim0: int, dim1: int) -> TracedTensor:
    def swapped(numbers: Shape) -> Shape:
        return _changed(_changed(numbers, dim0, numbers[dim1]), dim1, numbers[dim0])

    pieces = [
        piece.after("transpose", (dim0, dim1), swapped(piece.begin), swapped(piece.shape))
        for piece in tensor.pieces
    ]
    return TracedTensor(swapped(tensor.shape), pieces)


def _chunk(tensor: TracedTensor, chunks: int, dim: int = 0) -> list[TracedTensor]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


def _split(tensor: TracedTensor, sizes: int | Sequence[int], dim: int = 0) -> list[TracedTensor]:
    width = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, width - begin) for begin in range(0, width, sizes)]
    if sum(sizes) != width:
        raise ValueError(f"{width} of {list(tensor.shape)} cannot be split into {list(sizes)}")
    return [
        TracedTensor(
            _changed(tensor.shape, dim, end - begin),
            [part for piece in tensor.pieces if (part := piece.within(dim, begin, end)) is not None],
        )
        for begin, end in pairwise([0, *accumulate(sizes)])
    ]


def _changed(numbers: Sequence[int], dim: int | None, number: int) -> Shape:
    return tuple(number if index == dim else each for index, each in enumerate(numbers))


@dataclass(frozen=True)
class Conversion:
    """Stored tensors of which transformers makes parameters: ``sources`` by the converter's patterns."""

    name: str
    converter: WeightConverter
    sources: Mapping[str, Sequence[str]]

    @property
    def stored_names(self) -> set[str]:
        return {name for names in self.sources.values() for name in names}

    def converted(self, tensors: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
        """The parameters by name. ``model``: whole. May raise what transformers' operations raise."""
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.name, name, pattern, tensors[name])
        found = converter.convert(self.name, model=model, config=model.config)
        return {name: made[0] if isinstance(made, list) else made for name, made in found.items()}


def conversions_of(
    checkpoint: Checkpoint, model: PreTrainedModel, names: WeightNames, shapes: Mapping[str, Shape]
) -> tuple[dict[str, list[tuple[str, Piece]]], dict[str, Conversion]]:
    """How stored tensors of these ``shapes`` make parameters of the whole ``model``: by stored tensor its
    places, (parameter, piece) each, or the conversion that it has to be collected for.

    Raises :class:`UserError` where one is missing, or of another shape.
    """
    what = f"{checkpoint.option} {checkpoint.name}"
    places: dict[str, list[tuple[str, Piece]]] = {}
    collected: dict[str, Conversion] = {}
    for conversion in _grouped(names, shapes):
        try:
            made = conversion.converted(
                {
                    name: TracedTensor(shapes[name], [Piece.whole(name, shapes[name])])
                    for name in conversion.stored_names
                },
                model,
            )
        except UnknownOperationError:
            made = _without_numbers(what, conversion, model, shapes)
            collected |= dict.fromkeys(conversion.stored_names, conversion)
        except Exception as error:
            raise _cannot_be_made(what, conversion, error) from error
        for name, tensor in made.items():
            wanted = names.known.get(name)
            if wanted is not None and wanted.shape != tensor.shape:
                raise UserError(
                    f"{what}: the tensors in its files make {name} of shape {list(tensor.shape)}, but "
                    f"config.json asks for {list(wanted.shape)}: fetch both again"
                )
            for piece in tensor.pieces if isinstance(tensor, TracedTensor) else ():
                places.setdefault(piece.source, []).append((name, piece))
    return places, collected


def _without_numbers(
    what: str, conversion: Conversion, model: PreTrainedModel, shapes: Mapping[str, Shape]
) -> dict[str, Any]:
    try:
        return conversion.converted(
            {name: torch.empty(shapes[name], device="meta") for name in conversion.stored_names}, model
        )
    except Exception as error:
        raise _cannot_be_made(what, conversion, error) from error


def _cannot_be_made(what: str, conversion: Conversion, error: Exception) -> UserError:
    return UserError(
        f"{what}: {conversion.name} cannot be made of the tensors in its files ({error}): one of them is "
        "missing, or of another shape; fetch it again"
    )


def _grouped(names: WeightNames, stored_names: Iterable[str]) -> list[Conversion]:
    """The conversions of stored tensors as transformers groups them: by the parameter that they become, in
    the order of the numbers in their names."""
    converters: dict[str, WeightConverter] = {}
    sources: dict[str, dict[str, list[str]]] = {}
    for stored in sorted(stored_names, key=dot_natural_key):
        name, pattern = names.renamed(stored)
        if pattern is not None and name in names.known:
            converters[name] = names.converter(pattern)
            sources.setdefault(name, {}).setdefault(pattern, []).append(stored)
    return [Conversion(name, converters[name], found) for name, found in sources.items()]
