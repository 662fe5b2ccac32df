"""The definition of the routed experts in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.moe.routing import Routing
from pallas_kernels.precision import EXACT, wide, wide_dtype
from pallas_kernels.qmatmul.reference import qmatmul
from pallas_kernels.qtensor import QTensor


def swigluoai(
    gate: Float[Array, "*T F"], up: Float[Array, "*T F"], alpha: float, limit: float
) -> Float[Array, "*T F"]:
    """(u + 1) * g * sigmoid(alpha * g) with g = min(gate, limit) and u = clip(up, -limit, limit)."""
    g = jnp.minimum(gate, limit)
    u = jnp.clip(up, -limit, limit)
    return (u + 1) * g * jax.nn.sigmoid(alpha * g)


def tile_rows(n_pairs: int, n_experts: int) -> int:
    """Rows of one tile: about the pairs that an expert can expect, from 8 to 128."""
    expected = 1 << max(n_pairs // n_experts - 1, 0).bit_length()
    return min(max(expected, 8), 128, n_pairs)


def moe(
    x: Float[Array, "T D"],
    routing: Routing,
    gate: QTensor,
    up: QTensor,
    down: QTensor,
    *,
    alpha: float,
    limit: float,
) -> Float[Array, "T D"]:
    """The experts' weighted sum in float32 (float64 for float64 `x`).

    Walks over tiles of rows that share an expert, so that only experts with tokens are read. The hidden
    activations are rounded to the dtype of `x`; everything else stays wide. The sum over a token's experts
    runs in the router's order, so it does not depend on how the experts are stored.
    """
    n_tokens, d_model = x.shape
    n_experts, top_k = gate.shape[0], routing.experts.shape[1]
    n_pairs = n_tokens * top_k
    rows = tile_rows(n_pairs, n_experts)
    counts = jnp.diff(routing.offsets)
    tile_ends = jnp.cumsum((counts + rows - 1) // rows)
    max_tiles = min(n_pairs, n_pairs // rows + n_experts)

    def expert_tile(tile: Array, out: Array) -> Array:
        expert = jnp.searchsorted(tile_ends, tile, side="right")
        first = jnp.where(expert > 0, tile_ends[expert - 1], 0)
        row = routing.offsets[expert] + (tile - first) * rows + jnp.arange(rows)
        live = row < routing.offsets[expert + 1]
        pair = routing.order[jnp.where(live, row, 0)]
        inputs = jnp.where(live[:, None], x[pair // top_k], 0)
        hidden = swigluoai(
            qmatmul(inputs, gate.expert(expert)), qmatmul(inputs, up.expert(expert)), alpha, limit
        ).astype(x.dtype)
        return out.at[jnp.where(live, pair, n_pairs)].set(qmatmul(hidden, down.expert(expert)), mode="drop")

    def step(out: Array, tile: Array) -> tuple[Array, None]:
        return lax.cond(tile < tile_ends[-1], expert_tile, lambda _, out: out, tile, out), None

    out = jnp.zeros((n_pairs, d_model), wide_dtype(x.dtype))
    out, _ = lax.scan(step, out, jnp.arange(max_tiles))
    weighted = out.reshape(n_tokens, top_k, d_model)
    return jnp.einsum("txd,tx->td", weighted, wide(routing.weights).astype(out.dtype), precision=EXACT)
