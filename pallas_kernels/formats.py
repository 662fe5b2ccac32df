"""Weight formats: how numbers become named buffers, and buffers numbers.

`FORMATS` owns everything about a format: which buffers it has, what quantising and dequantising mean, and how
many bytes that takes. Nothing else in the project infers any of it. The buffers here are canonical: free of
any kernel's tiles and of any device count. A tensor is `[..., F, D]`: output features, then the contracted
axis k; experts, if any, come first.

All quantised formats round codes half to even against the scale as it is stored. Magnitudes above 2^127
saturate, and an infinity or NaN makes all that shares its scale NaN. Scales are kept large enough that a code
times its scale is no float32 subnormal, because XLA takes those for zero: what is below that rounds to it.
Dequantising is exact for any buffers whose products are float32 normals, and rounds to float32 once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int, Integer, UInt, UInt8

from pallas_kernels.precision import TINY, divide, nearest, wide

_MAX = 2.0**127

Shape = tuple[int, ...]
Buffers = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class Format(ABC):
    """One way to store a weight. `dtype` is the dtype that numbers come in and out as.

    `factors` are multiples of a group's largest magnitude, beside 1, that `quantize` tries to make its scale
    for: the one with the least squared error is taken.
    """

    name: str
    dtype: DTypeLike
    factors: tuple[float, ...] = field(default=(), kw_only=True)

    @abstractmethod
    def buffers(self, shape: Shape) -> Buffers:
        """The buffers of a tensor of this logical shape."""

    @property
    def rows(self) -> int | None:
        """Rows that share a scale: so many at a time quantise as all do. None: all rows of an expert."""
        return 1

    @abstractmethod
    def quantize(self, values: Float[Array, "*E F D"]) -> dict[str, Array]:
        """Round `values` to this format."""

    @abstractmethod
    def dequantize(self, buffers: Mapping[str, Array], shape: Shape) -> Float[Array, "*E F D"]:
        """The numbers that `buffers` stand for."""

    def nbytes(self, shape: Shape) -> int:
        """Bytes of all buffers of a tensor of this logical shape."""
        return sum(math.prod(b.shape) * b.dtype.itemsize for b in self.buffers(shape).values())


# --- scales ---


def _block_max(values: Float[Array, "*E F D"], block: tuple[int, int]) -> Float[Array, "*E Fb Db"]:
    """The largest magnitude of each block of the last two axes, at most 2^127; inf for a block not finite.

    Not NaN, because XLA's maximum may lose a NaN on the CPU.
    """
    size = jnp.where(jnp.isfinite(values), jnp.minimum(jnp.abs(values), _MAX), jnp.inf)
    return _by_block(size, block).max((-3, -1))


def _by_block(values: Float[Array, "*E F D"], block: tuple[int, int]) -> Float[Array, "*E Fb f Db d"]:
    """The last two axes cut into blocks, which zeros fill."""
    *lead, f, d = values.shape
    values = jnp.pad(values, [(0, 0)] * len(lead) + [(0, -f % block[0]), (0, -d % block[1])])
    f, d = values.shape[-2:]
    return values.reshape(*lead, f // block[0], block[0], d // block[1], block[1])


def _spread(scale: Array, block: tuple[int, int], shape: Shape) -> Array:
    """Each block's scale at every element of a tensor of this shape."""
    for axis, size in zip((-2, -1), block, strict=True):
        scale = jnp.repeat(scale, size, axis) if size > 1 else scale
    return scale[..., : shape[-2], : shape[-1]]


def _scale(most: Array, largest: float, smallest: float, mantissa_bits: int = 23) -> Array:
    """float32 `most / largest` rounded to so many bits; 1 for zero, NaN for inf.

    `largest` and `smallest` are the magnitudes of codes. `reduce_precision`, because XLA may drop a cast to
    bfloat16 that is cast back.
    """
    scale = jnp.where(most == 0, 1, jnp.maximum(divide(most, largest), TINY / smallest))
    scale = jnp.where(most == jnp.inf, jnp.nan, scale)
    return lax.reduce_precision(scale, 8, mantissa_bits).astype(jnp.float32)


# Fractions of a group's largest magnitude that its scale may be made for instead: small formats lose less if
# some numbers saturate.
_SHRINK = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)


def _groups(values: Float[Array, "*E F D"], size: int) -> Float[Array, "*E F n size"]:
    """Groups along k; zeros fill the last."""
    values = _pad_last(values, size)
    return values.reshape(*values.shape[:-1], -1, size)


