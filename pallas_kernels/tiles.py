"""Weights in the kernels' order: contiguous tiles of words, and how a kernel turns them into bfloat16.

A tile holds 64 output rows with 64 words each, and a step of the contracted axis is one tile or two. Field j
of word c holds k = first of the tile + 64 * j + c, so that one field of all words, a plane, is 64 neighbours
along k: one dot. Offsets into M3's expert weights have to stay within Triton's signed 32 bits, which it gives
up for arrays over 2^32 bytes alone: words of 16 bits are long enough, bytes are not.

The matrix unit takes pairs of neighbours along k, a register each. Two neighbouring words of 16 bits are a
register too, in which a shift and a mask find a pair; of words of 32 bits halves are put together first.

Scales of groups along k are packed too, several of one row to a word, because a kernel's time depends on how
many loads of scales it issues, not on their bytes.

nvfp4 has a scale for each 16 along k, too many to scale the sums of groups. A code times its scale is a
bfloat16, so that here weights are scaled ahead of the dot. The order of k keeps the factors of a thread few:
all codes of a group are in one thread, and those beside them are of one other. `arrange` puts x into it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, BFloat16, Bool, DTypeLike, Float, Int, Int32, UInt, UInt8

from pallas_kernels.formats import E2M1, E4M3, pack_bits, unpack_bits
from pallas_kernels.qtensor import QTensor

ROWS = 64

# Where the codes of a word begin.
_BYTES = (0, 8, 16, 24)
_NIBBLES = tuple(range(0, 32, 4))
_INT3_FIELDS = (1, 4, 7, 10, 13)
# Of a field, to bit 1 or 4 of bfloat16's mantissa; and what it is more than its value there.
_INT3_SHIFTS = (0, 0, 6, 6, 9)
_INT3_OFFSETS = (68, 12, 68, 12, 12)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TiledTensor:
    """A weight `[..., F, D]` as tiles `[..., F / 64, tiles, 64, words]`, padded with zeros.

    `scale` holds the scales of groups in words `[..., F / 64, steps * words of a step, 64]`, or where they
    multiply weights `[..., F / 64, steps, 64, words of a step]`, and `row_scale` is float32 `[..., F / 64,
    64]`. Each is None for formats without.
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
            scale = form.scale(rows.scale.astype(jnp.int32))
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
    # Words, field, interpret and, where scales multiply weights, the factors -> bfloat16 [64, width].
    unpack: Callable[..., Array]
    fields: tuple[int, ...] = ()  # the lowest bit of each code in a word; none: bfloat16 itself
    word: DTypeLike = jnp.uint32
    tiles: int = 1  # per step
    width: int = 64  # values of k per plane
    bits: int = 0  # of a code in a word
    zero: int = 0  # the code of the value 0
    offsets: tuple[int, ...] = ()  # what the numbers of each field have too much
    group: int | None = None  # values of k that share a scale
    scale_bits: int = 32
    # A scale's bits at the bottom of an int32, anything above them -> float32.
    scale: Callable[[Int32[Array, "*S"]], Float[Array, "*S"]] = lambda bits: _float(bits)
    # Where scales multiply weights: the scales of a step and which tile of it -> the factors of its words.
    factors: Callable[[Int32[Array, "64 S"], int], Int32[Array, "64 W"]] | None = None
    unit: float = 1  # what the factors lack
    # The order of k in a step: its digits' radices, and which digit comes where.
    digits: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    shuffle: Callable[[Array], Array] = lambda words: words  # the bits of words, for a quick unpack
    unshuffle: Callable[[Array], Array] = lambda words: words

    @property
    def planes(self) -> int:
        """Per step."""
        return self.tiles * (len(self.fields) or 1)

    @property
    def step(self) -> int:
        """Values of k that are computed at a time."""
        return self.planes * self.width

    @property
    def groups(self) -> int:
        """Groups per plane, at least 1."""
        return max(1, self.width // self.group) if self.group and self.factors is None else 1

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

    codes = _reorder(form, _pad(rows.codes, {-1: form.step}, form.zero))
    data = codes.reshape(*codes.shape[:-1], -1, len(form.fields) or 1, form.width)
    if form.fields:
        data = data.astype(form.word) << jnp.array(form.fields, form.word)[:, None]
        words = form.shuffle(jnp.sum(data, axis=-2, dtype=form.word))
        data = lax.bitcast_convert_type(words, jnp.int32) if form.word == jnp.uint32 else words
    n_tiles = codes.shape[-1] // form.step * form.tiles
    data = data.reshape(*lead, -1, ROWS, n_tiles, form.width).swapaxes(-3, -2)
    scale, row_scale = rows.scale, rows.row_scale
    if scale is not None and form.group is not None:
        groups = codes.shape[-1] // form.group
        scale = jnp.pad(scale, [(0, 0)] * (scale.ndim - 1) + [(0, groups - scale.shape[-1])])
        words = pack_bits(scale, form.scale_bits, jnp.uint32)
        words = lax.bitcast_convert_type(words, jnp.int32)
        if form.factors is None:
            scale = by_tile(words)
        else:
            scale = words.reshape(*lead, -1, ROWS, words.shape[-1] // form.scale_words, form.scale_words)
            scale = scale.swapaxes(-3, -2)
    if row_scale is not None:
        row_scale = row_scale.reshape(*lead, -1, ROWS)
    return TiledTensor(weight_format, shape, data, scale, row_scale)


def untile(weight: TiledTensor) -> Rows:
    """The rows that `tile` made tiles of, without the padding of either."""
    form, (*lead, f, d) = TILE_FORMATS[weight.format], weight.shape
    data = weight.data.swapaxes(-3, -2)  # [..., F / 64, 64, tiles, words]
    if form.fields:
        data = form.unshuffle(lax.bitcast_convert_type(data, form.word))[..., None, :]
        data = (data >> jnp.array(form.fields, form.word)[:, None]) & jnp.array(
            (1 << form.bits) - 1, form.word
        )
    codes = data.reshape(*lead, data.shape[len(lead)] * ROWS, -1)
    codes = _reorder(form, codes, back=True)[..., :f, :d]
    scale, row_scale = weight.scale, weight.row_scale
    if scale is not None:
        # [..., F / 64, 64, words], of which those of a step are the last axis where they multiply weights
        words = scale.swapaxes(-1, -2) if form.factors is None else scale.swapaxes(-3, -2)
        words = words.reshape(*lead, scale.shape[len(lead)] * ROWS, -1)[..., :f, :]
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


# --- the order of k ---


def _reorder(form: TileFormat, a: Array, back: bool = False) -> Array:
    """The last axis, of whole steps, from the order of k into that of the planes, or back."""
    if not form.order:
        return a
    order = [form.order.index(i) for i in range(len(form.order))] if back else list(form.order)
    digits = [form.digits[i] for i in form.order] if back else form.digits
    lead = a.ndim
    steps = a.reshape(*a.shape[:-1], -1, *digits)
    return steps.transpose(*range(lead), *(lead + i for i in order)).reshape(a.shape)


def place(weight_format: str, k: Int[Array, "*S"]) -> Int[Array, "*S"]:
    """Where `arrange` puts column k."""
    form = TILE_FORMATS[weight_format]
    if not form.order:
        return k
    digits = []
    for radix in reversed(form.digits):
        k, digit = lax.div(k, radix), lax.rem(k, radix)
        digits.insert(0, digit)
    for i in form.order:
        k = k * form.digits[i] + digits[i]
    return k


def arrange(x: Float[Array, "T D"], weight: TiledTensor) -> Float[Array, "T steps"]:
    """`x` as `tile_dot` reads it: where planes have an order, in that, with zeros up to whole steps."""
    return _reorder(TILE_FORMATS[weight.format], jnp.pad(x, [(0, 0), (0, columns(weight) - x.shape[1])]))


# --- codes to bfloat16 ---


def _asm(code: str, *args: Array) -> Array:
    """bfloat16 from two neighbours at a time: $1 and $2, or $1 with both if it has 16 bits, become $0."""
    shape = jax.ShapeDtypeStruct(args[0].shape, jnp.bfloat16)
    (out,) = plt.elementwise_inline_asm(
        "{ .reg .b32 t, a, b; " + code + " }",
        args=args,
        constraints="=r" + ",r" * sum(a.dtype.itemsize // 2 for a in args),
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
    """64 + u, or 8 + u, of each field u, which is moved to bit 1 or 4 where it is at neither."""
    start, shift = _INT3_FIELDS[j], _INT3_SHIFTS[j]
    if interpret:
        return (_field(words, start, 3) + (_INT3_OFFSETS[j] - 4)).astype(jnp.bfloat16)
    mask, base = ("0x000E000E", "0x42804280") if start - shift == 1 else ("0x00700070", "0x41004100")
    moved, field = (f"shr.b32 t, $1, {shift}; ", "t") if shift else ("", "$1")
    return _asm(f"{moved}lop3.b32 $0, {field}, {mask}, {base}, 0xEA;", words)


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


def _e2m1(words: Array, j: int, interpret: bool, factors: Int32[Array, "64 W"]) -> Array:
    """As _e4m3, times the factors of both neighbours, the halves of one word; exact. Words are shuffled."""
    if interpret:
        odd = jnp.arange(words.shape[-1]) % 2 == 1
        scale = _float(jnp.where(odd, factors & -0x10000, factors << 16)) * 2.0**-126
        return (E2M1.decode(_field(_unshuffle_e2m1(words), 4 * j, 4)) * scale).astype(jnp.bfloat16)
    code = (
        "and.b32 a, $1, 0x81C081C0;",
        "shl.b32 a, $1, 4; and.b32 a, a, 0x81C081C0;",
        "shf.r.wrap.b32 a, $1, $1, 6; and.b32 a, a, 0x81C081C0;",
        "shl.b32 a, $1, 6; and.b32 a, a, 0x80C080C0; shr.b32 b, $1, 2; lop3.b32 a, b, 0x01000100, a, 0xEA;",
    )
    return _asm(code[j] + " mov.b32 b, 0x80008000; fma.rn.bf16x2 $0, a, $2, b;", words, factors)


# Where the bits of the four codes of a word go, low first: a shift puts those of one code at 6, 7, 8 and 15,
# where bfloat16 has sign and exponent. For the last code it takes two shifts. To the third, which turns both
# words of a register, the bit at 15 comes out of the other word.
_E2M1_PLACES = ((6, 7, 8, 15), (2, 3, 4, 11), (12, 13, 14, 5), (0, 1, 10, 9))
_E2M1_SWAPPED = 1 << 11


def _swap_e2m1(words: UInt[Array, "*S"]) -> UInt[Array, "*S"]:
    """Neighbours exchange the sign of the third code."""
    other = words.reshape(*words.shape[:-1], -1, 2)[..., ::-1].reshape(words.shape)
    return words ^ ((words ^ other) & _E2M1_SWAPPED)


def _shuffle_e2m1(words: UInt[Array, "*S"]) -> UInt[Array, "*S"]:
    words = _swap_e2m1(words)
    places = [place for code in _E2M1_PLACES for place in code]
    return sum(((words >> i & 1) << place for i, place in enumerate(places)), jnp.zeros_like(words))


def _unshuffle_e2m1(words: UInt[Array, "*S"]) -> UInt[Array, "*S"]:
    places = [place for code in _E2M1_PLACES for place in code]
    out = sum(((words >> place & 1) << i for i, place in enumerate(places)), jnp.zeros_like(words))
    return _swap_e2m1(out)


# --- scales ---


def _float(bits: Int32[Array, "*S"]) -> Float[Array, "*S"]:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _bfloat16_scale(bits: Int32[Array, "*S"]) -> Float[Array, "*S"]:
    return _float(bits << 16)


def _e8m0_scale(bits: Int32[Array, "*S"]) -> Float[Array, "*S"]:
    """2^(byte - 127), but 0 and infinity for bytes 0 and 255, which no weight that comes in has."""
    return _float((bits & 0xFF) << 23)


# nvfp4's scales, which have no sign, become five bits of exponent and three of mantissa, without subnormals:
# below 0x7000 they are the bfloat16 of 2^118 times the scale. 2^8 is what is left of that and E2M1's 2^-126.
_E5M3_UNIT = 2.0**8


def _e5m3(codes: UInt8[Array, "*S"]) -> UInt8[Array, "*S"]:
    """Of the magnitudes of e4m3, NaN too. There is no zero: the codes that it scales are to be zero."""
    size = codes & 0x7F
    small = jnp.array([0, 96, 104, 108, 112, 114, 116, 118], jnp.uint8)[size & 7]
    return jnp.where(size < 8, small, jnp.where(size == E4M3.nan, 0xFF, size + 112).astype(jnp.uint8))


def _e5m3_scale(bits: Int32[Array, "*S"]) -> Float[Array, "*S"]:
    return _float((bits & 0xFF) << 20 | 0x70000000) * 2.0**-118


def _e5m3_factors(scales: Int32[Array, "64 8"], tile: int) -> Int32[Array, "64 64"]:
    """Those of an even word and its neighbour, which take both, in the low and the high half.

    A thread has the columns with one c // 2 % 4, and all of them with c // 32 alike share their factors.
    """
    pairs = ((scales >> 4 if tile else scales << 4) & 0x0FF00FF0) | 0x70007000
    # By shapes alone, through which Triton carries the matrix unit's layout up to the load.
    return jnp.broadcast_to(pairs.reshape(64, 2, 1, 4, 1), (64, 2, 4, 4, 2)).reshape(64, 64)


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
    scale = weight.buffers["scale"]
    sign, zero = (jnp.repeat(a, 16, axis=-1) for a in (scale >> 7 << 3, scale & 0x7F == 0))
    codes = jnp.where(zero, codes & E2M1.sign, codes) ^ sign
    row_scale = jnp.broadcast_to(weight.buffers["scale_2"][..., None], codes.shape[:-1])
    return Rows(codes, _e5m3(scale), row_scale)


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
        word=jnp.uint16,
        tiles=2,
        bits=3,
        zero=4,
        offsets=_INT3_OFFSETS,
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
        (0, 4, 8, 12),
        word=jnp.uint16,
        tiles=2,
        bits=4,
        group=16,
        scale_bits=8,
        scale=_e5m3_scale,
        factors=_e5m3_factors,
        unit=_E5M3_UNIT,
        # k = 256 h + 64 t + 32 p + 16 m + 4 i + j is field j of tile m, in column 32 h + 8 i + 2 t + p.
        digits=(2, 4, 2, 2, 4, 4),
        order=(3, 5, 0, 4, 1, 2),
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
        words, scales = [weight.data[*tile, i * form.tiles + m] for m in range(form.tiles)], {}
        factors = []
        if form.factors is not None:
            bits = scale_ref[*tile, i]
            factors = [form.factors(bits, m) for m in range(form.tiles)]
        # One plane after the other: all of them at once would not fit into the registers.
        for j in range(form.planes):
            m, n = divmod(j, form.planes // form.tiles)
            plane = form.unpack(words[m], n, interpret, *factors[m : m + 1])
            if form.offsets:
                plane -= form.offsets[n]  # exact
            at = i * form.step + j * form.width + column
            inside = mask if whole else mask & (at < x_ref.shape[1])
            x = plt.load(x_ref.at[token, at], mask=inside, other=0)
            if form.group is None or factors:
                total += plt.dot(plane, x, trans_b=True)
                continue
            # Loaded ahead of the dot, behind which its latency would show.
            word, first = divmod(j * form.width // form.group * form.scale_bits, 32)
            if word not in scales:
                scales[word] = scale_ref[*tile, i * form.scale_words + word]
            if groups == 1:  # the sum below over one group made int3_g64 a quarter slower
                scale = form.scale(lax.shift_right_logical(scales[word], first))
                total = _fma(plt.dot(plane, x, trans_b=True), scale[:, None], total, interpret)
                continue
            shift = first + form.scale_bits * jnp.arange(groups)
            bits = lax.shift_right_logical(*jnp.broadcast_arrays(scales[word][:, None], shift))
            sums = plt.dot(plane, x, trans_b=True).reshape(ROWS, groups, n_rows)
            total += jnp.sum(sums * form.scale(bits)[:, :, None], axis=1)
        return total

    total = lax.fori_loop(*steps, step, jnp.zeros((ROWS, n_rows), jnp.float32))
    total = total * form.unit if form.unit != 1 else total
    return total if weight.row_scale is None else total * weight.row_scale[*tile][:, None]


def _fma(a: Array, b: Array, c: Array, interpret: bool) -> Float[Array, "64 T"]:
    """a * b + c, which the compiler leaves two instructions."""
    b = jnp.broadcast_to(b, a.shape)
    if interpret:
        return a * b + c
    shape = jax.ShapeDtypeStruct(a.shape, jnp.float32)
    (out,) = plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[a, b, c],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[shape],
    )
    return out


def n_steps(weight: TiledTensor) -> int:
    """Steps along the contracted axis."""
    return weight.data.shape[-3] // TILE_FORMATS[weight.format].tiles


def columns(weight: TiledTensor) -> int:
    """Of x as `arrange` makes it."""
    form = TILE_FORMATS[weight.format]
    return n_steps(weight) * form.step if form.order else weight.shape[-1]
