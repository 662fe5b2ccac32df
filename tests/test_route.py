"""add_norm and route: the kernels against the references, and routing against plain Python.

Interpreted here, compiled under `pytest -m gpu`; the rule is that of `test_kernels.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.add_norm.reference import add_norm
from pallas_kernels.add_norm.triton import add_norm as add_norm_kernel
from pallas_kernels.moe.routing import Routing
from pallas_kernels.route.reference import RouterWeights, route
from pallas_kernels.route.triton import route as route_kernel
from tests.conftest import lowered_for_cuda
from tests.test_kernels import BF16, MODES, assert_twice, f64

EPS, SCALE = 1e-6, 2.0


def normal(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, jnp.float32)


def exact_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * (1 + weight)


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
@pytest.mark.parametrize(("t", "d", "n"), [(1, 6144, 4), (3, 80, 1), (130, 176, 5)])
def test_add_norm(t: int, d: int, n: int, dtype, interpret: bool) -> None:
    x, terms, weight = (
        normal((t, d), 0).astype(BF16),
        normal((n, t, d), 1).astype(dtype),
        normal((d,), 2, 0.3),
    )
    kernel = jax.jit(partial(add_norm_kernel, eps=EPS, interpret=interpret))
    got, reference = kernel(x, terms, weight), add_norm(x, terms, weight, eps=EPS)
    assert_twice(got[0], reference[0], f64(x) + f64(terms).sum(0))
    assert_twice(got[1], reference[1], exact_norm(f64(got[0]), f64(weight)))


def router(e: int, d: int) -> RouterWeights:
    return RouterWeights(normal((d,), 3, 0.3), normal((e, d), 4, d**-0.5), normal((e,), 5, 0.1))


def scores(x: np.ndarray, weights: RouterWeights) -> np.ndarray:
    return 1 / (1 + np.exp(-exact_norm(x, f64(weights.norm)) @ f64(weights.weight).T))


def assert_routes(routing: Routing, chosen: list[list[int]], valid: np.ndarray, n_experts: int) -> None:
    """The buffers are those of the experts that the tokens have, tile by tile."""
    np.testing.assert_array_equal(routing.experts, np.where(valid[:, None], chosen, n_experts))
    tiles = []
    for e in range(n_experts):
        pairs = [t * len(row) + row.index(e) for t, row in enumerate(chosen) if valid[t] and e in row]
        rows = routing.tile_rows
        tiles += [(e, pairs[i : i + rows]) for i in range(0, len(pairs), rows)]
    order, starts = np.asarray(routing.order), np.asarray(routing.tile_start)
    n = len(tiles)
    np.testing.assert_array_equal(routing.tile_expert[:n], [e for e, _ in tiles])
    np.testing.assert_array_equal(routing.tile_count[:n], [len(pairs) for _, pairs in tiles])
    assert np.all(np.asarray(routing.tile_expert[n:]) == -1)
    assert not np.any(np.asarray(routing.tile_count[n:]))
    for (_, pairs), start in zip(tiles, starts, strict=False):
        assert order[start : start + len(pairs)].tolist() == pairs


ROUTES = [(1, 6144, 128, 4, 4), (5, 80, 9, 4, 1), (37, 176, 6, 2, 3), (128, 320, 128, 4, 2)]


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(("t", "d", "e", "top_k", "n"), ROUTES)
def test_route(t: int, d: int, e: int, top_k: int, n: int, interpret: bool) -> None:
    """With a row of padding, and a bias that brings most tokens to one expert, which fills several tiles."""
    x, terms, weights = normal((t, d), 0).astype(BF16), normal((n, t, d), 1), router(e, d)
    weights = RouterWeights(weights.norm, weights.weight, weights.bias.at[e - 1].add(0.4))
    valid = np.arange(t) != 3
    run = partial(route_kernel, eps=EPS, top_k=top_k, scale=SCALE, interpret=interpret)
    added, normed, routing = jax.jit(run)(x, terms, weights, jnp.asarray(valid))
    reference = route(x, terms, weights, jnp.asarray(valid), eps=EPS, top_k=top_k, scale=SCALE)
    assert_twice(added, reference[0], f64(x) + f64(terms).sum(0))
    assert_twice(normed, reference[1], exact_norm(f64(added), f64(weights.norm)))
    p = scores(f64(added), weights)
    order = np.argsort(-(p + f64(weights.bias)), axis=-1, kind="stable")
    chosen = order[:, :top_k].tolist()
    assert_routes(routing, chosen, valid, e)
    assert np.bincount(np.ravel(chosen)).max() > (routing.tile_rows if t > 8 else 0)
    p = np.take_along_axis(p, np.array(chosen), -1)
    expected = p / p.sum(-1, keepdims=True) * SCALE
    np.testing.assert_allclose(routing.weights, expected, rtol=1e-5)


@pytest.mark.parametrize("interpret", MODES)
def test_the_lower_of_equal_experts_is_first(interpret: bool) -> None:
    """Rows of zeros score 1/2 everywhere; and a weight that is NaN takes a slot, as in `lax.top_k`."""
    x, terms, weights = jnp.zeros((2, 80), BF16), jnp.zeros((1, 2, 80)), router(9, 80)
    weights = RouterWeights(weights.norm, weights.weight, jnp.zeros(9))
    run = jax.jit(partial(route_kernel, eps=EPS, top_k=3, scale=SCALE, interpret=interpret))
    *_, routing = run(x, terms, weights, jnp.ones(2, bool))
    np.testing.assert_array_equal(routing.experts, [[0, 1, 2]] * 2)
    *_, routing = run(
        x.at[1].set(1),
        terms,
        weights.__class__(weights.norm, weights.weight.at[7].set(jnp.nan), weights.bias),
        jnp.ones(2, bool),
    )
    assert 7 in np.asarray(routing.experts[1])


@pytest.mark.parametrize("t", [1, 128])
def test_the_kernels_lower_for_cuda(t: int) -> None:
    """At M3's sizes, on a machine without a GPU."""
    x, terms = jax.ShapeDtypeStruct((t, 6144), BF16), jax.ShapeDtypeStruct((4, t, 6144), jnp.float32)
    weights = jax.eval_shape(lambda: router(128, 6144))
    run = partial(route_kernel, eps=EPS, top_k=4, scale=SCALE)
    text = lowered_for_cuda(run, x, terms, weights, jax.ShapeDtypeStruct((t,), bool))
    assert text.count("__gpu$xla.gpu.triton") == 2
    text = lowered_for_cuda(partial(add_norm_kernel, eps=EPS), x, terms, weights.norm)
    assert text.count("__gpu$xla.gpu.triton") == 1