def _least_error(
    groups: Float[Array, "*E F n size"],
    most: Float[Array, "*E F n 1"],
    factors: tuple[float, ...],
    rounded: Callable[[Float[Array, "*E F n 1"]], Float[Array, "*E F n size"]],
) -> Float[Array, "*E F n 1"]:
    """For each group the multiple of `most` whose `rounded` numbers have the least squared error.

    1 is tried first, then `factors`; a later one has to be better. Errors that are not finite are no better.
    """
    if not factors:
        return most

    def error(most: Array) -> Array:
        return jnp.sum((groups - rounded(most)) ** 2, axis=-1, keepdims=True)

    def attempt(found: tuple[Array, Array], factor: Array) -> tuple[tuple[Array, Array], None]:
        best, least = found
        tried = most * factor
        new = error(tried)
        return (jnp.where(new < least, tried, best), jnp.where(new < least, new, least)), None

    (best, _), _ = lax.scan(attempt, (most, error(most)), jnp.asarray(factors, jnp.float32))
    return best


# --- codes ---


def pack_bits(fields: Integer[Array, "*B K"], bits: int, word: DTypeLike) -> UInt[Array, "*B W"]:
    """Fields of so many bits along the last axis, low first, in words. They must fill whole words."""
    per_word = jnp.dtype(word).itemsize * 8 // bits
    shifts = jnp.arange(per_word, dtype=word) * jnp.asarray(bits, word)
    parts = fields.reshape(*fields.shape[:-1], fields.shape[-1] // per_word, per_word).astype(word)
    return jnp.sum(parts << shifts, axis=-1, dtype=word)


def unpack_bits(words: UInt[Array, "*B W"], bits: int) -> UInt[Array, "*B K"]:
    """The fields that `pack_bits` packed, in the words' dtype."""
    per_word = words.dtype.itemsize * 8 // bits
    shifts = jnp.arange(per_word, dtype=words.dtype) * jnp.asarray(bits, words.dtype)
    fields = (words[..., None] >> shifts) & jnp.asarray((1 << bits) - 1, words.dtype)
    return fields.reshape(*words.shape[:-1], words.shape[-1] * per_word)


def _pad_last(x: Array, multiple: int) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % multiple)])


def _floor_log2(x: Array) -> Array:
    return jnp.frexp(x)[1] - 1


