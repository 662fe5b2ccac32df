"""The attention kernels against float64 numpy: interpreted here, compiled under `pytest -m gpu`.

The rule of tests/test_kernels.py: at most twice the error of the plain JAX reference. Every slot of every
page that a row does not hold is NaN, or has NaN for a scale.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.block_attention import triton as attention_triton
from pallas_kernels.block_attention.reference import attend, block_attention
from pallas_kernels.block_select.reference import block_select
from pallas_kernels.paging import PAGE_FORMATS, LayerPages, PagedRows, round_heads
from pallas_kernels.qk_norm_rope import triton as norm_rope_triton
from pallas_kernels.qk_norm_rope.reference import HeadLayout, HeadNorms, qk_norm_rope
from tests.conftest import lowered_for_cuda
from tests.test_kernels import BF16, MODES, assert_twice, f64

KV_FORMATS = [None, *PAGE_FORMATS]


@dataclass(frozen=True)
class Case:
    """Rows of these lengths, the last token of each being new."""

    lengths: tuple[int, ...]
    n_heads: int = 64
    n_kv_heads: int = 4
    head_dim: int = 128
    index_dim: int = 128
    block_size: int = 128
    top_blocks: int = 16
    local_blocks: int = 1
    init_blocks: int = 0
    n_blocks: int = 34
    index: str = "random"

    @property
    def choice(self) -> dict[str, int]:
        return {n: getattr(self, n) for n in ("top_blocks", "local_blocks", "init_blocks")}


ODD = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 24, "index_dim": 40, "block_size": 16, "n_blocks": 13}
CASES = {
    "around one block": Case((1, 127, 128, 129)),
    "around sixteen blocks": Case((2047, 2048, 2049, 4097)),
    "odd dims": Case((1, 17, 100, 190), top_blocks=4, local_blocks=2, init_blocks=1, **ODD),
    "blocks of 8": Case((1, 8, 40, 77), top_blocks=4, **ODD | {"block_size": 8}),
    "blocks of 72": Case((1, 72, 73, 450), top_blocks=4, **ODD | {"block_size": 72}),
    "one row, few of its blocks": Case((200,), top_blocks=3, init_blocks=1, **ODD),
    "more slots than blocks": Case((5, 40), top_blocks=16, **ODD),
    "negative scores": Case((200, 64), top_blocks=4, index="negative", **ODD),
    "tied scores": Case((208, 150), top_blocks=5, index="tied", **ODD),
    "many blocks": Case((5597, 1100, 230), top_blocks=5, **ODD | {"block_size": 8, "n_blocks": 700}),
    "many tied blocks": Case(
        (5597, 1100), top_blocks=7, index="tied", **ODD | {"block_size": 8, "n_blocks": 700}
    ),
}


@dataclass(frozen=True)
class Inputs:
    q: jax.Array
    index_q: jax.Array
    pages: LayerPages
    rows: PagedRows


def rounded(pages: LayerPages, kv_format: str) -> LayerPages:
    """Keys and values in that format; where they were NaN, the scale is NaN and fp8's code too."""
    held = ~jnp.isnan(pages.k[..., 0])
    nan = jnp.uint8(0x7F) if kv_format == "fp8" else jnp.int8(-128)
    codes, scales = [], []
    for a in (pages.k, pages.v):
        (c,), s = round_heads([jnp.nan_to_num(a)], PAGE_FORMATS[kv_format].dtype)
        codes.append(jnp.where(held[..., None], c, nan))
        scales.append(jnp.where(held, s, jnp.nan))
    return LayerPages(*codes, pages.index_k, *scales)


def numbers(codes: jax.Array, scale: jax.Array | None) -> np.ndarray:
    """What keys or values stand for."""
    if scale is None:
        return f64(codes)
    a = np.asarray(codes)
    a = a.view(ml_dtypes.float8_e4m3fn) if a.dtype == np.uint8 else a
    return a.astype(np.float64) * f64(scale)[..., None]


