"""Each operation's plain JAX definition against float64 numpy loops.

Bounds follow from the working precision: U32 and U16 are the largest relative errors of rounding to float32
and bfloat16, and a sum of n products is off by at most n * U32 * sum |a b| in any order.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.add_norm.reference import add_norm, rms_norm
from pallas_kernels.block_attention.reference import attend
from pallas_kernels.block_select.reference import block_select
from pallas_kernels.moe.reference import MLPWeights, mlp, moe, routed_experts, swigluoai
from pallas_kernels.moe.routing import make_routing, tile_rows
from pallas_kernels.paging import LayerPages, PagedRows
from pallas_kernels.qk_norm_rope.reference import norm_rope
from pallas_kernels.qmatmul.reference import qmatmul
from pallas_kernels.qtensor import QTensor

U32, U16 = 2.0**-24, 2.0**-8
F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
ROUNDING = {F32: U32, BF16: U16}
both = pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])


def normal(seed: int, *shape: int, dtype: np.dtype = F32, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(dtype)


def f64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def close(got: Any, expected: np.ndarray, bound: np.ndarray | float) -> None:
    """NaN anywhere fails."""
    error = np.abs(f64(got) - expected)
    assert error.shape == expected.shape
    assert np.all(error <= bound), f"largest error over bound {np.max(error / bound)}"


def qtensor(w: np.ndarray) -> QTensor:
    return QTensor(w.dtype.name, w.shape, {"data": jnp.asarray(w)})


# --- qmatmul ---


@both
def test_qmatmul(dtype: np.dtype):
    x, w = normal(0, 2, 3, 37, dtype=dtype), normal(1, 11, 37, dtype=dtype)
    (got,) = qmatmul(jnp.asarray(x), qtensor(w))
    assert got.dtype == F32  # not rounded, also for bfloat16
    expected, size = np.zeros((2, 3, 11)), np.zeros((2, 3, 11))
    for i in np.ndindex(2, 3):
        for f in range(11):
            products = f64(x[i]) * f64(w[f])
            expected[i][f], size[i][f] = products.sum(), np.abs(products).sum()
    close(got, expected, 37 * U32 * size)


# --- Norm and rotation ---


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = f64(x)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (1 + f64(weight))


@both
@pytest.mark.parametrize("scale", [1.0, 1e-4])  # at 1e-4, eps is a hundred times the mean square
def test_rms_norm(dtype: np.dtype, scale: float):
    x, weight = normal(0, 2, 5, 19, dtype=dtype, scale=scale), normal(1, 19, scale=0.5)
    got = rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-6)
    assert got.dtype == F32
    expected = normed(x, weight, 1e-6)
    # The mean's relative error is 20 U32, halved by the root; then rsqrt, 1 + w and two products.
    close(got, expected, (10 + 8) * U32 * np.abs(expected))


def test_gemma_norm_adds_one_to_the_weight_once():
    x = jnp.array([[3.0, -4.0]])  # mean square 12.5
    got = rms_norm(x, jnp.array([0.0, 1.0]), 0.0)
    close(got, np.array([[3 / 12.5**0.5, -8 / 12.5**0.5]]), 8 * U32 * 3)


@both
@pytest.mark.parametrize("n_terms", [1, 3])
def test_add_norm(dtype: np.dtype, n_terms: int):
    """The sum is rounded once, and the norm is that of the rounded sum."""
    x, terms = normal(0, 2, 5, 19, dtype=dtype), normal(1, n_terms, 2, 5, 19)
    weight = normal(2, 19, scale=0.5)
    added, got = add_norm(jnp.asarray(x), jnp.asarray(terms), jnp.asarray(weight), eps=1e-6)
    assert added.dtype == got.dtype == dtype
    expected, size = (f(x) + f(terms).sum(0) for f in (f64, lambda a: np.abs(f64(a))))
    close(added, expected, ROUNDING[dtype] * np.abs(expected) + 1.01 * (n_terms + 1) * U32 * size)
    expected = normed(np.asarray(added), weight, 1e-6)
    close(got, expected, (ROUNDING[dtype] + 19 * U32) * np.abs(expected))


@both
def test_norm_rope(dtype: np.dtype):
    """Head of 14 dims: 4 pairs (i, i + 4) turn, 6 dims pass."""
    b, t, h, dim, r = 2, 5, 3, 14, 4
    x, weight = normal(0, b, t, h, dim, dtype=dtype), normal(1, dim, scale=0.5)
    angle = np.random.default_rng(2).uniform(-9, 9, (b, t, r))
    cos, sin = np.cos(angle).astype(F32), np.sin(angle).astype(F32)
    got = norm_rope(*map(jnp.asarray, (x, weight, cos, sin)), 1e-6)
    assert got.dtype == dtype
    n = normed(x, weight, 1e-6)
    expected, size = n.copy(), np.abs(n)
    for i in np.ndindex(b, t, h):
        for p in range(r):
            c, s = f64(cos[i[:2]][p]), f64(sin[i[:2]][p])
            expected[i][p] = n[i][p] * c - n[i][p + r] * s
            expected[i][p + r] = n[i][p + r] * c + n[i][p] * s
            size[i][p] = size[i][p + r] = abs(n[i][p]) + abs(n[i][p + r])
    # The norm as above (dim / 2 + 8), two products and a sum; then one rounding to the dtype.
    close(got, expected, ROUNDING[dtype] * np.abs(expected) + (7 + 8 + 3) * 1.01 * U32 * size)


def test_quarter_turn_pairs_the_halves():
    x = jnp.arange(1.0, 8.0)
    one, zero = jnp.ones((1, 1, 2)), jnp.zeros((1, 1, 2))
    got = f64(norm_rope(x[None, None, None], jnp.zeros(7), zero, one, 0.0)).reshape(-1)
    close(got, np.array([-3, -4, 1, 2, 5, 6, 7]) / np.sqrt(20), 12 * U32 * 2)  # mean square 140 / 7


# --- Experts ---


def activation(gate: np.ndarray, up: np.ndarray, alpha: float, limit: float) -> np.ndarray:
    g, u = np.where(gate > limit, limit, gate), np.where(up > limit, limit, np.where(up < -limit, -limit, up))
    return (u + 1) * g / (1 + np.exp(-alpha * g))


@pytest.mark.parametrize(("alpha", "limit"), [(1.702, 7.0), (1.1, 2.5)])
def test_swigluoai(alpha: float, limit: float):
    gate = np.array([-30, -8, -7, -2.5, -1, 0, 0.5, 2.5, 3, 6.9, 7, 8, 1000], F32)[:, None]
    up = np.array([-1000, -7.5, -7, -3, -1, 0, 2, 2.75, 7, 7.5, 1000], F32)
    gate, up = (np.broadcast_to(x, (13, 11)) for x in (gate, up))
    expected = activation(f64(gate), f64(up), alpha, limit)
    # exp turns the absolute error of alpha * g (alpha rounded, then the product) into a relative one.
    bound = (3 * np.abs(alpha * f64(np.minimum(gate, limit))) + 12) * U32 * np.abs(expected)
    close(swigluoai(jnp.asarray(gate), jnp.asarray(up), alpha, limit), expected, bound)


def test_swigluoai_by_hand():
    """The gate has no lower clamp: a clamp at -7 would make the first value -4.7e-5 * 2."""
    got = f64(swigluoai(jnp.array([-8.0, 9.0, 0.0]), jnp.array([1.0, -9.0, 3.0]), 1.702, 7.0))
    sigmoid = 1 / (1 + np.exp(1.702 * 8)), 1 / (1 + np.exp(-1.702 * 7))
    close(
        got,
        np.array([2 * -8 * sigmoid[0], -6 * 7 * sigmoid[1], 0]),
        [16 * 50 * U32 * sigmoid[0], 42 * 50 * U32, 0],
    )


def test_make_routing():
    experts = jnp.array([[2, 0], [4, 2], [0, 1], [2, 4]], jnp.int32)
    routing = make_routing(experts, jnp.ones((4, 2)), jnp.array([True, True, False, True]), 5)
    # pairs 0..7 go to 2 0 | 4 2 | - - | 2 4
    np.testing.assert_array_equal(routing.order, [1, 0, 3, 6, 2, 7, 4, 5])
    # Experts 0, 2 and 4 have one tile each, of one, three and two pairs.
    np.testing.assert_array_equal(routing.tile_expert, [0, 2, 4, -1, -1, -1])
    np.testing.assert_array_equal(routing.tile_start[:3], [0, 1, 4])
    np.testing.assert_array_equal(routing.tile_count, [1, 3, 2, 0, 0, 0])


D, F, X = 13, 11, 3
ALPHA, LIMIT = 1.702, 1.5  # a limit that the random activations do reach


@jax.jit
def run_moe(x: Any, experts: Any, weights: Any, valid: Any, gate: Any, up: Any, down: Any) -> jax.Array:
    routing = make_routing(experts, weights, valid, gate.shape[0])
    return routed_experts(x, routing, MLPWeights(gate, up, down), alpha=ALPHA, limit=LIMIT)


def expert_weights(n_experts: int, dtype: np.dtype = F32) -> tuple[np.ndarray, ...]:
    shapes = ((n_experts, F, D), (n_experts, F, D), (n_experts, D, F))
    return tuple(normal(10 + i, *s, dtype=dtype, scale=0.4) for i, s in enumerate(shapes))


def moe_oracle(
    x: np.ndarray, experts: np.ndarray, weights: np.ndarray, matrices: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The sum, and the error that float32 sums and one rounding of the hidden activations can make."""
    out, bound = np.zeros(x.shape), np.zeros(x.shape)
    gate, up, down = (f64(m) for m in matrices)
    for t in range(len(x)):
        row = f64(x[t])
        for e, weight in zip(experts[t], f64(weights[t]), strict=True):
            g, u = gate[e] @ row, up[e] @ row
            g_error, u_error = (D * U32 * np.abs(m[e]) @ np.abs(row) for m in (gate, up))
            h = activation(g, u, ALPHA, LIMIT)
            # |d/dg g sigmoid(a g)| < 1.1, |d/du| = |g sigmoid| <= |g|, and about 20 roundings.
            h_error = (
                (np.minimum(np.abs(u), LIMIT) + 1) * 1.1 * g_error
                + np.abs(g) * u_error
                + 20 * U32 * np.abs(h)
            )
            h_error += ROUNDING[x.dtype] * np.abs(h)
            out[t] += weight * (down[e] @ h)
            bound[t] += weight * (np.abs(down[e]) @ (h_error + (F + X + 2) * U32 * np.abs(h)))
    return out, 1.01 * bound  # for products of errors