def _power_of_two(exponent: Int[Array, "*S"]) -> Float[Array, "*S"]:
    """Exact in float32 for exponents from -126 to 127, on every backend."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


@dataclass(frozen=True)
class MiniFloat:
    """Codes of a sign, an exponent and a mantissa with subnormals, in the low bits of a byte. No infinities.

    As integers, because a cast to e4m3 does not saturate, and casts of e2m1 and e8m0 need newer GPUs.
    """

    sign: int  # the sign's bit
    mantissa: int  # its bits
    min_exponent: int  # of normal numbers
    largest: float
    nan: int | None = None  # the code without sign

    @property
    def smallest(self) -> float:
        return 2.0 ** (self.min_exponent - self.mantissa)

    def encode(self, x: Float[Array, "*S"]) -> UInt8[Array, "*S"]:
        """Round half to even, saturating. A NaN has no code that means it."""
        size = jnp.minimum(jnp.abs(x), self.largest)
        exponent = _floor_log2(jnp.maximum(size, 2.0**self.min_exponent))
        steps = nearest(size * _power_of_two(self.mantissa - exponent))
        code = steps + ((exponent - self.min_exponent) << self.mantissa)  # a carry goes into the exponent
        return jnp.where(jnp.signbit(x), code | self.sign, code).astype(jnp.uint8)

    def decode(self, codes: Integer[Array, "*S"]) -> Float[Array, "*S"]:
        """float32, exact."""
        size = codes.astype(jnp.int32) & (self.sign - 1)
        exponent = jnp.maximum(size >> self.mantissa, 1) - 1
        steps = (size - (exponent << self.mantissa)).astype(jnp.float32)
        value = steps * _power_of_two(exponent + (self.min_exponent - self.mantissa))
        value = value if self.nan is None else jnp.where(size == self.nan, jnp.nan, value)
        return jnp.where((codes & self.sign) != 0, -value, value)


E4M3 = MiniFloat(sign=0x80, mantissa=3, min_exponent=-6, largest=448.0, nan=0x7F)
E2M1 = MiniFloat(sign=0x8, mantissa=1, min_exponent=0, largest=6.0)


# --- formats ---


@dataclass(frozen=True)
class Plain(Format):
    """Unquantised numbers of one dtype, in one buffer called `data`."""

    def buffers(self, shape: Shape) -> Buffers:
        return {"data": jax.ShapeDtypeStruct(shape, self.dtype)}

    def quantize(self, values: Array) -> dict[str, Array]:
        return {"data": values.astype(self.dtype)}

    def dequantize(self, buffers: Mapping[str, Array], shape: Shape) -> Array:
        return buffers["data"]


@dataclass(frozen=True)
class Integers(Format):
    """w = q * scale, with q from -`largest` to `largest` and a scale for each row or group along k.

    The scale is absmax / largest rounded to its dtype, 1 for zeros. q is an int8 `data`, or q + largest + 1
    in planes of bits, from the low bits up, in 32-bit words with the lowest k in the lowest bits; a last
    group that is not full is padded with q = 0. |w - q * scale| <= scale / 2 without `factors`.
    """

    largest: int
    group: int | None  # None: the whole row
    scale_dtype: DTypeLike
    planes: tuple[tuple[str, int], ...] = ()  # (buffer, bits)

    def _block(self, shape: Shape) -> tuple[int, int]:
        return 1, self.group or shape[-1]

    def buffers(self, shape: Shape) -> Buffers:
        *rows, d = shape
        groups = -(-d // self._block(shape)[1])
        scale = jax.ShapeDtypeStruct((*rows, groups) if self.group else tuple(rows), self.scale_dtype)
        if not self.planes:
            return {"data": jax.ShapeDtypeStruct(shape, jnp.int8), "scale": scale}
        words = {name: groups * self._block(shape)[1] * bits // 32 for name, bits in self.planes}
        return {name: jax.ShapeDtypeStruct((*rows, n), jnp.uint32) for name, n in words.items()} | {
            "scale": scale
        }

    def quantize(self, values: Float[Array, "*E F D"]) -> dict[str, Array]:
        values = wide(values)
        block = self._block(values.shape)
        groups = _groups(values, block[1])

        def codes_and_scale(most: Array) -> tuple[Array, Array]:
            scale = _scale(most, self.largest, 1, jnp.finfo(self.scale_dtype).nmant)
            return jnp.clip(jnp.round(divide(groups, scale)), -self.largest, self.largest), scale

        def rounded(most: Array) -> Array:
            q, scale = codes_and_scale(most)
            return q * scale

        most = _block_max(values, block)[..., None]
        q, scale = codes_and_scale(_least_error(groups, most, self.factors, rounded))
        q, scale = q.astype(jnp.int8).reshape(*values.shape[:-1], -1), scale[..., 0]
        found = {} if self.planes else {"data": q[..., : values.shape[-1]]}
        codes = (q + (self.largest + 1)).astype(jnp.uint8)
        for name, bits in self.planes:
            found[name] = pack_bits(codes & ((1 << bits) - 1), bits, jnp.uint32)
            codes = codes >> bits
        scale = scale if self.group else scale[..., 0]
        return found | {"scale": scale.astype(self.scale_dtype)}

    def dequantize(self, buffers: Mapping[str, Array], shape: Shape) -> Float[Array, "*E F D"]:
        if self.planes:
            codes, shift = 0, 0
            for name, bits in self.planes:
                codes = codes | (unpack_bits(buffers[name], bits) << shift)
                shift += bits
            q = jnp.asarray(codes)[..., : shape[-1]].astype(jnp.int32) - (self.largest + 1)
        else:
            q = buffers["data"]
        scale = buffers["scale"].astype(jnp.float32)
        scale = scale if self.group else scale[..., None]
        return q.astype(jnp.float32) * _spread(scale, self._block(shape), shape)


@dataclass(frozen=True)
class FP8(Format):
    """w = e4m3 * scale, with a float32 scale for each block of 128 x 128: absmax / 448, 1 for zeros."""

    block: tuple[int, int] = (128, 128)

    @property
    def rows(self) -> int:
        return self.block[0]

    def buffers(self, shape: Shape) -> Buffers:
        *experts, f, d = shape
        blocks = (*experts, -(-f // self.block[0]), -(-d // self.block[1]))
        return {
            "data": jax.ShapeDtypeStruct(shape, jnp.uint8),
            "scale": jax.ShapeDtypeStruct(blocks, jnp.float32),
        }

    def quantize(self, values: Float[Array, "*E F D"]) -> dict[str, Array]:
        values = wide(values)
        scale = _scale(_block_max(values, self.block), E4M3.largest, E4M3.smallest)
        codes = E4M3.encode(divide(values, _spread(scale, self.block, values.shape)))
        return {"data": codes, "scale": scale}

    def dequantize(self, buffers: Mapping[str, Array], shape: Shape) -> Float[Array, "*E F D"]:
        return E4M3.decode(buffers["data"]) * _spread(buffers["scale"], self.block, shape)


@dataclass(frozen=True)
class MXFP8(Format):
    """w = e4m3 * 2^(byte - 127), with a scale byte (e8m0) for each 32 along k, by OCP's MX specification 1.0.

    The byte is floor(log2(absmax)) - 8 + 127, 127 for zeros, and what then exceeds 448 saturates. This writes
    bytes from 10 to 246, whose products are all float32 normals; any other byte is read too, where products
    below 2^-126 are zero, those over float32 are infinite, and byte 255 is NaN.
    """

    group: int = 32

    def buffers(self, shape: Shape) -> Buffers:
        return {
            "data": jax.ShapeDtypeStruct(shape, jnp.uint8),
            "scale": jax.ShapeDtypeStruct((*shape[:-1], -(-shape[-1] // self.group)), jnp.uint8),
        }

    def quantize(self, values: Float[Array, "*E F D"]) -> dict[str, Array]:
        values = wide(values)
        most = _block_max(values, (1, self.group))
        exponent = jnp.where(most == 0, 0, jnp.clip(_floor_log2(most) - 8, 10 - 127, 127))
        inverse = _spread(_power_of_two(-exponent), (1, self.group), values.shape)
        byte = jnp.where(most == jnp.inf, 255, exponent + 127).astype(jnp.uint8)
        return {"data": E4M3.encode(values * inverse), "scale": byte}

    def dequantize(self, buffers: Mapping[str, Array], shape: Shape) -> Float[Array, "*E F D"]:
        byte = buffers["scale"].astype(jnp.int32)
        scale = jnp.where(byte == 255, jnp.nan, _power_of_two(jnp.maximum(byte, 1) - 127))
        scale, byte = (_spread(x, (1, self.group), shape) for x in (scale, byte))
        codes = E4M3.decode(buffers["data"])
        return jnp.where(byte == 0, codes / 2, codes) * scale  # 2^-127 itself is a subnormal


@dataclass(frozen=True)
class NVFP4(Format):
    """w = e2m1 * scale * scale_2: an e4m3 scale for each 16 along k, a float32 scale_2 for each expert.

    Two codes in a byte, even k in the low half. scale_2 is absmax / (6 * 448), 1 for zeros, and scale is
    absmax / (6 * scale_2) of the group. It rounds to 0, and the group with it, where absmax is below
    2^-10 / 448 of the expert's.
    """

    group: int = 16

    @property
    def rows(self) -> None:
        return None

    def buffers(self, shape: Shape) -> Buffers:
        *experts, f, d = shape
        groups = -(-d // self.group)
        return {
            "data": jax.ShapeDtypeStruct((*experts, f, groups * self.group // 2), jnp.uint8),
            "scale": jax.ShapeDtypeStruct((*experts, f, groups), jnp.uint8),
            "scale_2": jax.ShapeDtypeStruct(tuple(experts), jnp.float32),
        }

    def quantize(self, values: Float[Array, "*E F D"]) -> dict[str, Array]:
        values = wide(values)
        groups = _groups(values, self.group)
        most = _block_max(values, (1, self.group))[..., None]
        smallest = E2M1.smallest * E4M3.smallest
        scale_2 = _scale(most.max((-3, -2, -1)), E2M1.largest * E4M3.largest, smallest)
        unit = scale_2[..., None, None, None]

        def codes_and_scale(most: Array) -> tuple[Array, Array]:
            scale = E4M3.encode(divide(most, E2M1.largest * unit))
            product = E4M3.decode(scale) * unit
            return E2M1.encode(divide(groups, jnp.where(product == 0, jnp.inf, product))), scale

        def rounded(most: Array) -> Array:
            codes, scale = codes_and_scale(most)
            return E2M1.decode(codes) * (E4M3.decode(scale) * unit)

        codes, scale = codes_and_scale(_least_error(groups, most, self.factors, rounded))
        return {
            "data": pack_bits(codes.reshape(*values.shape[:-1], -1), 4, jnp.uint8),
            "scale": scale[..., 0],
            "scale_2": scale_2,
        }

    def dequantize(self, buffers: Mapping[str, Array], shape: Shape) -> Float[Array, "*E F D"]:
        codes = unpack_bits(buffers["data"], 4)[..., : shape[-1]]
        scale = _spread(E4M3.decode(buffers["scale"]), (1, self.group), shape)
        # The first product is exact.
        return E2M1.decode(codes) * scale * buffers["scale_2"][..., None, None]


FORMATS: dict[str, Format] = {
    entry.name: entry
    for entry in (
        Plain("bfloat16", jnp.bfloat16),
        Plain("float32", jnp.float32),
        Plain("float64", jnp.float64),  # for numerical derivatives, under jax_enable_x64
        Integers("int8", jnp.float32, 127, None, jnp.float32),
        Integers("int8_g64", jnp.float32, 127, 64, jnp.bfloat16),
        Integers("int4_g64", jnp.float32, 7, 64, jnp.bfloat16, (("data", 4),), factors=_SHRINK),
        Integers("int3_g64", jnp.float32, 3, 64, jnp.bfloat16, (("low", 2), ("high", 1)), factors=_SHRINK),
        FP8("fp8", jnp.float32),
        MXFP8("mxfp8", jnp.float32),
        NVFP4("nvfp4", jnp.float32, factors=(*_SHRINK, 1.5)),  # 1.5: the largest is 4 and not 6
    )
}
