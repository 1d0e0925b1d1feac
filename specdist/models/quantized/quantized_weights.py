"""Quantised matrices: how a layer is stored, its numbers with their scales, and parts of it.

A weight is ``(q - zero) * scale``. A scale belongs to ``rows`` × ``columns`` numbers: to the whole matrix, to
a row (an output channel), to a group of columns in a row, or to a block. Layouts in files are those of
compressed-tensors (``weight`` or ``weight_packed``, ``weight_scale``, ``weight_zero_point``,
``input_scale``), of transformers' block-wise FP8 (``weight``, ``weight_scale_inv``), and of joined experts in
MXFP4 (``blocks``, ``scales``; OCP Microscaling Formats 1.0).

N outputs, K inputs of a layer, A × B scales.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Numbers = Literal["float8", "int8", "int4", "float4"]
GlobalScale = Literal["weight_global_scale", "weight_scale_2"]
# What a kernel multiplies: rounded inputs with weights of the same kind, or plain inputs with quantised ones.
ProductKind = Literal["float8", "int8", "int8 weights", "int4 weights"]
DTYPES = {"float8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8, "float4": torch.uint8}
BITS = {"float8": 8, "int8": 8, "int4": 4, "float4": 4}
# Bytes of a zero point.
ZERO_BYTES = 1
# The bias of a scale that is a power of two.
EXPONENT_BIAS = 127
# The largest number over the scale. Integers: half of the range, as compressed-tensors has it; its end at
# -128 and 127 is clamped.
LIMITS = {"float8": float(torch.finfo(torch.float8_e4m3fn).max), "int8": 127.5, "int4": 7.5}
INTEGER_RANGES = {"int8": (-128, 127), "int4": (-8, 7)}
WORD_BITS = 32
INT4_KERNEL_GROUPS = (32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class LayerFormat:
    """How a linear layer is quantised.

    Attributes:
        rows, columns: of the weight that share a scale; None = all of them.
        is_packed: stored as 32-bit words, or bytes of float4, each with numbers of neighbouring columns.
        has_zeros: the scales have zero points.
        has_powers: the scales are powers of two, held as their exponents.
        activations: whether a layer's input is rounded to the same kind of number too: with a scale for each
            token, for each group of ``columns`` of a token, with a stored one, or not at all.
        scale_name: of the stored scales.
        global_name: of a stored scale of all of them, which are float8: they are divided by
            ``weight_global_scale``, and multiplied by ``weight_scale_2``.
    """

    numbers: Numbers
    rows: int | None
    columns: int | None
    is_packed: bool = False
    has_zeros: bool = False
    activations: Literal["token", "group", "static"] | None = None
    scale_name: str = "weight_scale"
    has_powers: bool = False
    global_name: GlobalScale | None = None

    def __str__(self) -> str:
        if self.columns is None:
            scales = "one scale" if self.rows is None else "a scale per channel"
        elif self.rows == 1:
            scales = f"groups of {self.columns}"
        else:
            scales = f"blocks of {self.rows} × {self.columns}"
        inputs = {
            "token": ", inputs rounded per token",
            "group": f", inputs rounded per token and {self.columns} columns",
            "static": ", inputs rounded",
            None: "",
        }
        return f"{self.numbers}, {scales}{inputs[self.activations]}"

    @property
    def product(self) -> ProductKind | None:
        """The kind of kernel that torch may have; without one a layer is dequantised."""
        has_row_scales = self.rows in (None, 1) and self.columns is None and not self.has_zeros
        if self.activations in ("token", "static"):
            return ("int8" if self.numbers == "int8" else "float8") if has_row_scales else None
        if self.activations is None and self.numbers == "int8" and has_row_scales:
            return "int8 weights"
        if self.activations is None and self.numbers == "int4" and self.columns in INT4_KERNEL_GROUPS:
            return "int4 weights"
        return None

    @property
    def is_halved(self) -> bool:
        """Two numbers share a byte."""
        return BITS[self.numbers] == 4

    @property
    def num_stored_together(self) -> int:
        """Numbers in an element of the stored tensor."""
        if self.numbers == "float4":
            return 2
        return WORD_BITS // BITS[self.numbers] if self.is_packed else 1

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of scales in memory."""
        return torch.uint8 if self.has_powers else torch.float32

    def within(self, num_rows: int, num_columns: int) -> LayerFormat:
        """The format of parts that lie between multiples of so many rows and columns of others: a scale that
        numbers on both sides of such a border share is held more than once."""
        return dataclasses.replace(
            self,
            rows=math.gcd(self.rows or 1, num_rows),
            columns=None if self.columns is None else math.gcd(self.columns, num_columns),
        )

    def num_scales(self, num_outputs: int, num_inputs: int) -> tuple[int, int]:
        """A × B."""
        return (
            1 if self.rows is None else -(-num_outputs // self.rows),
            1 if self.columns is None else -(-num_inputs // self.columns),
        )

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Bytes in memory: of numbers, scales and zero points."""
        num_scales = math.prod(self.num_scales(num_outputs, num_inputs))
        each = self.scale_dtype.itemsize + (ZERO_BYTES if self.has_zeros else 0)
        return num_outputs * -(-num_inputs * BITS[self.numbers] // 8) + num_scales * each

    def stored_shapes(self, num_outputs: int, num_inputs: int) -> dict[str, tuple[int, ...]]:
        """The parts in a file, by the last part of their names. A single scale may also have no dimension."""
        num_rows, num_columns = self.num_scales(num_outputs, num_inputs)
        scales = (1,) if self.rows is None and self.columns is None else (num_rows, num_columns)
        width = -(-num_inputs // self.num_stored_together)
        parts: dict[str, tuple[int, ...]] = {
            "weight_packed" if self.is_packed else "weight": (num_outputs, width)
        }
        parts[self.scale_name] = scales
        if self.global_name is not None:
            parts[self.global_name] = (1,)
        if self.has_zeros:
            packed = (-(-num_rows // self.num_stored_together), num_columns)
            parts["weight_zero_point"] = packed if self.is_packed else scales
        if self.activations == "static":
            parts["input_scale"] = (1,)
        return parts

    def border(self, dim: int) -> int:
        """Numbers along a dimension of the weight between which alone it can be cut."""
        shared = (self.rows, self.columns)[dim] or 1
        # Two columns share a byte.
        return math.lcm(shared, 2) if dim == 1 and self.is_halved else shared


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix, or a part of one. ``numbers``: [N, K], or [N, K / 2] bytes of int4 (plus 8) and float4, the
    left of two columns in the lower half; ``scales_AB`` float32, or the exponents of powers; ``zeros_AB``
    int8; ``input_scale`` [1]: a stored scale of the inputs."""

    form: LayerFormat
    num_inputs: int
    numbers: Tensor
    scales_AB: Tensor
    zeros_AB: Tensor | None = None
    input_scale: Tensor | None = None

    def integers(self) -> Tensor:
        """[N, K] int8, of int8 and int4."""
        if self.form.numbers == "int8":
            return self.numbers
        return _halves(self.numbers).flatten(1)[:, : self.num_inputs].to(torch.int8) - 8

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[N, K]"""
        values, scales_AB = self._values(), self.scales_AB
        if self.form.has_powers:
            exponents_AB = scales_AB.to(torch.int32) - EXPONENT_BIAS
            scales_AB = torch.ldexp(torch.ones_like(exponents_AB, dtype=torch.float32), exponents_AB)
        columns = self.form.columns or self.num_inputs
        if self.num_inputs % columns == 0:
            values = values.unflatten(1, (-1, columns))
        if self.zeros_AB is not None:
            values -= _spread(self.zeros_AB.to(torch.float32), values.shape, self.form)
        values *= _spread(scales_AB, values.shape, self.form)
        return values.to(dtype).view(len(values), self.num_inputs)

    def _values(self) -> Tensor:
        """[N, K] float32, before zero points and scales. Pairs are looked up by their byte, on a CPU faster
        than by shifts."""
        if self.form.numbers == "float8":
            return _float8_values(self.numbers)
        if self.form.numbers == "int8":
            return self.numbers.float()
        halves = _halves(torch.arange(256, dtype=torch.uint8, device=self.numbers.device))
        pairs = _float4_values(halves) if self.form.numbers == "float4" else halves.float() - 8
        places = self.numbers.to(torch.int32).reshape(-1)
        found = pairs.view(torch.int64).flatten().index_select(0, places).view(torch.float32)
        return found.view(len(self.numbers), -1)[:, : self.num_inputs].contiguous()

    def spread(self, form: LayerFormat) -> QuantizedWeight:
        """The same numbers, with the scales of a format of :meth:`LayerFormat.within`."""
        shape = (len(self.numbers), self.num_inputs)

        def spread(scales_AB: Tensor) -> Tensor:
            for dim, (old, new) in enumerate(
                ((self.form.rows, form.rows), (self.form.columns, form.columns))
            ):
                if old != new:
                    assert new is not None
                    scales_AB = scales_AB.repeat_interleave((old or shape[dim]) // new, dim)
            num_rows, num_columns = form.num_scales(*shape)
            return scales_AB[:num_rows, :num_columns]

        zeros_AB = None if self.zeros_AB is None else spread(self.zeros_AB)
        return dataclasses.replace(self, form=form, scales_AB=spread(self.scales_AB), zeros_AB=zeros_AB)

    def cut(self, dim: int, start: int, stop: int) -> QuantizedWeight:
        """Rows (``dim`` 0) or columns from ``start`` to ``stop``. Raises ValueError between two borders."""
        end = (len(self.numbers), self.num_inputs)[dim]
        border = self.form.border(dim)
        if start % border or (stop % border and stop != end):
            raise ValueError(f"{start} to {stop} is not a multiple of {border}")
        per_byte = 2 if dim == 1 and self.form.is_halved else 1
        shared = (self.form.rows, self.form.columns)[dim]

        def scales_of(scales: Tensor) -> Tensor:
            if shared is None:
                return scales
            return scales.narrow(dim, start // shared, -(-(stop - start) // shared))

        return dataclasses.replace(
            self,
            num_inputs=stop - start if dim == 1 else self.num_inputs,
            numbers=self.numbers.narrow(dim, start // per_byte, -(-(stop - start) // per_byte)),
            scales_AB=scales_of(self.scales_AB),
            zeros_AB=None if self.zeros_AB is None else scales_of(self.zeros_AB),
        )

    def place(self, row: int, column: int, part: QuantizedWeight) -> None:
        """Copy a part of another matrix of the same format into this one, from this row and column on. Raises
        ValueError between two borders."""
        mine = self.cut(0, row, row + len(part.numbers)).cut(1, column, column + part.num_inputs)
        for own, found in (
            (mine.numbers, part.numbers),
            (mine.scales_AB, part.scales_AB),
            (mine.zeros_AB, part.zeros_AB),
            (mine.input_scale, part.input_scale),
        ):
            if own is not None and found is not None:
                if own.shape != found.shape:
                    raise ValueError(f"a part is {tuple(found.shape)}, not {tuple(own.shape)}")
                own.copy_(found)


def held(form: LayerFormat, whole: Tensor | QuantizedWeight) -> QuantizedWeight:
    """A weight that is quantised while it is loaded, or that is stored in the format already."""
    return quantize(form, whole) if isinstance(whole, Tensor) else whole


def from_stored(form: LayerFormat, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
    """A weight of ``shape`` (N, K) from its parts in a file."""
    num_scales = form.num_scales(*shape)
    zeros = parts.get("weight_zero_point") if form.has_zeros else None
    input_scale = parts["input_scale"].reshape(1) if form.activations == "static" else None
    scales = parts[form.scale_name].to(form.scale_dtype).reshape(num_scales)
    if form.global_name is not None:
        factor = parts[form.global_name].to(torch.float32).reshape(())
        scales = scales * factor if form.global_name == "weight_scale_2" else scales / factor
    if form.numbers == "float4":
        numbers = parts["weight_packed" if form.is_packed else "weight"]
        return QuantizedWeight(form, shape[1], numbers.contiguous(), scales)
    if form.is_packed:
        numbers = unpack_words(parts["weight_packed"], BITS[form.numbers])[:, : shape[1]]
        if zeros is not None:
            # Packed along the rows.
            zeros = unpack_words(zeros.t().contiguous(), BITS[form.numbers]).t()[: num_scales[0]]
    else:
        numbers = parts["weight"]
    return QuantizedWeight(
        form,
        shape[1],
        pack_int4(numbers) if form.numbers == "int4" else numbers.contiguous(),
        scales,
        None if zeros is None else zeros.to(torch.int8).reshape(num_scales).contiguous(),
        input_scale,
    )


def quantize(form: LayerFormat, weight: Tensor) -> QuantizedWeight:
    """A matrix [N, K] in a format with ``rows`` 1: the range of each row, or group in it, decides its scale;
    zero is a number of the format."""
    values = weight.to(torch.float32)
    num_outputs, num_inputs = values.shape
    assert form.rows == 1 and num_inputs % (form.columns or 1) == 0
    grouped = values.reshape(num_outputs, -1, form.columns or num_inputs)
    zeros = None
    if form.has_zeros:
        least, most = INTEGER_RANGES[form.numbers]
        low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
        scales = _positive((high - low) / (most - least))
        zeros = (least - low / scales).round().clamp(least, most)
    else:
        scales = _positive(grouped.abs().amax(-1) / LIMITS[form.numbers])
    scaled = grouped / scales[..., None] + (0 if zeros is None else zeros[..., None])
    numbers = rounded(scaled, form.numbers).reshape(num_outputs, num_inputs)
    return QuantizedWeight(
        form,
        num_inputs,
        pack_int4(numbers) if form.numbers == "int4" else numbers,
        scales,
        None if zeros is None else zeros.to(torch.int8),
    )


def rounded(values: Tensor, numbers: Numbers) -> Tensor:
    """Values rounded to the nearest of the format; integers as int8."""
    if numbers == "float8":
        return values.clamp(-LIMITS[numbers], LIMITS[numbers]).to(DTYPES[numbers])
    return values.round().clamp(*INTEGER_RANGES[numbers]).to(torch.int8)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """[.., W] 32-bit words as [.., W * 32 / bits] int8; the lowest bits come first."""
    if bits == 8:
        values = words.contiguous().view(torch.uint8)
    else:
        as_bytes = words.contiguous().view(torch.uint8)
        values = torch.stack([as_bytes & 15, as_bytes >> 4], dim=-1).flatten(-2)
    return (values.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)


def pack_int4(numbers: Tensor) -> Tensor:
    """[N, K] int8 from -8 to 7 as [N, K / 2] bytes, rounded up."""
    values = (numbers + 8).to(torch.uint8)
    if values.shape[1] % 2:
        values = torch.nn.functional.pad(values, (0, 1))
    return values[:, 0::2] | values[:, 1::2] << 4


def _float8_values(numbers: Tensor) -> Tensor:
    """Numbers in float32, on a CPU several times faster than by torch's cast: the bits, shifted, are those of
    a float16 that is 2**8 times smaller. Not for NaN."""
    if numbers.device.type != "cpu":
        return numbers.float()
    bits = numbers.view(torch.int8).to(torch.int16)
    half = (bits & -(2**15)) | (bits & 127) << 7
    return half.view(torch.float16).float() * 2.0**8


def _halves(numbers: Tensor) -> Tensor:
    """[.., 2] of four bits each of a byte."""
    return torch.stack([numbers & 15, numbers >> 4], dim=-1)


def _float4_values(codes: Tensor) -> Tensor:
    """Numbers in float32, of a sign, two bits of an exponent and one of a fraction: shifted, they are those
    of a float16 that is 2**14 times smaller."""
    bits = codes.to(torch.int16)
    half = (bits & 8) << 12 | (bits & 7) << 9
    return half.view(torch.float16).float() * 2.0**14


def _positive(scales: Tensor) -> Tensor:
    """Scales without zeros, which would divide zero by zero."""
    return torch.where(scales == 0, torch.finfo(torch.float32).eps, scales)


def _spread(scales_AB: Tensor, shape: torch.Size, form: LayerFormat) -> Tensor:
    """Something that broadcasts to ``shape``: [N, K], or [N, B, columns] of whole groups."""
    if form.rows is not None and form.rows > 1:
        scales_AB = scales_AB.repeat_interleave(form.rows, 0)[: shape[0]]
    if len(shape) > 2:
        return scales_AB[..., None]
    return scales_AB.repeat_interleave(form.columns or shape[1], 1)[:, : shape[1]]
