"""Weights in the kernels' order: contiguous tiles, 32-bit words, and how a kernel turns them into bfloat16.

A tile holds 64 output rows and one step of the contracted axis. In the word formats a row of a tile is 64
words; field j of word c holds k = step * i + 64 * j + c, so that one field of all words, a plane, is 64
neighbours along k: one dot, and one group of the group-scaled formats. 32-bit words keep offsets of M3's
expert weights, beyond 2^31 elements, within Triton's signed 32 bits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Integer

from pallas_kernels.qtensor import QTensor

ROWS = 64
WORDS = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TiledTensor:
    """A weight `[..., F, D]` as tiles `[..., F / 64, D / step, 64, words]`, padded with zeros.

    `scale` is `[..., F / 64, D / 64, 64]` for formats with a scale per group of 64, `[..., F / 64, 64]` for
    those with one per row, and None for plain numbers.
    """

    format: str = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})
    data: Array
    scale: Array | None


@dataclass(frozen=True)
class TileFormat:
    """How one format of `FORMATS` is tiled and unpacked."""

    step: int  # values of k per tile
    planes: int
    grouped: bool  # one scale per plane and row; else one per row, or none
    words: Callable[[QTensor], Array]  # codes [..., F, D] as words [..., F, D / step, words]
    unpack: Callable[[Array, int, bool], Array]  # words and plane, interpret -> bfloat16 [64, step / planes]


def pack(weight: QTensor) -> TiledTensor:
    """The kernels' order of a weight; jittable, and meant to run once, while loading."""
    form = TILE_FORMATS[weight.format]
    *lead, f, d = weight.shape
    words = _pad(form.words(weight), {-3: ROWS})
    data = words.reshape(*lead, -1, ROWS, *words.shape[-2:]).swapaxes(-3, -2)
    scale = weight.buffers.get("scale")
    if scale is not None and form.grouped:
        scale = _pad(scale, {-2: ROWS}, to={-1: data.shape[-3] * form.step // 64})
        scale = scale.reshape(*lead, -1, ROWS, scale.shape[-1]).swapaxes(-1, -2)
    elif scale is not None:
        scale = _pad(scale, {-1: ROWS}).reshape(*lead, -1, ROWS)
    return TiledTensor(weight.format, (*lead, f, d), data, scale)


def _pad(a: Array, multiples: dict[int, int], to: dict[int, int] | None = None) -> Array:
    """Zeros at the end of axes, up to a multiple or to a size."""
    sizes = {axis: -(-a.shape[axis] // m) * m for axis, m in multiples.items()} | (to or {})
    widths = [(0, 0)] * a.ndim
    for axis, size in sizes.items():
        widths[axis] = (0, size - a.shape[axis])
    return jnp.pad(a, widths)


def _field_words(codes: Integer[Array, "*F D"], bits: int) -> Array:
    """Codes of `bits` bits as words in the plane order, `[..., D / step, 64]`; the last step is padded."""
    fields = 32 // bits
    codes = _pad(codes, {-1: fields * WORDS}).astype(jnp.uint32)
    codes = codes.reshape(*codes.shape[:-1], -1, fields, WORDS)
    shifts = jnp.arange(0, 32, bits, dtype=jnp.uint32)[:, None]
    return lax.bitcast_convert_type(jnp.sum(codes << shifts, axis=-2, dtype=jnp.uint32), jnp.int32)


def _asm(code: str, words: Array) -> Array:
    """bfloat16 from two neighbouring words at a time: $1 and $2 become the halves of $0."""
    shape = jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)
    (out,) = plt.elementwise_inline_asm(
        code, args=[words], constraints="=r,r,r", pack=2, result_shape_dtypes=[shape]
    )
    return out


def _nibble(words: Array, j: int, interpret: bool) -> Array:
    """u - 8 of each nibble u: 0x4300 | u is the bfloat16 128 + u, from which 136 is taken; both exact."""
    if interpret:
        return ((words >> (4 * j)) & 15).astype(jnp.bfloat16) - 8
    half, shift = ("0x5410", "0x7632")[j // 4], f" shr.b32 t, t, {4 * (j % 4)};" if j % 4 else ""
    return _asm(
        "{ .reg .b32 t, m;"
        f" prmt.b32 t, $1, $2, {half};{shift}"
        " lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;"
        " mov.b32 m, 0xC308C308; add.rn.bf16x2 $0, t, m; }",
        words,
    )


def _byte(words: Array, j: int, interpret: bool) -> Array:
    """Each signed byte: 128 + its low seven bits, minus 128 or, where its sign bit is set, 256."""
    if interpret:
        return ((words << (24 - 8 * j)) >> 24).astype(jnp.bfloat16)
    return _asm(
        "{ .reg .b32 t, a, b;"
        f" prmt.b32 t, $1, $2, 0x{j + 4}{j + 4}{j}{j};"
        " lop3.b32 a, t, 0x007F007F, 0x43004300, 0xEA;"
        " lop3.b32 b, t, 0x00800080, 0x43004300, 0xEA; sub.rn.bf16x2 $0, a, b; }",
        words,
    )


def _int4_words(weight: QTensor) -> Array:
    """Canonical words hold k = 8 w + j in nibble j; spread them out and pack them in plane order."""
    words = weight.buffers["data"]
    nibbles = (words[..., None] >> jnp.arange(0, 32, 4, dtype=jnp.uint32)) & 15
    codes = nibbles.reshape(*words.shape[:-1], -1)
    # Padding must be the value 0, whose code is 8.
    step_padding = -codes.shape[-1] % 512
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, step_padding)], constant_values=8)
    return _field_words(codes, 4)


def _int8_words(weight: QTensor) -> Array:
    return _field_words(lax.bitcast_convert_type(weight.buffers["data"], jnp.uint8), 8)


def _bfloat16_words(weight: QTensor) -> Array:
    data = _pad(weight.buffers["data"], {-1: 128})
    return data.reshape(*data.shape[:-1], -1, 128)


TILE_FORMATS: dict[str, TileFormat] = {
    "bfloat16": TileFormat(128, 1, False, _bfloat16_words, lambda tile, *_: tile),
    "int8": TileFormat(256, 4, False, _int8_words, _byte),
    "int4_g64": TileFormat(512, 8, True, _int4_words, _nibble),
}


def tile_dot(
    weight_format: str,
    data_ref: Any,
    scale_ref: Any,
    tile: tuple[Array, ...],
    load_x: Callable[[Array, int], Float[Array, "T K"]],
    steps: tuple[Array | int, Array | int],
    n_rows: int,
    interpret: bool,
) -> Float[Array, "64 T"]:
    """Inside a kernel: 64 rows of weight times `n_rows` rows of x, over steps[0] <= i < steps[1].

    `tile` leads to the row tile, (expert, n) or (n,); `load_x(k, width)` gives x[:, k:k + width]. The weight
    is the first operand, so that few rows of x fill the narrow side of the matrix unit.
    """
    form = TILE_FORMATS[weight_format]

    width = form.step // form.planes

    def step(i: Array, total: Array) -> Array:
        words = data_ref[*tile, i]
        # One plane after the other: all of them at once would not fit into the registers.
        for j in range(form.planes):
            plane = form.unpack(words, j, interpret)
            x = load_x(i * form.step + j * width, width)
            # Loaded ahead of the dot, behind which its latency would show.
            scale = scale_ref[*tile, i * form.planes + j] if form.grouped else None
            part = plt.dot(plane, x, trans_b=True)
            total += part if scale is None else part * scale.astype(jnp.float32)[:, None]
        return total

    total = lax.fori_loop(*steps, step, jnp.zeros((ROWS, n_rows), jnp.float32))
    if scale_ref is not None and not form.grouped:
        total *= scale_ref[*tile].astype(jnp.float32)[:, None]
    return total


def n_steps(weight: TiledTensor) -> int:
    """Steps along the contracted axis."""
    return weight.data.shape[-3]


def pad_columns(x: Float[Array, "T D"], weight: TiledTensor) -> Float[Array, "T steps"]:
    """`x` with zeros up to the whole steps of `weight`."""
    return _pad(x, {}, to={-1: n_steps(weight) * TILE_FORMATS[weight.format].step})


def nbytes(weight: TiledTensor) -> int:
    """Bytes of one whole weight in the kernels' order."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in (weight.data, weight.scale) if a is not None)
