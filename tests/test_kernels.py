"""The Pallas kernels against the references: interpreted here, compiled under `pytest -m gpu`.

The rule: a kernel's error against float64 arithmetic on the same dequantised weights is at most twice that of
the plain JAX reference in the same working precision (plus one rounding of float32, where that error is 0).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import workloads
from pallas_kernels.formats import FORMATS
from pallas_kernels.moe import triton as moe_triton
from pallas_kernels.moe.reference import ExpertWeights
from pallas_kernels.moe.reference import moe as moe_reference
from pallas_kernels.moe.routing import Routing, make_routing
from pallas_kernels.qmatmul import triton as qmatmul_triton
from pallas_kernels.qmatmul.reference import qmatmul as qmatmul_reference
from pallas_kernels.qtensor import QTensor
from pallas_kernels.tiles import TILE_FORMATS, pack
from tests.conftest import lowered_for_cuda

BF16 = jnp.bfloat16
ALPHA, LIMIT = 1.702, 7.0

# interpret, and whether the test needs a GPU
MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="compiled", marks=pytest.mark.gpu)]
FORMAT_NAMES = sorted(TILE_FORMATS)


def weight(form: str, shape: tuple[int, ...], seed: int) -> QTensor:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32) * shape[-1] ** -0.5
    return QTensor(form, shape, FORMATS[form].quantize(jnp.asarray(values)))


def tokens(shape: tuple[int, int], seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(BF16)


def f64(a: jax.Array) -> np.ndarray:
    return np.asarray(a).astype(np.float64)


def assert_twice(got: jax.Array, reference: jax.Array, exact: np.ndarray) -> None:
    assert np.isfinite(f64(got)).all()
    allowed = 2 * np.linalg.norm(f64(reference) - exact) + 2.0**-23 * np.linalg.norm(exact)
    assert np.linalg.norm(f64(got) - exact) <= allowed


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("form", FORMAT_NAMES)
@pytest.mark.parametrize(("f", "d", "t"), [(130, 700, 3), (64, 1024, 16), (192, 320, 128), (72, 96, 1)])
def test_qmatmul(form: str, f: int, d: int, t: int, interpret: bool) -> None:
    w, x = weight(form, (f, d), 1), tokens((t, d), 2)
    got = jax.jit(partial(qmatmul_triton.qmatmul, interpret=interpret))(x, pack(w))
    assert got.shape == (t, f)
    # int4 and int8 values times scales need not be bfloat16; the kernel scales sums, the reference rounds.
    exact = f64(x) @ f64(w.dequantize()).T
    assert_twice(got, qmatmul_reference(x, w), exact)


def routing(kind: str, n_tokens: int, n_experts: int, top_k: int) -> Routing:
    rng = np.random.default_rng(3)
    chosen = np.stack([rng.permutation(n_experts)[:top_k] for _ in range(n_tokens)])
    if kind == "one expert":
        chosen[:, 0] = n_experts - 1
        chosen[:, 1:] = np.arange(top_k - 1)
    weights = rng.uniform(0.1, 1, chosen.shape).astype(np.float32)
    valid = np.arange(n_tokens) != (1 if kind == "padding" else -1)
    arrays = (jnp.asarray(a) for a in (chosen.astype(np.int32), weights, valid))
    return make_routing(*arrays, n_experts)


def moe_exact(x: jax.Array, r: Routing, gate: QTensor, up: QTensor, down: QTensor) -> np.ndarray:
    """Float64 throughout, but for the hidden activations, which are bfloat16 by definition."""
    g, u, d = (f64(w.dequantize()) for w in (gate, up, down))
    out = np.zeros((x.shape[0], down.shape[1]))
    for t, (experts, weights) in enumerate(zip(np.asarray(r.experts), f64(r.weights), strict=True)):
        for e, p in zip(experts, weights, strict=True):
            if e == gate.shape[0]:
                continue
            a, b = np.minimum(g[e] @ f64(x[t]), LIMIT), np.clip(u[e] @ f64(x[t]), -LIMIT, LIMIT)
            out[t] += p * (d[e] @ ((b + 1) * a / (1 + np.exp(-ALPHA * a))).astype(BF16).astype(np.float64))
    return out


def poisoned(w: QTensor, experts: np.ndarray) -> QTensor:
    """NaN in these experts, where a buffer can hold one."""
    buffers = {
        name: b.at[experts].set(jnp.nan) if jnp.issubdtype(b.dtype, jnp.floating) else b
        for name, b in w.buffers.items()
    }
    return QTensor(w.format, w.shape, buffers)


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("form", FORMAT_NAMES)
@pytest.mark.parametrize(
    ("kind", "t", "e", "x"),
    [("random", 11, 9, 4), ("one expert", 21, 6, 2), ("padding", 5, 6, 2), ("random", 1, 9, 4)],
)
def test_moe(form: str, kind: str, t: int, e: int, x: int, interpret: bool) -> None:
    """Widths that are no multiple of a tile or a step; experts without tokens hold NaN where they can."""
    f, d = 48, 176
    r, tokens_in = routing(kind, t, e, x), tokens((t, d), 7)
    unused = np.setdiff1d(np.arange(e), np.asarray(r.experts))
    shapes = [(e, f, d), (e, f, d), (e, d, f)]
    gate, up, down = (poisoned(weight(form, shape, i), unused) for i, shape in enumerate(shapes))
    packed = moe_triton.pack_experts(gate, up, down)
    run = jax.jit(partial(moe_triton.moe, alpha=ALPHA, limit=LIMIT, interpret=interpret))
    got = run(tokens_in, r, packed)
    reference = moe_reference(tokens_in, r, ExpertWeights(gate, up, down), alpha=ALPHA, limit=LIMIT)
    assert_twice(got, reference, moe_exact(tokens_in, r, gate, up, down))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_the_last_expert_at_real_size(form: str) -> None:
    """Offsets beyond 2^31 elements: expert 127 of M3's layer is one of the token's."""
    (work,) = workloads.moe([form], [1])
    assert work.experts[0][0, 0] == workloads.E - 1
    got, reference, exact = work.check()
    assert_twice(got, reference, f64(exact))


def test_the_matmul_kernels_lower_for_cuda() -> None:
    """At M3's sizes, on a machine without a GPU."""
    e, f, d, top_k = 128, 3072, 6144, 4

    def run(x, chosen, experts):
        r = make_routing(chosen, jnp.ones(chosen.shape), jnp.ones(chosen.shape[0], bool), e)
        return moe_triton.moe(x, r, experts, alpha=ALPHA, limit=LIMIT)

    for form in FORMAT_NAMES:

        def abstract(*shape: int, form: str = form):
            return QTensor(form, shape, FORMATS[form].buffers(shape))

        experts = jax.eval_shape(
            moe_triton.pack_experts, abstract(e, f, d), abstract(e, f, d), abstract(e, d, f)
        )
        w = jax.eval_shape(pack, abstract(d, 8192))
        for t in (1, 64):
            x, chosen = jax.ShapeDtypeStruct((t, d), BF16), jax.ShapeDtypeStruct((t, top_k), jnp.int32)
            text = lowered_for_cuda(run, x, chosen, experts)
            assert text.count("__gpu$xla.gpu.triton") == 2, form
            text = lowered_for_cuda(qmatmul_triton.qmatmul, jax.ShapeDtypeStruct((t, 8192), BF16), w)
            assert text.count("__gpu$xla.gpu.triton") == 1, form


