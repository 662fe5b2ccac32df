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
from pallas_kernels.moe.packing import pack_mlp
from pallas_kernels.moe.reference import MLPWeights
from pallas_kernels.moe.reference import mlp as mlp_reference
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
    terms = jax.jit(partial(qmatmul_triton.qmatmul, interpret=interpret))(x, pack(w))
    assert terms.shape[1:] == (t, f)
    got = terms.sum(0)
    # int4 and int8 values times scales need not be bfloat16; the kernel scales sums, the reference rounds.
    exact = f64(x) @ f64(w.dequantize()).T
    assert_twice(got, qmatmul_reference(x, w)[0], exact)


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


def mlp_exact(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Float64 throughout, but for the hidden activations, which are bfloat16 by definition."""
    a, b = np.minimum(x @ gate.T, LIMIT), np.clip(x @ up.T, -LIMIT, LIMIT)
    return ((b + 1) * a / (1 + np.exp(-ALPHA * a))).astype(BF16).astype(np.float64) @ down.T


def matrices(weights: MLPWeights) -> list[np.ndarray]:
    return [f64(w.dequantize()) for w in (weights.gate, weights.up, weights.down)]


def moe_exact(x: jax.Array, r: Routing, experts: MLPWeights, shared: MLPWeights) -> np.ndarray:
    routed = matrices(experts)
    out = mlp_exact(f64(x), *matrices(shared))
    for t, (chosen, weights) in enumerate(zip(np.asarray(r.experts), f64(r.weights), strict=True)):
        for e, p in zip(chosen, weights, strict=True):
            if e < len(routed[0]):
                out[t] += p * mlp_exact(f64(x[t]), *(m[e] for m in routed))
    return out


def poisoned(w: QTensor, experts: np.ndarray) -> QTensor:
    """NaN in these experts, where a buffer can hold one."""
    buffers = {
        name: b.at[experts].set(jnp.nan) if jnp.issubdtype(b.dtype, jnp.floating) else b
        for name, b in w.buffers.items()
    }
    return QTensor(w.format, w.shape, buffers)


def mlp_weights(form: str, lead: tuple[int, ...], f: int, d: int, seed: int) -> MLPWeights:
    return MLPWeights(*(weight(form, (*lead, *s), seed + i) for i, s in enumerate([(f, d), (f, d), (d, f)])))


def packed(weights: MLPWeights):
    return jax.jit(pack_mlp)(weights.gate, weights.up, weights.down)


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("form", FORMAT_NAMES)
@pytest.mark.parametrize(("f", "d", "t"), [(72, 176, 3), (130, 320, 41)])
def test_mlp(form: str, f: int, d: int, t: int, interpret: bool) -> None:
    weights, x = mlp_weights(form, (), f, d, 1), tokens((t, d), 4)
    run = jax.jit(partial(moe_triton.mlp, alpha=ALPHA, limit=LIMIT, interpret=interpret))
    got = run(x, packed(weights)).sum(0)
    (reference,) = mlp_reference(x, weights, alpha=ALPHA, limit=LIMIT)
    assert_twice(got, reference, mlp_exact(f64(x), *matrices(weights)))


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("form", FORMAT_NAMES)
@pytest.mark.parametrize(
    ("kind", "t", "e", "x", "shared"),
    [
        ("random", 11, 9, 4, "int8"),
        ("one expert", 21, 6, 2, "same"),
        ("padding", 5, 6, 2, "bfloat16"),
        ("random", 1, 9, 4, "same"),
    ],
)
def test_moe(form: str, kind: str, t: int, e: int, x: int, shared: str, interpret: bool) -> None:
    check_moe(form, kind, t, e, x, shared, interpret)


@pytest.mark.parametrize("interpret", MODES)
def test_moe_with_a_shared_expert_by_itself(interpret: bool) -> None:
    check_moe("int4_g64", "padding", moe_triton.MAX_SHARED_TOKENS + 1, 9, 4, "int8", interpret)


def check_moe(form: str, kind: str, t: int, e: int, x: int, shared: str, interpret: bool) -> None:
    """Widths that are no multiple of a tile or a step; experts without tokens hold NaN where they can."""
    f, d = 48, 176
    r, tokens_in = routing(kind, t, e, x), tokens((t, d), 7)
    unused = np.setdiff1d(np.arange(e), np.asarray(r.experts))
    experts = mlp_weights(form, (e,), f, d, 0)
    experts = MLPWeights(*(poisoned(w, unused) for w in (experts.gate, experts.up, experts.down)))
    common = mlp_weights(form if shared == "same" else shared, (), f + 40, d, 5)
    run = jax.jit(partial(moe_triton.moe, alpha=ALPHA, limit=LIMIT, interpret=interpret))
    got = run(tokens_in, r, packed(experts), packed(common)).sum(0)
    (reference,) = moe_reference(tokens_in, r, experts, common, alpha=ALPHA, limit=LIMIT)
    assert_twice(got, reference, moe_exact(tokens_in, r, experts, common))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_the_last_expert_at_real_size(form: str) -> None:
    """Offsets beyond 2^31 elements: expert 127 of M3's layer is one of the token's."""
    (work,) = workloads.moe([form], [1])
    assert work.experts[0][0, 0] == workloads.E - 1
    got, reference, exact = work.check(jax.jit(work.kernel), jax.jit(work.reference))
    assert_twice(got, reference, f64(exact))


def test_the_matmul_kernels_lower_for_cuda() -> None:
    """At M3's sizes, on a machine without a GPU."""
    e, f, d, top_k = 128, 3072, 6144, 4
    constants = {"alpha": ALPHA, "limit": LIMIT}

    def run(x, chosen, experts, shared):
        r = make_routing(chosen, jnp.ones(chosen.shape), jnp.ones(chosen.shape[0], bool), e)
        return moe_triton.moe(x, r, experts, shared, **constants)

    for form in FORMAT_NAMES:

        def abstract(*shape: int, form: str = form):
            return QTensor(form, shape, FORMATS[form].buffers(shape))

        experts, shared = (
            jax.eval_shape(pack_mlp, abstract(*n, f, d), abstract(*n, f, d), abstract(*n, d, f))
            for n in ((e,), ())
        )
        w = jax.eval_shape(pack, abstract(d, 8192))
        for t in (1, 64):
            x, chosen = jax.ShapeDtypeStruct((t, d), BF16), jax.ShapeDtypeStruct((t, top_k), jnp.int32)
            text = lowered_for_cuda(run, x, chosen, experts, shared)
            expected = 2 if t <= moe_triton.MAX_SHARED_TOKENS else 4
            assert text.count("__gpu$xla.gpu.triton") == expected, form
            text = lowered_for_cuda(partial(moe_triton.mlp, **constants), x, shared)
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
def test_a_packed_mlp_is_the_mlp(form: str) -> None:
    experts, alone = mlp_weights(form, (3,), 44, 136, 0), mlp_weights(form, (), 44, 136, 0)
    pairs = [(packed(experts).matrices(jnp.array(1)), [m[1] for m in matrices(experts)])]
    pairs.append((packed(alone).matrices(), matrices(alone)))
    for got, wanted in pairs:
        for g, w in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(f64(g.dequantize()), w)


def test_gate_and_up_are_packed_in_one_format() -> None:
    int8, int4 = (mlp_weights(form, (), 44, 136, 0) for form in ("int8", "int4_g64"))
    with pytest.raises(ValueError, match="gate is int8 and up int4_g64: kernels take them in one format"):
        pack_mlp(int8.gate, int4.up, int8.down)
