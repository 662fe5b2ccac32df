"""Weights in the kernels' order: contiguous tiles, 32-bit words, and how a kernel turns them into bfloat16.

A tile holds 64 output rows and one step of the contracted axis. In the word formats a row of a tile is 64
words (32 in nvfp4); field j of word c holds k = step * i + 64 * j + c, so that one field of all words, a
plane, is 64 neighbours along k: one dot. 32-bit words keep offsets of M3's expert weights, beyond 2^31
elements, within Triton's signed 32 bits.

Scales of groups along k are packed too, several of one row to a word, because a kernel's time depends on how
many loads of scales it issues, not on their bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, BFloat16, Bool, Float, Int, Int32, UInt, UInt8

from pallas_kernels.formats import E2M1, E4M3, pack_bits, unpack_bits
from pallas_kernels.qtensor import QTensor

ROWS = 64
WORDS = 64

# Where the codes of a word begin.
_BYTES = (0, 8, 16, 24)
_NIBBLES = tuple(range(0, 32, 4))
_INT3_FIELDS = (0, 3, 6, 9, 12, 16, 19, 22, 25, 28)  # five in each half, which stay apart in 16 bits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TiledTensor:
    """A weight `[..., F, D]` as tiles `[..., F / 64, steps, 64, words]`, padded with zeros.

    `scale` holds the scales of groups in words `[..., F / 64, steps * words of a step, 64]`, and `row_scale`
    is float32 `[..., F / 64, 64]`. Each is None for formats without.
    """

    format: str = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})
    data: Array
    scale: Array | None
    row_scale: Array | None

    ARRAYS: ClassVar = ("data", "scale", "row_scale")

    def expert(self, index: Array) -> "TiledTensor":
        """The weight of one expert; the barrier keeps XLA from converting all ahead of a loop over some."""
        arrays = (None if a is None else a[index] for a in (self.data, self.scale, self.row_scale))
        return TiledTensor(self.format, self.shape[1:], *lax.optimization_barrier(tuple(arrays)))

    def dequantize(self) -> Array:
        """The weight's numbers, in its logical shape: those of the weight that was packed, bit for bit."""
        rows, form = untile(self), TILE_FORMATS[self.format]
        values = form.decode(rows.codes)
        if rows.scale is not None and form.group is not None:
            scale = form.scale(rows.scale.astype(jnp.int32), True)
            values *= jnp.repeat(scale, form.group, axis=-1)[..., : values.shape[-1]]
        return values if rows.row_scale is None else values * rows.row_scale[..., None]


class Rows(NamedTuple):
    """A weight with everything that belongs to an output row in that row."""

    codes: Array  # [..., F, D]
    scale: UInt[Array, "*F groups"] | None  # the bits of each group's scale
    row_scale: Float[Array, "*F"] | None


@dataclass(frozen=True)
class TileFormat:
    """How one format of `FORMATS` is tiled and unpacked."""

    rows: Callable[[QTensor], Rows]
    decode: Callable[[Array], Array]  # codes -> the numbers that scales multiply
    unpack: Callable[[Array, int, bool], Array]  # words and plane, interpret -> bfloat16 [64, width]
    fields: tuple[int, ...] = ()  # the lowest bit of each plane's code in a word; none: bfloat16 itself
    width: int = 64  # values of k per plane
    bits: int = 0  # of a code in a word
    zero: int = 0  # the code of the value 0
    group: int | None = None  # values of k that share a scale
    scale_bits: int = 32
    # A scale's bits at the bottom of an int32, anything above them; interpret -> float32.
    scale: Callable[[Int32[Array, "*S"], bool], Float[Array, "*S"]] = lambda bits, _: _float(bits)
    unit: float = 1  # what scales in a compiled kernel lack
    shuffle: Callable[[Array], Array] = lambda words: words  # the bits of a word, for a quick unpack
    unshuffle: Callable[[Array], Array] = lambda words: words

    @property
    def planes(self) -> int:
        return len(self.fields) or 1

    @property
    def step(self) -> int:
        """Values of k per tile."""
        return self.planes * self.width

    @property
    def groups(self) -> int:
        """Groups per plane, at least 1."""
        return max(1, self.width // self.group) if self.group else 1

    @property
    def scale_words(self) -> int:
        """Words of scales per row of a tile."""
        return self.step // self.group * self.scale_bits // 32 if self.group else 0


def pack(*weights: QTensor) -> TiledTensor:
    """The kernels' order of weights of one format, below each other; to run once, while loading."""
    form, (*lead, _, d) = weights[0].format, weights[0].shape
    rows = [TILE_FORMATS[form].rows(w) for w in weights]
    rows = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=len(lead)), *rows)
    return tile(form, (*lead, rows.codes.shape[-2], d), rows)


