"""Weight formats against float64 numpy and ml_dtypes, which share no code with them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from mmx_jax.config import ModelConfig, bundled
from mmx_jax.model import abstract_model
from mmx_jax.params import Weight
from mmx_jax.plan import memory_plan
from mmx_jax.recipes import Recipe
from pallas_kernels.formats import FORMATS, Format, pack_bits, unpack_bits
from pallas_kernels.qtensor import QTensor

E4M3, E2M1, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu
BF16 = ml_dtypes.bfloat16
LARGEST = {"int8": 127, "int8_g64": 127, "int4_g64": 7, "int3_g64": 3}
GROUP = {"int8": None, "int8_g64": 64, "int4_g64": 64, "int3_g64": 64}
QUANTISED = [*LARGEST, "fp8", "mxfp8", "nvfp4"]
TINY = 2.0**-126
every = pytest.mark.parametrize("name", QUANTISED)
integers = pytest.mark.parametrize("name", LARGEST)

SEARCHED = ["int4_g64", "int3_g64", "nvfp4"]
FACTORS = (1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)


def to_nearest(name: str) -> Format:
    """The format without its search for better scales."""
    return dataclasses.replace(FORMATS[name], factors=()) if name in SEARCHED else FORMATS[name]


quantize = {name: jax.jit(to_nearest(name).quantize) for name in FORMATS}
dequantize = {name: jax.jit(FORMATS[name].dequantize, static_argnums=1) for name in FORMATS}


def sample(*shape: int, seed: int = 0, magnitude: float = 1.0) -> np.ndarray:
    """Normal, with outliers and a wide range of row sizes, a zero row and a zero group."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=shape) * 2.0 ** rng.integers(-3, 4, (*shape[:-1], 1))
    w[rng.random(shape) < 0.005] *= 50
    w[..., 1, :] = 0
    w[..., 2, :64] = 0
    return (w * magnitude).astype(np.float32)