def choose(kind: str, n_tokens: int, n_experts: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    if kind == "random":
        return np.stack([rng.permutation(n_experts)[:X] for _ in range(n_tokens)]).astype(np.int32)
    return np.broadcast_to(
        np.array({"same": [4, 0, 5], "one": [3, 3, 3]}[kind], np.int32), (n_tokens, X)
    ).copy()


@pytest.mark.parametrize("kind", ["random", "same", "one"])
@pytest.mark.parametrize(("n_tokens", "n_experts"), [(37, 6), (37, 9), (1, 9)])
def test_moe(n_tokens: int, n_experts: int, kind: str):
    """All tokens with the same experts, or all pairs with one, fill several tiles and leave experts unused.

    Unused experts hold NaN, so each that is read shows.
    """
    x, experts = normal(0, n_tokens, D), choose(kind, n_tokens, n_experts)
    weights = np.random.default_rng(1).uniform(0.1, 2, (n_tokens, X)).astype(F32)
    matrices = expert_weights(n_experts)
    for matrix in matrices:
        matrix[np.setdiff1d(np.arange(n_experts), experts)] = np.nan
    got = run_moe(x, experts, weights, np.ones(n_tokens, bool), *map(qtensor, matrices))
    close(got, *moe_oracle(x, experts, weights, matrices))
    if n_tokens > 1 and kind != "random":
        assert np.bincount(experts.reshape(-1)).max() > tile_rows(n_tokens, X, n_experts)


def test_moe_in_bfloat16():
    """Sums and the result are float32: only the hidden activations are rounded."""
    x, experts = normal(0, 37, D, dtype=BF16), choose("random", 37, 9)
    weights = np.random.default_rng(1).uniform(0.1, 2, (37, X)).astype(F32)
    matrices = expert_weights(9, BF16)
    got = run_moe(x, experts, weights, np.ones(37, bool), *map(qtensor, matrices))
    assert got.dtype == F32
    close(got, *moe_oracle(x, experts, weights, matrices))


def test_moe_padding_tokens():
    """A padding token changes no other and has a finite result; experts that only padding chose are NaN."""
    x, experts = normal(0, 37, D), choose("random", 37, 9)
    weights = np.random.default_rng(1).uniform(0.1, 2, (37, X)).astype(F32)
    valid = np.random.default_rng(4).random(37) < 0.6
    experts[valid] = np.where(experts[valid] >= 7, experts[valid] - 7, experts[valid])
    assert set(experts[~valid].reshape(-1)) >= {7, 8}
    x[~valid] = np.nan
    matrices = expert_weights(9)
    for matrix in matrices:
        matrix[7:] = np.nan
    got = np.asarray(run_moe(x, experts, weights, valid, *map(qtensor, matrices)))
    expected, bound = moe_oracle(x[valid], experts[valid], weights[valid], matrices)
    close(got[valid], expected, bound)
    assert np.all(np.isfinite(got))


def test_moe_is_the_routed_experts_and_the_shared_one():
    """The shared expert, of another width, is an expert that every token has with weight 1."""
    x, experts = normal(0, 37, D), choose("random", 37, 9)
    weights = np.random.default_rng(1).uniform(0.1, 2, (37, X)).astype(F32)
    matrices = expert_weights(9)
    shared = tuple(normal(20 + i, *s, scale=0.4) for i, s in enumerate([(F + 4, D), (F + 4, D), (D, F + 4)]))
    routing = make_routing(*map(jnp.asarray, (experts, weights, np.ones(37, bool))), 9)
    both = [MLPWeights(*map(qtensor, m)) for m in (matrices, shared)]
    (got,) = moe(jnp.asarray(x), routing, *both, alpha=ALPHA, limit=LIMIT)
    routed, routed_bound = moe_oracle(x, experts, weights, matrices)
    alone = np.zeros((37, 1), np.int32), np.ones((37, 1)), tuple(m[None] for m in shared)
    expected, bound = moe_oracle(x, *alone)
    close(mlp(jnp.asarray(x), both[1], alpha=ALPHA, limit=LIMIT)[0], expected, bound)
    size = np.abs(routed) + np.abs(expected)
    close(got, routed + expected, routed_bound + bound + 2 * U32 * size)


def test_moe_does_not_depend_on_the_storage_order():
    x, experts = normal(0, 37, D), choose("random", 37, 9)
    weights = np.random.default_rng(1).uniform(0.1, 2, (37, X)).astype(F32)
    matrices, valid = expert_weights(9), np.ones(37, bool)
    order = np.random.default_rng(5).permutation(9)  # new place i holds expert order[i]
    place = np.argsort(order).astype(np.int32)
    got = run_moe(x, experts, weights, valid, *map(qtensor, matrices))
    moved = run_moe(x, place[experts], weights, valid, *(qtensor(m[order]) for m in matrices))
    np.testing.assert_array_equal(got, moved)


# --- The paged cache ---

C, M, PAGES = 4, 9, 41  # page size, pages per row, pages in memory


class Paged(NamedTuple):
    """Rows whose keys lie in shuffled pages; memory that no row holds is NaN."""

    table: np.ndarray
    lengths: np.ndarray
    arrays: tuple[np.ndarray, ...]  # [PAGES, C, ...]


def page(lengths: list[int], *keys: np.ndarray) -> Paged:
    """Put `keys` [B, S, ...] into pages; unused table entries are -1 in even rows, a NaN page in odd ones."""
    order = np.random.default_rng(6).permutation(PAGES)
    free, nan_page = list(order[:-1]), order[-1]
    arrays = tuple(np.full((PAGES, C, *k.shape[2:]), np.nan, k.dtype) for k in keys)
    table = np.zeros((len(lengths), M), np.int32)
    for b, length in enumerate(lengths):
        table[b] = nan_page if b % 2 else -1
        for position in range(length):
            if position % C == 0:
                table[b, position // C] = free.pop()
            for array, k in zip(arrays, keys, strict=True):
                array[table[b, position // C], position % C] = k[b, position]
    return Paged(table, np.array(lengths, np.int32), arrays)


def blocks_in_use(lengths: Any) -> int:
    return -(-int(max(lengths)) // C)


def last_positions(lengths: list[int], n: int) -> np.ndarray:
    """The last n positions of each row; a shorter row starts at 0 and has padding behind its tokens."""
    return np.stack([max(length - n, 0) + np.arange(n) for length in lengths]).astype(np.int32)


def test_slots_of_new_tokens():
    """Pages of 4: position 9 is at offset 1 of the third page; padding goes to no page."""
    rows = PagedRows(
        jnp.array([[7, 3, 5], [2, -1, -1]]), jnp.array([[6, 7, 8, 9], [0, 1, 2, 3]]), jnp.array([10, 2]), 3
    )
    pages, offsets = rows.slots(4, 11)
    np.testing.assert_array_equal(pages, [[3, 3, 5, 5], [2, 2, 11, 11]])
    np.testing.assert_array_equal(np.asarray(offsets)[rows.valid], [2, 3, 0, 1, 0, 1])


# --- Block selection ---


@partial(jax.jit, static_argnames=("top", "local", "init"))
def select(
    q: Any, pages: Any, table: Any, positions: Any, lengths: Any, n_blocks: Any, top=4, local=1, init=0
):
    rows = PagedRows(table, positions, lengths, n_blocks)
    return block_select(q, pages, rows, top_blocks=top, local_blocks=local, init_blocks=init)


def select_oracle(q, keys, positions, lengths, top=4, local=1, init=0) -> np.ndarray:
    out = np.full((*q.shape[:3], min(top, M)), -1)
    for b, t, head in np.ndindex(*q.shape[:3]):
        position = positions[b, t]
        own = position // C
        score = {}
        for s in range(min(position + 1, lengths[b])):
            score[s // C] = max(score.get(s // C, -np.inf), f64(q[b, t, head]) @ f64(keys[b, s]))
        forced = {own - j for j in range(local) if own - j >= 0} | {i for i in range(init) if i <= own}
        others = sorted(score.keys() - forced, key=lambda i: (-score[i], i))
        chosen = sorted([*forced, *others][: max(top, len(forced))])
        out[b, t, head, : len(chosen)] = chosen
    return out


def check_select(q: np.ndarray, keys: np.ndarray, lengths: list[int], **options: int) -> np.ndarray:
    """Compare all valid queries. The values are small integers: scores are exact, and many are equal."""
    positions = last_positions(lengths, q.shape[1])
    paged = page(lengths, keys)
    got = np.asarray(
        select(q, paged.arrays[0], paged.table, positions, paged.lengths, blocks_in_use(lengths), **options)
    )
    expected = select_oracle(q, keys, positions, lengths, **options)
    valid = positions < np.array(lengths)[:, None]
    np.testing.assert_array_equal(got[valid], expected[valid])
    assert np.all((got >= -1) & (got < M))  # of padding tokens too
    return got


def integers(seed: int, *shape: int, low: int = -3, high: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape).astype(F32)


B, T, K, I = 4, 5, 3, 6  # noqa: E741 - the dims' names in the signatures
LENGTHS = [[1, C - 1, C, C + 1], [36, 23, 9, 30], [8, 0, 35, 16], [5, 36, 36, 2]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_block_select(lengths: list[int]):
    check_select(integers(0, B, T, K, I), integers(1, B, M * C, I), lengths)


@pytest.mark.parametrize(
    "options", [{"local": 2, "init": 1}, {"top": 3, "init": 2}, {"top": 12}, {"local": 0}], ids=str
)
def test_block_select_forced_blocks(options: dict[str, int]):
    """Without a local block the query's own competes, with the keys up to the query's position only."""
    for lengths in LENGTHS[1:3]:
        check_select(integers(0, B, T, K, I), integers(1, B, M * C, I), lengths, **options)


def test_block_select_when_all_scores_are_negative():
    """Empty places with a score of zero would win."""
    check_select(-integers(0, B, T, K, I, low=1), integers(1, B, M * C, I, low=1), [36, 23, 9, 30])


def test_block_select_ties_go_to_the_lower_block():
    got = check_select(integers(0, B, T, K, I), np.ones((B, M * C, I), F32), [36, 36, 36, 36])
    np.testing.assert_array_equal(got[:, -C:], np.broadcast_to([0, 1, 2, 8], (B, C, K, 4)))


def test_block_select_heads_choose_for_themselves():
    """Head h looks for the direction h, which only block 2 + h has."""
    q, keys = np.zeros((B, T, K, I), F32), np.zeros((B, M * C, I), F32)
    for head in range(K):
        q[:, :, head, head] = 1
        keys[:, (2 + head) * C + 1, head] = 1
    got = check_select(q, keys, [36] * B)
    for head in range(K):
        np.testing.assert_array_equal(
            got[:, -C:, head], np.broadcast_to(sorted([0, 1, 2 + head, 8]), (B, C, 4))
        )


def test_block_select_as_many_tokens_as_heads():
    check_select(integers(0, B, K, K, I), integers(1, B, M * C, I), [36, 23, 9, 30])


def test_block_select_python_and_traced_bound_agree():
    q, keys, lengths = integers(0, B, T, K, I), integers(1, B, M * C, I), [17, 3, 9, 20]
    positions, paged = last_positions(lengths, T), page(lengths, keys)
    rows = PagedRows(jnp.asarray(paged.table), jnp.asarray(positions), jnp.asarray(paged.lengths), 5)
    got = block_select(
        jnp.asarray(q), jnp.asarray(paged.arrays[0]), rows, top_blocks=4, local_blocks=1, init_blocks=0
    )
    np.testing.assert_array_equal(got, check_select(q, keys, lengths))


def test_block_select_in_bfloat16():
    """Scores stay float32: 256 + 1 and 256 are equal in bfloat16, and the lower block would win."""
    q, keys = np.zeros((B, T, K, I), BF16), np.zeros((B, M * C, I), BF16)
    q[..., :2] = 1
    keys[:, : 7 * C, 0] = 256
    keys[:, 4 * C : 7 * C, 1] = 1
    got = check_select(q, keys, [36] * B)
    np.testing.assert_array_equal(got[:, -C:], np.broadcast_to([4, 5, 6, 8], (B, C, K, 4)))


# --- Block attention ---

KV, G, H = 2, 3, 7  # KV heads, query heads for each, head dim


@jax.jit
def run_attend(q: Any, k: Any, v: Any, table: Any, positions: Any, lengths: Any, n_blocks: Any, blocks: Any):
    return attend(q, LayerPages(k, v, None), PagedRows(table, positions, lengths, n_blocks), blocks)


class Case(NamedTuple):
    q: np.ndarray  # [B, T, KV * G, H]
    k: np.ndarray  # [B, S, KV, H]
    v: np.ndarray
    lengths: list[int]

    @property
    def positions(self) -> np.ndarray:
        return last_positions(self.lengths, T)

    def run(self, blocks: np.ndarray | None) -> np.ndarray:
        paged = page(self.lengths, self.k, self.v)
        k, v = (a.swapaxes(1, 2) for a in paged.arrays)
        n_blocks = blocks_in_use(self.lengths)
        return np.asarray(
            run_attend(self.q, k, v, paged.table, self.positions, paged.lengths, n_blocks, blocks)
        )

    def expected(self, blocks: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """The outputs and the error that float32 arithmetic and one rounding of the result can make."""
        out, bound = np.zeros(self.q.shape), np.zeros(self.q.shape)
        for b, t, n in np.ndindex(*self.q.shape[:3]):
            head = n // G
            seen = np.arange(min(self.positions[b, t] + 1, self.lengths[b]))
            if blocks is not None:
                seen = seen[np.isin(seen // C, blocks[b, t, head])]
            if not len(seen):
                continue
            q, k, v = f64(self.q[b, t, n]), f64(self.k[b, seen, head]), f64(self.v[b, seen, head])
            s = k @ q / np.sqrt(H)
            weight = np.exp(s - s.max())
            out[b, t, n] = weight @ v / weight.sum()
            # Scores are off by (H + 3) U32 of their size, exp makes that relative; the same for s - max.
            size = np.max(np.abs(k) @ np.abs(q)) / np.sqrt(H)
            relative = 2 * (H + 3 + 2) * U32 * size + (2 * len(seen) + 4 * M + 8) * U32
            bound[b, t, n] = 1.01 * relative * (weight @ np.abs(v) / weight.sum())
        return out, bound + ROUNDING[self.q.dtype] * (np.abs(out) + bound)


def case(lengths: list[int], dtype: np.dtype = F32) -> Case:
    q = normal(0, B, T, KV * G, H, dtype=dtype, scale=1.5)
    return Case(q, *(normal(i, B, M * C, KV, H, dtype=dtype, scale=1.5) for i in (1, 2)), lengths)


def chosen_blocks(c: Case, slots: int = 4) -> np.ndarray:
    """Each query's own block and random earlier ones, different for each KV head; -1 behind them."""
    rng = np.random.default_rng(7)
    blocks = np.full((B, T, KV, slots), -1, np.int32)
    for b, t, head in np.ndindex(B, T, KV):
        own = min(c.positions[b, t] // C, M - 1)
        others = rng.permutation(own)[: rng.integers(0, slots)]
        ids = sorted([own, *others])
        blocks[b, t, head, : len(ids)] = ids
    return blocks


@both
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_dense_attention(lengths: list[int], dtype: np.dtype):
    c = case(lengths, dtype)
    got = c.run(None)
    assert got.dtype == dtype
    close(got, *c.expected(None))


@both
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_sparse_attention(lengths: list[int], dtype: np.dtype):
    c = case(lengths, dtype)
    blocks = chosen_blocks(c)
    assert (blocks == -1).any()
    got = c.run(blocks)
    assert got.dtype == dtype
    close(got, *c.expected(blocks))


def test_all_blocks_chosen_is_dense_attention():
    c = case([36, 23, 9, 30])
    own = np.minimum(c.positions // C, M - 1)[:, :, None, None]
    blocks = np.broadcast_to(np.where(np.arange(M) <= own, np.arange(M), -1), (B, T, KV, M)).astype(np.int32)
    expected, bound = c.expected(None)
    close(c.run(blocks), expected, bound)


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_without_keys_are_zeros(sparse: bool):
    c = case([8, 0, 35, 16])
    blocks = chosen_blocks(c) if sparse else None
    if blocks is not None:
        blocks[3] = -1
        blocks[2, :2] = [8, -1, -1, -1]  # keys 32 to 34 only, which queries 30 and 31 must not see
    got = c.run(blocks)
    assert not got[1].any()
    assert got[2, 2:].all()
    assert got[2, :2].any() != sparse
    assert got[3].any() != sparse


def test_query_heads_share_their_kv_head():
    """Values that are one constant per row and KV head come out as they are, whatever the weights."""
    c = case([36, 23, 9, 30])
    constant = np.arange(1, B * KV + 1, dtype=F32).reshape(B, 1, KV, 1)
    c = c._replace(v=np.broadcast_to(constant, c.v.shape).copy())
    expected = np.broadcast_to(np.repeat(f64(constant), G, axis=2), c.q.shape)
    close(c.run(None), expected, 200 * U32 * expected)  # sums of at most 36 weights, with and without values


@pytest.mark.parametrize("sparse", [False, True])
def test_later_tokens_leave_earlier_outputs_bit_equal(sparse: bool):
    """Queries of row 0 are at 31 to 35; token 33 changes, in a block (32 to 35) that earlier ones read."""
    c = case([36, 23, 9, 30])
    blocks = chosen_blocks(c) if sparse else None
    before = c.run(blocks)
    k, v = c.k.copy(), c.v.copy()
    k[0, 33], v[0, 33] = 50, -50
    after = c._replace(k=k, v=v).run(blocks)
    np.testing.assert_array_equal(after[0, :2], before[0, :2])
    np.testing.assert_array_equal(after[1:], before[1:])
    assert np.all(np.any(after[0, 2:] != before[0, 2:], axis=-1))


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_python_and_traced_bound_of_attention_agree(attention: str):
    c = case([17, 3, 9, 20])
    blocks = chosen_blocks(c) if attention == "sparse" else None
    paged = page(c.lengths, c.k, c.v)
    arrays = [jnp.asarray(a.swapaxes(1, 2)) for a in paged.arrays]
    rows = PagedRows(jnp.asarray(paged.table), jnp.asarray(c.positions), jnp.asarray(paged.lengths), 5)
    got = attend(
        jnp.asarray(c.q), LayerPages(*arrays, None), rows, None if blocks is None else jnp.asarray(blocks)
    )
    close(got, *c.expected(blocks))


def test_unused_memory_reaches_no_gradient():
    """NaN in memory that no row holds: gradients are finite, and zero for that memory."""
    c = case([8, 0, 35, 16])
    paged, blocks = page(c.lengths, c.k, c.v), jnp.asarray(chosen_blocks(c))
    rows = PagedRows(*map(jnp.asarray, (paged.table, c.positions, paged.lengths)), blocks_in_use(c.lengths))
    arrays = [jnp.asarray(a.swapaxes(1, 2)) for a in paged.arrays]

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(attend(q, LayerPages(k, v, None), rows, blocks) ** 2)

    for gradient, pages in zip(
        jax.jit(jax.grad(loss, (0, 1, 2)))(jnp.asarray(c.q), *arrays), [c.q, *arrays], strict=True
    ):
        assert np.all(np.isfinite(gradient))
        assert np.any(gradient)
        assert not np.any(np.asarray(gradient)[np.isnan(pages)])