def tile(weight_format: str, shape: tuple[int, ...], rows: Rows) -> TiledTensor:
    """Tiles of a weight of that shape, from its rows, of which there may be more."""
    form = TILE_FORMATS[weight_format]
    rows = pad_rows(weight_format, rows, ROWS)
    lead = shape[:-2]

    def by_tile(a: Array) -> Array:
        """[..., F, n] -> [..., F / 64, n, 64]"""
        return a.reshape(*lead, -1, ROWS, a.shape[-1]).swapaxes(-1, -2)

    codes = _pad(rows.codes, {-1: form.step}, form.zero)
    data = codes.reshape(*codes.shape[:-1], -1, form.planes, form.width)
    if form.fields:
        data = data.astype(jnp.uint32) << jnp.array(form.fields, jnp.uint32)[:, None]
        words = form.shuffle(jnp.sum(data, axis=-2, dtype=jnp.uint32))
        data = lax.bitcast_convert_type(words, jnp.int32)
    data = data.reshape(*lead, -1, ROWS, codes.shape[-1] // form.step, data.shape[-1]).swapaxes(-3, -2)
    scale, row_scale = rows.scale, rows.row_scale
    if scale is not None and form.group is not None:
        groups = codes.shape[-1] // form.group
        scale = jnp.pad(scale, [(0, 0)] * (scale.ndim - 1) + [(0, groups - scale.shape[-1])])
        words = pack_bits(scale, form.scale_bits, jnp.uint32)
        scale = by_tile(lax.bitcast_convert_type(words, jnp.int32))
    if row_scale is not None:
        row_scale = row_scale.reshape(*lead, -1, ROWS)
    return TiledTensor(weight_format, shape, data, scale, row_scale)


def untile(weight: TiledTensor) -> Rows:
    """The rows that `tile` made tiles of, without the padding of either."""
    form, (*lead, f, d) = TILE_FORMATS[weight.format], weight.shape
    data = weight.data.swapaxes(-3, -2)  # [..., F / 64, 64, steps, words]
    if form.fields:
        data = form.unshuffle(lax.bitcast_convert_type(data, jnp.uint32))[..., None, :]
        data = (data >> jnp.array(form.fields, jnp.uint32)[:, None]) & jnp.uint32((1 << form.bits) - 1)
    codes = data.reshape(*lead, data.shape[len(lead)] * ROWS, -1)[..., :f, :d]
    scale, row_scale = weight.scale, weight.row_scale
    if scale is not None:
        words = scale.swapaxes(-1, -2).reshape(*lead, -1, scale.shape[-2])[..., :f, :]
        scale = unpack_bits(lax.bitcast_convert_type(words, jnp.uint32), form.scale_bits)
    if row_scale is not None:
        row_scale = row_scale.reshape(*lead, -1)[..., :f]
    return Rows(codes, scale, row_scale)


def pad_rows(weight_format: str, rows: Rows, multiple: int) -> Rows:
    """Rows of zeros at the end, up to a multiple."""
    zero = TILE_FORMATS[weight_format].zero
    return Rows(
        _pad(rows.codes, {-2: multiple}, zero),
        None if rows.scale is None else _pad(rows.scale, {-2: multiple}),
        None if rows.row_scale is None else _pad(rows.row_scale, {-1: multiple}),
    )


def _pad(a: Array, multiples: dict[int, int], value: int = 0) -> Array:
    """`value` at the end of axes, up to a multiple."""
    widths = [(0, 0)] * a.ndim
    for axis, multiple in multiples.items():
        widths[axis] = (0, -a.shape[axis] % multiple)
    return jnp.pad(a, widths, constant_values=value)


# --- codes to bfloat16 ---


def _asm(code: str, words: Array) -> Array:
    """bfloat16 from two neighbouring words at a time: $1 and $2 become the halves of $0."""
    shape = jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)
    (out,) = plt.elementwise_inline_asm(
        "{ .reg .b32 t, a, b; " + code + " }",
        args=[words],
        constraints="=r,r,r",
        pack=2,
        result_shape_dtypes=[shape],
    )
    return out


def _field(words: Array, start: int, bits: int) -> Array:
    """Inside a kernel that is interpreted: a field of each word, as an unsigned number."""
    return (words >> start) & ((1 << bits) - 1)


def _half(start: int) -> str:
    """t = the halves of both words that hold bit `start`, shifted so that the bit is in the lowest place."""
    shift = f" shr.b32 t, t, {start % 16};" if start % 16 else ""
    return f"prmt.b32 t, $1, $2, {('0x5410', '0x7632')[start // 16]};{shift}"