def inputs(case: Case, kv_format: str | None = None) -> Inputs:
    rng = np.random.default_rng(7)
    c, n_rows = case, len(case.lengths)
    n_pages = n_rows * c.n_blocks + 2
    table = rng.permutation(n_pages)[: n_rows * c.n_blocks].reshape(n_rows, c.n_blocks).astype(np.int32)
    held = np.zeros((n_pages, c.block_size), bool)
    for row, length in enumerate(c.lengths):
        p = np.arange(length)
        held[table[row, p // c.block_size], p % c.block_size] = True
    kv_shape = (n_pages, c.n_kv_heads, c.block_size, c.head_dim)
    k, v = (np.where(held[:, None, :, None], rng.standard_normal(kv_shape), np.nan) for _ in "kv")
    index_k = rng.standard_normal((n_pages, c.block_size, c.index_dim))
    index_q = rng.standard_normal((n_rows, 1, c.n_kv_heads, c.index_dim))
    if c.index == "negative":
        index_k, index_q = -np.abs(index_k), np.abs(index_q)
    if c.index == "tied":  # small integers: exact in any order, and equal in many blocks
        index_k, index_q = np.ones_like(index_k) * rng.integers(0, 2, (n_pages, 1, 1)), np.ones_like(index_q)
    index_k = np.where(held[..., None], index_k, np.nan)
    lengths = jnp.asarray(c.lengths, jnp.int32)
    n_blocks = -(-max(c.lengths) // c.block_size)
    pages = LayerPages(*(jnp.asarray(a, BF16) for a in (k, v, index_k)))
    return Inputs(
        jnp.asarray(rng.standard_normal((n_rows, 1, c.n_heads, c.head_dim)), BF16),
        jnp.asarray(index_q, BF16),
        pages if kv_format is None else rounded(pages, kv_format),
        PagedRows(jnp.asarray(table), lengths[:, None] - 1, lengths, n_blocks),
    )


def exact_choice(case: Case, i: Inputs) -> np.ndarray:
    """By scores in float64; equal scores go to the lower block."""
    q, keys, table = f64(i.index_q), f64(i.pages.index_k), np.asarray(i.rows.page_table)
    out = np.full((len(case.lengths), 1, case.n_kv_heads, min(case.top_blocks, case.n_blocks)), -1)
    for row, length in enumerate(case.lengths):
        own = (length - 1) // case.block_size
        own_keys = keys[table[row, : own + 1]].reshape(-1, case.index_dim)[:length]
        for head in range(case.n_kv_heads):
            s = np.pad(own_keys @ q[row, 0, head], (0, -length % case.block_size), constant_values=-np.inf)
            best = s.reshape(-1, case.block_size).max(-1)
            best[max(own - case.local_blocks + 1, 0) :] = np.inf
            best[: case.init_blocks] = np.inf
            chosen = np.sort(np.argsort(-best, kind="stable")[: case.top_blocks])
            out[row, 0, head, : len(chosen)] = chosen
    return out


def exact_attention(case: Case, i: Inputs, blocks: np.ndarray | None) -> np.ndarray:
    q, table = f64(i.q), np.asarray(i.rows.page_table)
    k, v = numbers(i.pages.k, i.pages.k_scale), numbers(i.pages.v, i.pages.v_scale)
    out, group = np.zeros(q.shape), case.n_heads // case.n_kv_heads
    for row, length in enumerate(case.lengths):
        for head in range(case.n_kv_heads):
            used = np.arange(-(-length // case.block_size)) if blocks is None else blocks[row, 0, head]
            used = used[used >= 0]
            position = (used[:, None] * case.block_size + np.arange(case.block_size)).reshape(-1)
            keys, values = (a[table[row, used], head].reshape(-1, case.head_dim) for a in (k, v))
            keys, values = keys[position < length], values[position < length]
            s = q[row, 0, head * group : (head + 1) * group] @ keys.T / np.sqrt(case.head_dim)
            p = np.exp(s - s.max(-1, keepdims=True))
            out[row, 0, head * group : (head + 1) * group] = p / p.sum(-1, keepdims=True) @ values
    return out


@pytest.mark.parametrize("name", CASES)
def test_block_select(name: str) -> None:
    case = CASES[name]
    i = inputs(case)
    got = jax.jit(partial(block_select, rows=i.rows, **case.choice))(i.index_q, i.pages.index_k)
    np.testing.assert_array_equal(got, exact_choice(case, i))


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("name", CASES)
def test_block_attention(name: str, dense: bool, kv_format: str | None, interpret: bool) -> None:
    case = CASES[name]
    i = inputs(case, kv_format)
    run = partial(attention_triton.block_attention, rows=i.rows, interpret=interpret, **case.choice)
    got, blocks = jax.jit(run)(i.q, None if dense else i.index_q, i.pages)
    chosen = None if dense else exact_choice(case, i)
    np.testing.assert_equal(blocks if blocks is None else np.asarray(blocks), chosen)
    reference = attend(i.q, i.pages, i.rows, blocks)
    assert_twice(got, reference, exact_attention(case, i, chosen))


def test_the_reference_attends_to_what_it_chooses() -> None:
    case = CASES["odd dims"]
    i = inputs(case)
    got, blocks = block_attention(i.q, i.index_q, i.pages, i.rows, **case.choice)
    np.testing.assert_array_equal(blocks, exact_choice(case, i))
    np.testing.assert_array_equal(got, attend(i.q, i.pages, i.rows, blocks))
    got, blocks = block_attention(i.q, None, i.pages, i.rows, **case.choice)
    assert blocks is None
    np.testing.assert_array_equal(got, attend(i.q, i.pages, i.rows, None))


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a_padding_token_gives_finite_numbers(kv_format: str | None, interpret: bool) -> None:
    """An idle row: its new token is not written, and its position is one that it does not hold."""
    case = CASES["odd dims"]
    i = inputs(case, kv_format)
    positions = i.rows.positions.at[1, 0].set(case.lengths[1])
    rows = PagedRows(i.rows.page_table, positions, i.rows.lengths.at[0].set(0), i.rows.n_blocks)
    for index_q in (i.index_q, None):
        run = partial(attention_triton.block_attention, interpret=interpret, **case.choice)
        out, blocks = run(i.q, index_q, i.pages, rows)
        assert np.all(np.isfinite(f64(out)))
        if blocks is not None:
            assert np.all((np.asarray(blocks) >= -1) & (np.asarray(blocks) < case.n_blocks))


def turned(x: np.ndarray, weight: np.ndarray, angle: np.ndarray, eps: float) -> np.ndarray:
    """Norm and rotation of one head in float64."""
    x = x / np.sqrt((x * x).mean() + eps) * (1 + weight)
    r = len(angle)
    a, b = x[:r], x[r : 2 * r]
    c, s = np.cos(angle), np.sin(angle)
    return np.concatenate([a * c - b * s, b * c + a * s, x[2 * r :]])


@dataclass(frozen=True)
class NewTokens:
    """Three rows with a new token each; the second is padding and writes nothing."""

    heads: list[jax.Array]  # of each kind in a layout
    weights: list[np.ndarray]
    angle: np.ndarray
    pages: LayerPages
    rows: PagedRows
    layout: HeadLayout
    norms: HeadNorms
    cos: jax.Array
    sin: jax.Array

    @property
    def written(self) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Rows that write, their pages and offsets there."""
        real, position = [0, 2], np.asarray(self.rows.positions)[:, 0]
        block_size = self.pages.k.shape[2]
        page = np.asarray(self.rows.page_table)[real, position[real] // block_size]
        return real, page, position[real] % block_size

    def run(self, function, pages: LayerPages):
        """Jitted where it is a kernel; else operation by operation."""
        x = jnp.concatenate([h.reshape(*h.shape[:2], -1) for h in self.heads], axis=-1)
        terms = jnp.stack([x.astype(jnp.float32) + 1024, jnp.full(x.shape, -1024.0)])  # of a sum that is x
        inputs = (terms, self.layout, self.norms, self.cos, self.sin)
        run = partial(function, *inputs, rows=self.rows, dtype=x.dtype, eps=1e-6)
        return run(pages=pages) if function is qk_norm_rope else jax.jit(lambda p: run(pages=p))(pages)


DIMS = pytest.mark.parametrize("dims", [(6, 2, 24, 40, 16, 5), (64, 4, 128, 128, 128, 32)], ids=["odd", "m3"])


def new_tokens(dims: tuple[int, ...], sparse: bool) -> NewTokens:
    n_heads, n_kv_heads, head_dim, index_dim, block_size, n_pairs = dims
    rng, n_rows, n_blocks = np.random.default_rng(3), 3, 4
    sizes = [(n_heads, head_dim), (n_kv_heads, head_dim), (n_kv_heads, head_dim)]
    sizes += [(n_kv_heads, index_dim), (1, index_dim)] if sparse else []
    heads = [jnp.asarray(rng.standard_normal((n_rows, 1, *s)), BF16) for s in sizes]
    weights = [
        (rng.standard_normal(d) * 0.3).astype(np.float32) for d in (head_dim, head_dim, index_dim, index_dim)
    ]
    angle = rng.uniform(-3, 3, (n_rows, 1, n_pairs))
    n_pages = n_rows * n_blocks + 1
    shape = (n_pages, n_kv_heads, block_size, head_dim)
    old = [
        jnp.asarray(rng.standard_normal(s), BF16) for s in (shape, shape, (n_pages, block_size, index_dim))
    ]
    table = rng.permutation(n_pages)[: n_rows * n_blocks].reshape(n_rows, n_blocks).astype(np.int32)
    positions = np.array([0, block_size, 3 * block_size - 1])
    lengths = positions + np.array([1, 0, 1])
    return NewTokens(
        heads,
        weights,
        angle,
        LayerPages(old[0], old[1], old[2] if sparse else None),
        PagedRows(
            jnp.asarray(table), jnp.asarray(positions[:, None], jnp.int32), jnp.asarray(lengths, jnp.int32), 4
        ),
        HeadLayout(n_heads, n_kv_heads, head_dim, index_dim if sparse else None),
        HeadNorms(*(jnp.asarray(w) if sparse or n < 2 else None for n, w in enumerate(weights))),
        *(jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin)),
    )


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@DIMS
def test_qk_norm_rope(dims: tuple[int, ...], sparse: bool, interpret: bool) -> None:
    """Queries, keys and values against float64."""
    t = new_tokens(dims, sparse)
    want = [f64(h) for h in t.heads]
    for kind, weight in ((0, 0), (1, 1), (3, 2), (4, 3)):
        if kind < len(want):
            for row, _, head in np.ndindex(want[kind].shape[:3]):
                x = want[kind][row, 0, head]
                want[kind][row, 0, head] = turned(x, f64(t.weights[weight]), t.angle[row, 0], 1e-6)
    reference = t.run(qk_norm_rope, t.pages)
    got = t.run(partial(norm_rope_triton.qk_norm_rope, interpret=interpret), t.pages)
    assert_twice(got[0], reference[0], want[0])
    if sparse:
        assert_twice(got[1], reference[1], want[3])
    names = ["k", "v", "index_k"] if sparse else ["k", "v"]
    for name, kind in zip(names, (1, 2, 4), strict=False):
        expected = f64(getattr(t.pages, name))
        for row, page, offset in zip(*t.written, strict=True):
            if name == "index_k":
                expected[page, offset] = want[kind][row, 0, 0]
            else:
                expected[page, :, offset] = want[kind][row, 0]
        assert_twice(getattr(got[2], name), getattr(reference[2], name), expected)


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("kv_format", PAGE_FORMATS)
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@DIMS
def test_new_keys_and_values_are_rounded(
    dims: tuple[int, ...], sparse: bool, kv_format: str, interpret: bool
) -> None:
    """The keys and values that the kernel writes to plain pages, rounded; nothing else changes.

    A head of zeros is among them, and one whose largest number is in the part that does not turn.
    Interpreted, codes and scales are the reference's; a GPU divides less exactly, so there the rule is of the
    numbers.
    """
    t = new_tokens(dims, sparse)
    for kind in (1, 2):
        t.heads[kind] = t.heads[kind].at[0, 0, 0].set(0).at[2, 0, 1, -1].set(50)
    run = partial(norm_rope_triton.qk_norm_rope, interpret=interpret)
    *plain_queries, plain = t.run(run, t.pages)
    nan = jnp.full(t.pages.k.shape[:-1], jnp.nan)
    pages = replace(rounded(t.pages, kv_format), k_scale=nan, v_scale=nan)
    *queries, got = t.run(run, pages)
    reference = t.run(qk_norm_rope, pages)[-1]
    for a, b in zip((*queries, got.index_k), (*plain_queries, plain.index_k), strict=True):
        np.testing.assert_array_equal(a, b)
    _, page, offset = t.written
    for name in ("k", "v"):
        codes, scale, written = (
            getattr(p, n) for p, n in ((got, name), (got, f"{name}_scale"), (plain, name))
        )
        (want_codes,), want_scale = round_heads([written[page, :, offset]], codes.dtype)
        new = [a[page, :, offset] for a in (codes, scale)]
        assert new[1][0, 0] == 1
        assert_twice(numbers(*new), numbers(want_codes, want_scale), f64(written[page, :, offset]))
        # Scales are products, which are the same everywhere.
        np.testing.assert_array_equal(new[1], want_scale)
        if interpret:
            np.testing.assert_array_equal(codes, getattr(reference, name))
            np.testing.assert_array_equal(scale, getattr(reference, f"{name}_scale"))
        for a, before in ((codes, getattr(pages, name)), (scale, nan)):
            a = np.asarray(a).copy()
            a[page, :, offset] = np.asarray(before)[page, :, offset]
            np.testing.assert_array_equal(a, before)


@pytest.mark.parametrize("device", ["NVIDIA A100-SXM4-80GB", "NVIDIA H200"])
@pytest.mark.parametrize("kv_format", PAGE_FORMATS)
def test_the_kernels_of_rounded_pages_lower_for_cuda(kv_format: str, device: str) -> None:
    """At M3's sizes, on a machine without a GPU; fp8 without what needs compute capability 8.9."""
    n_rows, n_blocks, n_pages, f32 = 2, 64, 256, jnp.float32
    code, shape = PAGE_FORMATS[kv_format].dtype, (n_pages, 4, 128)
    pages = LayerPages(
        *(jax.ShapeDtypeStruct((*shape, 128), code) for _ in "kv"),
        jax.ShapeDtypeStruct((n_pages, 128, 128), BF16),
        *(jax.ShapeDtypeStruct(shape, f32) for _ in "kv"),
    )
    projected = jax.ShapeDtypeStruct((2, n_rows, 1, (64 + 2 * 4 + 4 + 1) * 128), f32)
    norm, turn = jax.ShapeDtypeStruct((128,), f32), jax.ShapeDtypeStruct((n_rows, 1, 32), f32)
    integers = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((n_rows, n_blocks), (n_rows,)))

    def run(projected, norms, turn, pages, table, lengths):
        rows = PagedRows(table, lengths[:, None] - 1, lengths, n_blocks)
        layout = HeadLayout(64, 4, 128, 128)
        q, index_q, pages = norm_rope_triton.qk_norm_rope(
            projected, layout, norms, turn, turn, pages, rows, dtype=BF16, eps=1e-6
        )
        attend = partial(attention_triton.block_attention, **Case(()).choice)
        return [attend(q, index, pages, rows)[0] for index in (index_q, None)], pages

    text = lowered_for_cuda(run, projected, HeadNorms(*[norm] * 4), turn, pages, *integers, device=device)
    assert text.count("__gpu$xla.gpu.triton") == 6