@pytest.mark.parametrize("form", FORMAT_NAMES)
@pytest.mark.parametrize("shape", [(3, 72, 130), (200, 1300)])
def test_packing_loses_nothing(form: str, shape: tuple[int, ...]) -> None:
    """A weight in the kernels' order holds the same numbers, bit for bit, and so does one of its experts."""
    w = weight(form, shape, 5)
    packed = jax.jit(pack)(w)
    np.testing.assert_array_equal(f64(packed.dequantize()), f64(w.dequantize()))
    if len(shape) == 3:
        np.testing.assert_array_equal(f64(packed.expert(jnp.array(2)).dequantize()), f64(w.dequantize()[2]))


@pytest.mark.parametrize("form", FORMAT_NAMES)
def test_weights_below_each_other_pack_as_one(form: str) -> None:
    weights = [weight(form, (f, 136), f) for f in (24, 72, 5)]
    together = pack(*weights)
    assert together.shape == (101, 136)
    wanted = np.concatenate([f64(w.dequantize()) for w in weights])
    np.testing.assert_array_equal(f64(together.dequantize()), wanted)


@pytest.mark.parametrize("form", FORMAT_NAMES)
def test_packed_experts_are_the_experts(form: str) -> None:
    e, f, d = 3, 44, 136
    weights = [weight(form, shape, i) for i, shape in enumerate([(e, f, d), (e, f, d), (e, d, f)])]
    packed = moe_triton.pack_experts(*weights)
    for got, wanted in zip(packed.expert(jnp.array(1)), weights, strict=True):
        np.testing.assert_array_equal(f64(got.dequantize()), f64(wanted.dequantize()[1]))