def _int4(words: Array, j: int, interpret: bool) -> Array:
    """u - 8 of each nibble u: 0x4300 | u is the bfloat16 128 + u, from which 136 is taken; both exact."""
    if interpret:
        return _field(words, 4 * j, 4).astype(jnp.bfloat16) - 8
    return _asm(
        f"{_half(4 * j)} lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;"
        " mov.b32 a, 0xC308C308; add.rn.bf16x2 $0, t, a;",
        words,
    )


def _int8(words: Array, j: int, interpret: bool) -> Array:
    """Each signed byte: 128 + its low seven bits, minus 128 or, where its sign bit is set, 256."""
    if interpret:
        return ((words << (24 - 8 * j)) >> 24).astype(jnp.bfloat16)
    return _asm(
        f"prmt.b32 t, $1, $2, 0x{j + 4}{j + 4}{j}{j};"
        " lop3.b32 a, t, 0x007F007F, 0x43004300, 0xEA;"
        " lop3.b32 b, t, 0x00800080, 0x43004300, 0xEA; sub.rn.bf16x2 $0, a, b;",
        words,
    )


def _int3(words: Array, j: int, interpret: bool) -> Array:
    """u - 4 of each field u: as _int4, and where u begins at bit 3, (128 + 8 u) / 8 - 20; both exact."""
    start = _INT3_FIELDS[j]
    if interpret:
        return _field(words, start, 3).astype(jnp.bfloat16) - 4
    place = start % 16 % 6
    half = _half(start - place)
    if place == 0:
        return _asm(
            f"{half} lop3.b32 t, t, 0x00070007, 0x43004300, 0xEA;"
            " mov.b32 a, 0xC304C304; add.rn.bf16x2 $0, t, a;",
            words,
        )
    return _asm(
        f"{half} lop3.b32 t, t, 0x00380038, 0x43004300, 0xEA;"
        " mov.b32 a, 0x3E003E00; mov.b32 b, 0xC1A0C1A0; fma.rn.bf16x2 $0, t, a, b;",
        words,
    )


def _e4m3(words: Array, j: int, interpret: bool) -> Array:
    """Sign, exponent and mantissa put where bfloat16 has them make 2^-120 of the value; exact.

    The codes of NaN become 480: they are refused on the way in.
    """
    if interpret:
        return E4M3.decode(_field(words, 8 * j, 8)).astype(jnp.bfloat16)
    return _asm(f"prmt.b32 t, $1, $2, 0x{j + 4}{j + 4}{j}{j}; {_E4M3_HALVES.format('$0')}", words)


# Two numbers of the codes that t has in both bytes of each half. By fma, with -0 so that -0 stays: a product
# of bf16x2 needs compute capability 9.0.
_E4M3_HALVES = (
    "shr.b32 a, t, 4; and.b32 a, a, 0x07F007F0; lop3.b32 a, t, 0x80008000, a, 0xEA;"
    " mov.b32 b, 0x7B807B80; mov.b32 t, 0x80008000; fma.rn.bf16x2 {}, a, b, t;"
)


def e4m3_to_bfloat16(codes: UInt8[Array, "*S"], interpret: bool) -> BFloat16[Array, "*S"]:
    """As _e4m3, of a tile of codes as they lie in memory: four neighbours at a time."""
    if interpret:
        return E4M3.decode(codes).astype(jnp.bfloat16)
    (out,) = plt.elementwise_inline_asm(
        "{ .reg .b32 t, a, b;"
        f" prmt.b32 t, $2, $2, 0x1100; {_E4M3_HALVES.format('$0')}"
        f" prmt.b32 t, $2, $2, 0x3322; {_E4M3_HALVES.format('$1')} }}",
        args=[codes],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
    )
    return out