def numpy_of(buffers: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    return {name: np.asarray(b) for name, b in buffers.items()}


def decoded(name: str, buffers: dict[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    out = dequantize[name]({k: jnp.asarray(v) for k, v in buffers.items()}, shape)
    assert out.dtype == jnp.float32
    assert out.shape == shape
    return np.asarray(out)


# --- the definition again, in float64 ---


def block_max(w: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    f, d = w.shape[-2:]
    found = np.zeros((*w.shape[:-2], math.ceil(f / block[0]), math.ceil(d / block[1])))
    for i in range(found.shape[-2]):
        for j in range(found.shape[-1]):
            part = w[..., i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            found[..., i, j] = np.abs(part).max((-2, -1))
    return found


def spread(scale: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    return scale[..., np.arange(shape[-2])[:, None] // block[0], np.arange(shape[-1]) // block[1]]


def half_ulp(x: np.ndarray, mantissa: int, min_exponent: int) -> np.ndarray:
    exponent = np.frexp(np.maximum(np.abs(x), 2.0**min_exponent))[1] - 1
    return 2.0 ** (exponent - mantissa - 1)


def nearest(x: np.ndarray, dtype: type, n_codes: int) -> np.ndarray:
    """The closest of a dtype's numbers, half to the even code (casts of ml_dtypes go by way of float32)."""
    numbers = np.arange(n_codes, dtype=np.uint8).view(dtype).astype(np.float64)
    middle = (numbers[1:] + numbers[:-1]) / 2
    code = np.searchsorted(middle, np.abs(x))
    odd_tie = np.isin(np.abs(x), middle) & (code % 2 == 1)
    return np.copysign(numbers[code + odd_tie], x)


def definition(
    name: str, w: np.ndarray, factor: float = 1
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Scales as stored, unpacked codes (integers, or float64 numbers) and a bound on |w - dequantised|.

    `factor`: scales for so much of each group's largest magnitude.
    """
    w = w.astype(np.float64)
    if name in LARGEST:
        block = (1, GROUP[name] or w.shape[-1])
        most = block_max(w, block) * factor
        scale = np.where(most == 0, 1, most / LARGEST[name]).astype(np.float32)
        scale = scale.astype(BF16) if GROUP[name] else scale
        s = spread(scale.astype(np.float64), block, w.shape)
        codes = np.clip(np.rint(w / s), -LARGEST[name], LARGEST[name])
        bound = np.maximum(s / 2, np.abs(w) - LARGEST[name] * s)
        return {"scale": scale if GROUP[name] else scale[..., 0]}, codes, bound
    if name == "fp8":
        most = block_max(w, (128, 128))
        scale = np.where(most == 0, 1, most / 448).astype(np.float32)
        s = spread(scale.astype(np.float64), (128, 128), w.shape)
        codes = nearest(w / s, E4M3, 127)
        return {"scale": scale}, codes, half_ulp(w / s, 3, -6) * s
    if name == "mxfp8":
        most = block_max(w, (1, 32))
        exponent = np.where(most == 0, 0, np.frexp(most)[1] - 1 - 8)
        s = spread(2.0**exponent, (1, 32), w.shape)
        codes = nearest(w / s, E4M3, 127)
        # From 448 to 512 it saturates.
        return (
            {"scale": (exponent + 127).astype(np.uint8)},
            codes,
            np.maximum(half_ulp(w / s, 3, -6), np.abs(w / s) - 448) * s,
        )
    most = block_max(w, (1, 16))
    total = most.max((-2, -1))
    scale_2 = np.where(total == 0, 1, total / (6 * 448)).astype(np.float32)
    s_2 = scale_2.astype(np.float64)[..., None, None]
    scale = nearest(most * factor / (6 * s_2), E4M3, 127).astype(E4M3)
    s = spread(scale.astype(np.float64) * s_2, (1, 16), w.shape)
    x = np.divide(w, s, out=np.zeros_like(w), where=s > 0)
    codes = nearest(x, E2M1, 8)
    # A group may be larger than 6 by half an ulp of its scale, which is 1 / 16 of it for normal scales.
    bound = np.where(s > 0, np.maximum(half_ulp(x, 1, 0), np.abs(x) - 6) * s, np.abs(w))
    return {"scale": scale.view(np.uint8), "scale_2": scale_2}, codes, bound


def unpacked(name: str, buffers: dict[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """The codes of the buffers as numbers, bit by bit in Python; also those that pad a group."""
    if name in ("int8", "int8_g64"):
        return buffers["data"].astype(np.float64)
    if name in ("fp8", "mxfp8"):
        return buffers["data"].view(E4M3).astype(np.float64)
    group = 16 if name == "nvfp4" else 64
    padded = math.ceil(shape[-1] / group) * group
    out = np.zeros((*shape[:-1], padded))
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for row in np.ndindex(*shape[:-1]):
        for k in range(padded):
            if name == "nvfp4":
                code = int(buffers["data"][row][k // 2]) >> (4 if k % 2 else 0) & 15
                out[(*row, k)] = (-1 if code & 8 else 1) * e2m1[code & 7]
            elif name == "int4_g64":
                out[(*row, k)] = (int(buffers["data"][row][k // 8]) >> (4 * (k % 8)) & 15) - 8
            else:
                low = int(buffers["low"][row][k // 16]) >> (2 * (k % 16)) & 3
                high = int(buffers["high"][row][k // 32]) >> (k % 32) & 1
                out[(*row, k)] = low + 4 * high - 4
    return out


SHAPE = (2, 3, 100)  # one for most tests: compiling takes most of their time


@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize(
    ("name", "shape"), [*((name, SHAPE) for name in QUANTISED), ("fp8", (131, 150)), ("int4_g64", (4, 128))]
)
def test_quantises_as_defined(name: str, shape: tuple[int, ...], magnitude: float):
    w = sample(*shape, magnitude=magnitude)
    got = numpy_of(quantize[name](w))
    expected = {k: (b.shape, b.dtype) for k, b in FORMATS[name].buffers(shape).items()}
    assert {k: (b.shape, b.dtype) for k, b in got.items()} == expected
    assert FORMATS[name].nbytes(shape) == sum(b.nbytes for b in got.values())
    scales, codes, bound = definition(name, w)
    for key, scale in scales.items():
        np.testing.assert_array_equal(got[key], scale)
    found = unpacked(name, got, shape)
    np.testing.assert_array_equal(found[..., : shape[-1]], codes)
    assert not found[..., shape[-1] :].any()
    values = decoded(name, got, shape).astype(np.float64)
    slack = 1 + 2.0**-22  # scales and products are rounded to float32
    assert np.all(np.abs(values - w) <= bound * slack + np.abs(values) * 2.0**-24)
    assert not values[..., 1, :].any()


@pytest.mark.parametrize("name", SEARCHED)
def test_scales_are_those_that_lose_least(name: str):
    """Each group has the scale of one of the factors, and no other loses less squared error."""
    w = sample(*SHAPE, seed=5)
    group = GROUP.get(name, 16)
    assert group is not None
    got = numpy_of(jax.jit(FORMATS[name].quantize)(w))
    found = decoded(name, got, w.shape).astype(np.float64)
    factors = (*FACTORS, 1.5) if name == "nvfp4" else FACTORS
    tried, scales = [], []
    for factor in factors:
        stored, codes, _ = definition(name, w, factor)
        scale = stored["scale"].view(E4M3) if name == "nvfp4" else stored["scale"]
        unit = stored["scale_2"].astype(np.float64)[..., None, None] if name == "nvfp4" else 1
        tried.append(codes * spread(scale.astype(np.float64) * unit, (1, group), w.shape))
        scales.append(stored["scale"])

    def errors(values: np.ndarray) -> np.ndarray:
        squares = np.pad((w - values) ** 2, [(0, 0), (0, 0), (0, -w.shape[-1] % group)])
        return squares.reshape(*w.shape[:-1], -1, group).sum(-1)

    least = np.min([errors(values) for values in tried], axis=0)
    np.testing.assert_array_less(
        errors(found), least * (1 + 1e-5) + 1e-30
    )  # float32 sums of up to 64 squares
    chosen = [np.asarray(got["scale"] == scale) for scale in scales]
    assert np.any(chosen, axis=0).all()
    assert len([c for c in chosen if c.any()]) >= 6  # the sample needs many of them


@pytest.mark.parametrize(("name", "share"), [("int4_g64", 0.94), ("int3_g64", 0.84), ("nvfp4", 0.89)])
def test_the_search_is_worth_it(name: str, share: float):
    """Root mean square error on normal weights, of that without the search."""
    w = np.random.default_rng(1).normal(size=(64, 1024)).astype(np.float32)
    searched, plain = (
        np.square(decoded(name, numpy_of(form.quantize(jnp.asarray(w))), w.shape) - w).sum()
        for form in (FORMATS[name], to_nearest(name))
    )
    assert (searched / plain) ** 0.5 < share


@every
def test_an_expert_is_the_weight_of_that_expert(name: str):
    w = sample(*SHAPE)
    w[1] *= 100  # so that a scale of all experts would show
    q = QTensor(name, w.shape, quantize[name](w))
    one = q.expert(jnp.asarray(1))
    assert one.shape == SHAPE[1:]
    shapes = {k: b.shape for k, b in FORMATS[name].buffers(SHAPE[1:]).items()}
    assert {k: b.shape for k, b in one.buffers.items()} == shapes
    expected = decoded(name, numpy_of(q.buffers), SHAPE)[1]
    np.testing.assert_array_equal(decoded(name, numpy_of(one.buffers), one.shape), expected)
    np.testing.assert_array_equal(
        definition(name, w[1])[1], unpacked(name, numpy_of(q.buffers), SHAPE)[1, :, :100]
    )


# --- dequantised values of every code ---


def test_every_fp8_code():
    codes = np.tile(np.arange(256, dtype=np.uint8), (130, 1))
    scale = np.array([[0.37, 1.0], [3e-20, 7e25]], np.float32)
    expected = codes.view(E4M3).astype(np.float64) * spread(scale, (128, 128), codes.shape).astype(np.float64)
    got = decoded("fp8", {"data": codes, "scale": scale}, codes.shape)
    np.testing.assert_array_equal(got, expected.astype(np.float32))  # NaN where 0x7f and 0xff are
    assert np.isnan(got).sum() == 2 * 130


def test_every_mxfp8_code_with_every_scale():
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    byte = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    factor = np.repeat(byte.view(E8M0).astype(np.float64), 32, axis=1)
    with np.errstate(over="ignore"):
        expected = (codes.view(E4M3).astype(np.float64) * factor).astype(np.float32)
    expected[np.abs(expected) < TINY] = 0
    got = decoded("mxfp8", {"data": codes, "scale": byte}, codes.shape)
    np.testing.assert_array_equal(got, expected)
    assert np.isnan(got[255]).all()
    exact = np.isfinite(codes.view(E4M3).astype(np.float32))[0]
    assert np.isfinite(got[:247, exact]).all()
    assert np.isinf(got[247]).any()
    assert (got[10, exact] != 0).sum() == 252  # all but +0 and -0; NaNs apart
    assert (got[9, exact] != 0).sum() < 252


def test_every_nvfp4_code_with_every_scale():
    data = np.tile(np.arange(0, 16, 2, dtype=np.uint8) * 17 + 16, (256, 1))  # 0x10, 0x32, ...: code k at k
    scale = np.arange(256, dtype=np.uint8)[:, None]
    scale_2 = np.float32(0.0123)
    e2m1 = np.arange(16, dtype=np.uint8).view(E2M1).astype(np.float64)
    expected = e2m1 * scale.view(E4M3).astype(np.float64) * np.float64(scale_2)
    got = decoded("nvfp4", {"data": data, "scale": scale, "scale_2": scale_2}, (256, 16))
    np.testing.assert_array_equal(got, expected.astype(np.float32))


@integers
def test_every_integer_code(name: str):
    largest = LARGEST[name]
    codes = np.resize(np.arange(-largest - 1, largest + 1), 256)  # also the one that quantising never writes
    if largest == 7:
        assert codes[:16].astype(ml_dtypes.int4).astype(int).tolist() == codes[:16].tolist()
    offset = codes + largest + 1
    scale = np.full(4, 0.0371).astype(BF16)[None]
    words = {"scale": scale}
    if largest == 127:
        words["data"] = codes.astype(np.int8)[None]
    elif largest == 7:
        words["data"] = np.array(
            [[sum(int(offset[8 * w + j]) << (4 * j) for j in range(8)) for w in range(32)]], np.uint32
        )
    else:
        words["low"] = np.array(
            [[sum((int(offset[16 * w + j]) & 3) << (2 * j) for j in range(16)) for w in range(16)]], np.uint32
        )
        words["high"] = np.array(
            [[sum((int(offset[32 * w + j]) >> 2) << j for j in range(32)) for w in range(8)]], np.uint32
        )
    if GROUP[name] is None:
        words["scale"] = scale = scale[:, 0].astype(np.float32)
    got = decoded(name, words, (1, 256))
    np.testing.assert_array_equal(got, (codes * scale.ravel()[0].astype(np.float64)).astype(np.float32)[None])


# --- rounding ---


@integers
def test_integers_round_half_to_even(name: str):
    """Against a scale such as 0.0131, so that a reciprocal in place of the division is found out."""
    largest = LARGEST[name]
    scales = np.linspace(0.0131, 0.0257, 400).astype(BF16).astype(np.float32)[:, None]
    ties = np.resize(np.arange(-largest, largest) + 0.5, (400, 63)).astype(np.float32)
    ties[:, :] = np.stack([np.roll(row, i) for i, row in enumerate(ties)])
    w = np.concatenate([np.full((400, 1), largest, np.float32), ties], 1) * scales  # all exact
    got = numpy_of(quantize[name](w))
    np.testing.assert_array_equal(got["scale"].astype(np.float32).reshape(400), scales[:, 0])
    found = unpacked(name, got, w.shape)
    np.testing.assert_array_equal(found[:, 1:], np.rint(ties.astype(np.float64)))


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_e4m3_rounds_half_to_even(name: str):
    numbers = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
    ties = (numbers[1:] + numbers[:-1]) / 2
    pairs = np.repeat(numbers, 2)[1:-1].reshape(-1, 2)  # the neighbours of each tie
    below, above = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(500))
    x = np.concatenate([ties, below, above, -ties])
    w = np.full((x.size, 32), 448, np.float32)
    w[:, 1] = x
    codes = numpy_of(quantize[name](w))["data"][:, 1]
    even = np.arange(126) + np.arange(126) % 2
    np.testing.assert_array_equal(codes[:126], even)
    np.testing.assert_array_equal(codes[126:378].view(E4M3).astype(np.float32), pairs.T.ravel())
    np.testing.assert_array_equal(codes[378:], even | 0x80)


def test_e2m1_rounds_half_to_even():
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    w = np.array([[6 * 448, *(448 * ties), *(-448 * ties), 0]], np.float32)
    got = unpacked("nvfp4", numpy_of(quantize["nvfp4"](w)), w.shape)[0]
    even = np.array([0, 1, 1, 2, 2, 4, 4])
    np.testing.assert_array_equal(got, [6, *even, *-even, 0])


@every
def test_quantising_again_changes_nothing(name: str):
    """The codes always, the scale to an ulp where it is a float32 and times `largest` is rounded (int8, fp8).

    Not so for nvfp4 groups whose scale is subnormal in e4m3 (below 2^-6): their largest code need not be 6.
    """
    w = sample(*SHAPE)
    first = numpy_of(quantize[name](w))
    second = numpy_of(quantize[name](decoded(name, first, w.shape)))
    for key in first:
        if first[key].dtype == np.float32:
            np.testing.assert_allclose(second[key], first[key], rtol=2.0**-22)
        elif name == "nvfp4":
            normal = (first["scale"] >= 8) | (first["scale"] == 0)
            assert normal.mean() > 0.8
            same = second[key] == first[key]
            assert same[normal if key == "scale" else np.repeat(normal, 8, axis=-1)].all()
        else:
            np.testing.assert_array_equal(second[key], first[key])


# --- range ---


@every
def test_what_is_below_the_range_goes_to_the_nearest_of_what_there_is(name: str):
    w = np.zeros(SHAPE, np.float32)
    w[0, 0] = np.linspace(-1, 1, 100) * 2e-38
    w[0, 1, :2] = 2e-38, 1e-44  # a subnormal is a zero to XLA
    got = decoded(name, numpy_of(quantize[name](w)), w.shape)
    assert not got[1].any()
    assert np.all(np.abs(got - w) <= TINY * (6 if name == "nvfp4" else 1))  # a whole group may go to zero


@every
def test_what_is_above_the_range_saturates(name: str):
    w = np.zeros(SHAPE, np.float32)
    w[0, 0, :3] = np.finfo(np.float32).max, -(2.0**127), 2.0**120
    got = decoded(name, numpy_of(quantize[name](w)), w.shape)
    top = 2.0**127 * (1.75 if name == "mxfp8" else 1)
    np.testing.assert_allclose(got[0, 0, :2], [top, -(2.0**127)], rtol=2.0**-8)


@every
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_pass_for_a_number(name: str, bad: float):
    w = sample(*SHAPE)
    w[0, 0, 70] = bad
    got = decoded(name, numpy_of(quantize[name](w)), w.shape)
    assert np.isnan(got[0, 0, 70])
    assert np.isfinite(got[1]).all()


# --- other dtypes ---


@every
def test_takes_bfloat16(name: str):
    w = sample(*SHAPE).astype(BF16)
    got, expected = numpy_of(quantize[name](w)), numpy_of(quantize[name](w.astype(np.float32)))
    for key in expected:
        np.testing.assert_array_equal(got[key], expected[key])


@every
def test_takes_float64(name: str):
    """As float64: a number just off a tie is not rounded to it first."""
    w = sample(*SHAPE).astype(np.float64) * (1 + 1e-9)
    off = {"fp8": (448, 17, 18), "mxfp8": (448, 17, 18), "nvfp4": (6, 1.25, 1.5)}
    largest, tie, expected = off.get(name, (LARGEST.get(name), 0.5, 1))
    unit = 448 if name == "nvfp4" else 1
    w[0, 0] = 0
    w[0, :, 0] = largest * unit
    w[0, 0, 1] = tie * unit * (1 + 1e-12)
    w[0, 1:] = 0
    with jax.enable_x64(True):
        got = numpy_of(quantize[name](jnp.asarray(w)))
        assert decoded(name, got, SHAPE).dtype == np.float32
    scales, codes, _ = definition(name, w)
    found = unpacked(name, got, SHAPE)[..., :100]
    assert found[0, 0, 1] == expected
    np.testing.assert_array_equal(found, codes)
    for key, scale in scales.items():
        np.testing.assert_array_equal(got[key], scale)


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_plain_formats_are_casts(name: str):
    w = sample(3, 100)
    got = FORMATS[name].quantize(jnp.asarray(w))
    back = FORMATS[name].dequantize(got, w.shape)
    assert back.dtype == FORMATS[name].dtype
    np.testing.assert_array_equal(np.asarray(back), w.astype(name))


# --- bytes ---


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("bfloat16", 16),
        ("float64", 64),
        ("int8", 8 + 32 / 6144),
        ("int8_g64", 8.25),
        ("int4_g64", 4.25),
        ("int3_g64", 3.25),
        ("fp8", 8 + 32 / 128**2),
        ("mxfp8", 8.25),
        ("nvfp4", 4.5 + 32 / (3072 * 6144)),
    ],
)
def test_bits_per_weight(name: str, bits: float):
    shape = (4, 3072, 6144)
    assert FORMATS[name].nbytes(shape) * 8 == bits * math.prod(shape)


# --- packing ---


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from([(1, np.uint32), (2, np.uint32), (4, np.uint32), (4, np.uint8)]),
    st.integers(1, 2),
    st.integers(0, 2**32 - 1),
)
def test_packing_round_trip(layout: tuple[int, type], words: int, seed: int):
    bits, word = layout
    per_word = np.dtype(word).itemsize * 8 // bits
    fields = np.random.default_rng(seed).integers(0, 1 << bits, (2, words * per_word))
    packed = pack_bits(jnp.asarray(fields), bits, word)
    assert packed.dtype == word
    for row in range(2):
        number = sum(int(f) << (bits * k) for k, f in enumerate(fields[row]))  # one long little-endian number
        width = np.dtype(word).itemsize
        assert np.asarray(packed)[row].tobytes() == number.to_bytes(words * width, "little")
    np.testing.assert_array_equal(np.asarray(unpack_bits(packed, bits)), fields)


# --- in the module tree ---


def test_a_weight_of_the_model_takes_the_format():
    name = "int4_g64"
    weight = Weight(SHAPE, name, rngs=nnx.Rngs(0))
    w = sample(*SHAPE)
    weight.set(jnp.asarray(w))
    expected = decoded(name, numpy_of(FORMATS[name].quantize(jnp.asarray(w))), w.shape)
    np.testing.assert_array_equal(np.asarray(weight.tensor().dequantize()), expected)


def test_the_memory_plan_counts_the_bytes_of_the_format():
    config = ModelConfig.from_file(bundled("tiny.json"))
    plan = memory_plan(abstract_model(config, "bfloat16", Recipe({"head": "int4_g64", "*": "int8"})), 1, 64)
    shape = (config.vocab_size, config.hidden_size)
    assert plan.parameters["output head"] == math.prod(shape)
    assert plan.weight_bytes["output head"] == FORMATS["int4_g64"].nbytes(shape)
    assert plan.weight_bytes["embedding"] == 2 * math.prod(shape)
