"""The inline assembly that unpacks weights against what interpreted kernels do, without a GPU.

An emulator of the few instructions that it uses takes the place of the compiler's primitive, for every code
of every format at every place in a word.
"""

import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tiles
from pallas_kernels.tiles import TILE_FORMATS, TileFormat

Register = np.ndarray  # uint32, one for each pair of neighbours


def halves(x: Register) -> np.ndarray:
    """The numbers of a bf16x2, in float64."""
    bits = np.stack([x & 0xFFFF, x >> 16]).astype(np.uint32) << 16
    return bits.view(np.float32).astype(np.float64)


def bf16x2(values: np.ndarray) -> Register:
    """Numbers as a bf16x2, which they have to be without rounding."""
    bits = values.astype(np.float32).view(np.uint32)
    np.testing.assert_array_equal(halves(bits[0] >> 16 | bits[1] & 0xFFFF0000), values)
    return bits[0] >> 16 | bits[1] & 0xFFFF0000


def prmt(a: Register, b: Register, selector: Register) -> Register:
    both = a.astype(np.uint64) | b.astype(np.uint64) << 32
    out = np.zeros_like(both)
    for i in range(4):
        chosen = selector >> 4 * i & 0xF
        assert (chosen < 8).all()  # no sign in place of the byte
        out |= (both >> 8 * chosen & 0xFF) << 8 * i
    return out.astype(np.uint32)


def lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    out = np.zeros_like(a)
    for i in range(8):
        if (table >> i & 1).all():
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def turn_right(low: Register, high: Register, n: Register) -> Register:
    return ((high.astype(np.uint64) << 32 | low) >> n).astype(np.uint32)


INSTRUCTIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, n: a << n,
    "shr.b32": lambda a, n: a >> n,
    "shf.r.wrap.b32": turn_right,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "add.rn.bf16x2": lambda a, b: bf16x2(halves(a) + halves(b)),
    "sub.rn.bf16x2": lambda a, b: bf16x2(halves(a) - halves(b)),
    "fma.rn.bf16x2": lambda a, b, c: bf16x2(halves(a) * halves(b) + halves(c)),
}


def execute(code: str, registers: dict[str, Register], outputs: int) -> list[Register]:
    shape = registers[f"${outputs}"].shape
    for statement in code.strip("{} ").split(";"):
        name, _, operands = statement.strip().partition(" ")
        if name in ("", ".reg"):
            continue
        target, *sources = re.split(r",\s*", operands)
        values = [registers[s] if s in registers else np.full(shape, int(s, 0), np.uint32) for s in sources]
        registers[target] = INSTRUCTIONS[name](*values)
    return [registers[f"${i}"] for i in range(outputs)]


def emulated(
    asm: str, *, args: Sequence[jax.Array], constraints: str, pack: int, result_shape_dtypes: Sequence
) -> list[jax.Array]:
    """`elementwise_inline_asm`: `pack` neighbours of an argument fill its registers, low bits first."""
    inputs: list[Register] = []
    for a in args:
        count = pack * a.dtype.itemsize // 4
        inputs += list(np.ascontiguousarray(a).reshape(-1, pack).view(np.uint32).T)
        assert inputs[-1].size * pack == a.size
        assert count >= 1
    outputs = constraints.count("=")
    assert constraints == ",".join(["=r"] * outputs + ["r"] * len(inputs))
    (result,) = result_shape_dtypes
    registers = {f"${outputs + i}": register for i, register in enumerate(inputs)}
    found = np.stack(execute(asm, registers, outputs), axis=-1)
    return [jnp.asarray(np.ascontiguousarray(found).view(result.dtype).reshape(result.shape))]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles.plt, "elementwise_inline_asm", emulated)


def words(form: TileFormat) -> jax.Array:
    """A tile in which every field, of the even and of the odd words, has every code."""
    rng = np.random.default_rng(1)
    codes = np.zeros((64, len(form.fields), form.width), np.uint32)
    for j in range(len(form.fields)):
        for parity in (0, 1):
            count = 64 * form.width // 2
            codes[:, j, parity::2] = rng.permutation(count).reshape(64, -1) % (1 << form.bits)
    if form is TILE_FORMATS["fp8"] or form is TILE_FORMATS["mxfp8"]:
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    codes = jnp.asarray(codes).astype(form.word) << jnp.array(form.fields, form.word)[:, None]
    data = form.shuffle(jnp.sum(codes, axis=1, dtype=form.word))
    return data.view(jnp.int32) if form.word == jnp.uint32 else data


@pytest.mark.parametrize("name", [name for name, form in TILE_FORMATS.items() if form.fields])
def test_every_code(name: str, no_compiler: None) -> None:
    form = TILE_FORMATS[name]
    data = words(form)
    factors: list[jax.Array] = []
    if form.factors is not None:
        # Every scale there is: 2^-9 to 448.
        scales = jnp.asarray(np.random.default_rng(2).integers(96, 239, (64, 32), np.uint8))
        factors = [form.factors(scales.view(jnp.int32), m) for m in range(form.tiles)]
    for j in range(len(form.fields)):
        for factor in factors or [None]:
            more = [] if factor is None else [factor]
            got, wanted = (form.unpack(data, j, interpret, *more) for interpret in (False, True))
            assert got.dtype == wanted.dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))


def test_e4m3_as_it_lies(no_compiler: None) -> None:
    codes = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])[None, :252]
    got, wanted = (tiles.e4m3_to_bfloat16(jnp.asarray(codes), interpret) for interpret in (False, True))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))


def test_scales_of_nvfp4() -> None:
    codes = jnp.arange(1, 127, dtype=jnp.uint8)
    bits = tiles._e5m3(codes)
    np.testing.assert_array_equal(tiles._e5m3_scale(bits.astype(jnp.int32)), tiles.E4M3.decode(codes))
    assert np.isnan(tiles._e5m3_scale(tiles._e5m3(jnp.array([127], jnp.uint8)).astype(jnp.int32))).all()