def _e2m1(words: Array, j: int, interpret: bool) -> Array:
    """As _e4m3, where the factor is 2^-126. The words are shuffled."""
    if interpret:
        words = lax.bitcast_convert_type(
            _unshuffle_e2m1(lax.bitcast_convert_type(words, jnp.uint32)), jnp.int32
        )
        return E2M1.decode(_field(words, 4 * j, 4)).astype(jnp.bfloat16)
    half = _half(16 * (j // 4))
    if j % 4 < 3:
        return _asm(f"{half} shl.b32 a, t, {3 * (j % 4)}; and.b32 a, a, 0x81C081C0;{_E2M1_UNIT}", words)
    return _asm(
        f"{half} shl.b32 a, t, 1; and.b32 a, a, 0x80008000; shr.b32 b, t, 5;"
        " lop3.b32 a, b, 0x01000100, a, 0xEA; shr.b32 b, t, 4; lop3.b32 a, b, 0x00C000C0, a, 0xEA;"
        + _E2M1_UNIT,
        words,
    )


_E2M1_UNIT = " mov.b32 b, 0x7E807E80; mul.rn.bf16x2 $0, a, b;"


def _shuffle_e2m1(words: UInt[Array, "*S"]) -> UInt[Array, "*S"]:
    """The four codes of a half so that a shift by 0, 3 or 6 puts one where bfloat16 has sign and exponent.

    Sign and the rest of codes 0 to 2 are at 15 and 6-8, 12 and 3-5, 9 and 0-2; code 3 takes what is left.
    """
    out = jnp.zeros_like(words)
    for m in range(4):
        code = words >> (4 * m)
        if m < 3:
            out |= ((code & 0x00080008) << 12 | (code & 0x00070007) << 6) >> (3 * m)
        else:
            out |= (code & 0x000C000C) << 11 | (code & 0x00030003) << 10
    return out


def _unshuffle_e2m1(words: UInt[Array, "*S"]) -> UInt[Array, "*S"]:
    out = jnp.zeros_like(words)
    for m in range(4):
        moved = words << (3 * m)
        if m < 3:
            code = (moved >> 12 & 0x00080008) | (moved >> 6 & 0x00070007)
        else:
            code = (words >> 11 & 0x000C000C) | (words >> 10 & 0x00030003)
        out |= code << (4 * m)
    return out


# --- scales ---


def _float(bits: Int32[Array, "*S"]) -> Float[Array, "*S"]:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _bfloat16_scale(bits: Int32[Array, "*S"], _: bool) -> Float[Array, "*S"]:
    return _float(bits << 16)


def _e8m0_scale(bits: Int32[Array, "*S"], _: bool) -> Float[Array, "*S"]:
    """2^(byte - 127), but 0 and infinity for bytes 0 and 255, which no weight that comes in has."""
    return _float((bits & 0xFF) << 23)


def _e4m3_scale(bits: Int32[Array, "*S"], interpret: bool) -> Float[Array, "*S"]:
    """The value, or 2^-120 of it where compiled. Scales have no sign."""
    if interpret:  # a CPU takes subnormal numbers for zero
        return E4M3.decode(bits & 0xFF)
    return _float((bits & 0x7F) << 20)


# --- canonical buffers to rows ---


def _bits(a: Array) -> Array:
    return lax.bitcast_convert_type(a, f"uint{8 * a.dtype.itemsize}")


def _bfloat16_rows(weight: QTensor) -> Rows:
    return Rows(weight.buffers["data"], None, None)


def _int8_rows(weight: QTensor) -> Rows:
    return Rows(_bits(weight.buffers["data"]), None, weight.buffers["scale"])


def _int4_g64_rows(weight: QTensor) -> Rows:
    return Rows(unpack_bits(weight.buffers["data"], 4), _bits(weight.buffers["scale"]), None)


def _signed_byte(codes: Array) -> Array:
    return lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.int8).astype(jnp.float32)


def _int8_g64_rows(weight: QTensor) -> Rows:
    return Rows(_bits(weight.buffers["data"]), _bits(weight.buffers["scale"]), None)


def _int3_g64_rows(weight: QTensor) -> Rows:
    low, high = unpack_bits(weight.buffers["low"], 2), unpack_bits(weight.buffers["high"], 1)
    return Rows(low | high << 2, _bits(weight.buffers["scale"]), None)


def _fp8_rows(weight: QTensor) -> Rows:
    codes = weight.buffers["data"]
    scale = jnp.repeat(weight.buffers["scale"], 128, axis=-2)[..., : codes.shape[-2], :]
    return Rows(codes, _bits(scale), None)


def _mxfp8_rows(weight: QTensor) -> Rows:
    return Rows(weight.buffers["data"], weight.buffers["scale"], None)


def _nvfp4_rows(weight: QTensor) -> Rows:
    codes = unpack_bits(weight.buffers["data"], 4)
    row_scale = jnp.broadcast_to(weight.buffers["scale_2"][..., None], codes.shape[:-1])
    return Rows(codes, weight.buffers["scale"], row_scale)


TILE_FORMATS: dict[str, TileFormat] = {
    "bfloat16": TileFormat(_bfloat16_rows, lambda codes: codes, lambda words, *_: words, width=128),
    "int8": TileFormat(_int8_rows, _signed_byte, _int8, _BYTES, bits=8),
    "int8_g64": TileFormat(
        _int8_g64_rows, _signed_byte, _int8, _BYTES, bits=8, group=64, scale_bits=16, scale=_bfloat16_scale
    ),
    "int4_g64": TileFormat(
        _int4_g64_rows,
        lambda u: u.astype(jnp.float32) - 8,
        _int4,
        _NIBBLES,
        bits=4,
        zero=8,
        group=64,
        scale_bits=16,
        scale=_bfloat16_scale,
    ),
    "int3_g64": TileFormat(
        _int3_g64_rows,
        lambda u: u.astype(jnp.float32) - 4,
        _int3,
        _INT3_FIELDS,
        bits=3,
        zero=4,
        group=64,
        scale_bits=16,
        scale=_bfloat16_scale,
    ),
    "fp8": TileFormat(_fp8_rows, E4M3.decode, _e4m3, _BYTES, bits=8, group=128),
    "mxfp8": TileFormat(
        _mxfp8_rows, E4M3.decode, _e4m3, _BYTES, bits=8, group=32, scale_bits=8, scale=_e8m0_scale
    ),
    "nvfp4": TileFormat(
        _nvfp4_rows,
        E2M1.decode,
        _e2m1,
        _NIBBLES,
        width=32,
        bits=4,
        group=16,
        scale_bits=8,
        scale=_e4m3_scale,
        unit=2.0**120,
        shuffle=_shuffle_e2m1,
        unshuffle=_unshuffle_e2m1,
    ),
}


# --- inside a kernel ---


def tile_dot(
    weight: TiledTensor,
    tile: tuple[Array, ...],
    x_ref: Any,
    token: Int[Array, " T"],
    live: Bool[Array, " T"],
    steps: tuple[Array | int, Array | int],
    interpret: bool,
) -> Float[Array, "64 T"]:
    """64 rows of weight times rows of x, over steps[0] <= i < steps[1]; the weight's arrays are references.

    `tile` leads to the row tile, (expert, n) or (n,). Row t of x is `x_ref[token[t]]`, or zeros where not
    live. The weight is the first operand, so that few rows of x fill the narrow side of the matrix unit.

    Where a plane has several groups, x becomes block-diagonal: row (g, t) holds x[t] in the columns of group
    g alone, so that one dot gives the sums of all groups apart.
    """
    form = TILE_FORMATS[weight.format]
    groups, n_rows = form.groups, token.shape[0]
    scale_ref: Any = weight.scale
    column = jnp.arange(form.width)[None, :]
    whole = x_ref.shape[1] % form.step == 0
    mask = jnp.broadcast_to(live, (groups, n_rows)).reshape(-1, 1)
    token = jnp.broadcast_to(token, (groups, n_rows)).reshape(-1, 1)
    if groups > 1:
        # `lax.div`, from which Triton sees that neighbours are masked alike and may be copied together.
        of_row = lax.div(jnp.arange(groups * n_rows)[:, None], n_rows)
        mask &= of_row == lax.div(column, form.width // groups)

    def step(i: Array, total: Array) -> Array:
        words = weight.data[*tile, i]
        scales = {}
        # One plane after the other: all of them at once would not fit into the registers.
        for j in range(form.planes):
            plane = form.unpack(words, j, interpret)
            at = i * form.step + j * form.width + column
            inside = mask if whole else mask & (at < x_ref.shape[1])
            x = plt.load(x_ref.at[token, at], mask=inside, other=0)
            if form.group is None:
                total += plt.dot(plane, x, trans_b=True)
                continue
            # Loaded ahead of the dot, behind which its latency would show.
            word, first = divmod(j * form.width // form.group * form.scale_bits, 32)
            if word not in scales:
                scales[word] = scale_ref[*tile, i * form.scale_words + word]
            if groups == 1:  # the sum below over one group made int3_g64 a quarter slower
                scale = form.scale(lax.shift_right_logical(scales[word], first), interpret)
                total += plt.dot(plane, x, trans_b=True) * scale[:, None]
                continue
            shift = first + form.scale_bits * jnp.arange(groups)
            bits = lax.shift_right_logical(*jnp.broadcast_arrays(scales[word][:, None], shift))
            sums = plt.dot(plane, x, trans_b=True).reshape(ROWS, groups, n_rows)
            total += jnp.sum(sums * form.scale(bits, interpret)[:, :, None], axis=1)
        return total

    total = lax.fori_loop(*steps, step, jnp.zeros((ROWS, n_rows), jnp.float32))
    total *= 1 if interpret else form.unit
    return total if weight.row_scale is None else total * weight.row_scale[*tile][:, None]


def n_steps(weight: TiledTensor) -> int:
    """Steps along the contracted axis."""
    return weight.data.shape[-3]
