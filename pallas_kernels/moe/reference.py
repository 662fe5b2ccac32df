"""The definition of the feed-forward in plain JAX."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.moe.routing import Routing
from pallas_kernels.precision import EXACT, wide, wide_dtype
from pallas_kernels.qmatmul.reference import product
from pallas_kernels.qtensor import Numbers, QTensor


@runtime_checkable
class MLPs(Protocol):
    """The weights of one gated MLP, or of one for each expert, in whatever order."""

    def matrices(self, expert: Array | None = None) -> tuple[Numbers, Numbers, Numbers]:
        """Gate and up `[F, D]` and down `[D, F]`, of one expert where there are several."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLPWeights:
    """Weights as they are at rest: gate and up `[F, D]`, down `[D, F]`, maybe after an axis of experts."""

    gate: QTensor
    up: QTensor
    down: QTensor

    def matrices(self, expert: Array | None = None) -> tuple[QTensor, QTensor, QTensor]:
        if expert is None:
            return self.gate, self.up, self.down
        return self.gate.expert(expert), self.up.expert(expert), self.down.expert(expert)


def swigluoai(
    gate: Float[Array, "*T F"], up: Float[Array, "*T F"], alpha: float, limit: float
) -> Float[Array, "*T F"]:
    """(u + 1) * g * sigmoid(alpha * g) with g = min(gate, limit) and u = clip(up, -limit, limit)."""
    g = jnp.minimum(gate, limit)
    u = jnp.clip(up, -limit, limit)
    return (u + 1) * g * jax.nn.sigmoid(alpha * g)


def mlp(x: Float[Array, "*T D"], weights: MLPs, *, alpha: float, limit: float) -> Float[Array, "1 *T D"]:
    """One gated MLP in float32 (float64 for float64 `x`), as the one term of a sum.

    The hidden activations are rounded to the dtype of `x`; everything else stays wide.
    """
    return _mlp(x, *weights.matrices(), alpha, limit)[None]


def _mlp(
    x: Float[Array, "*T D"], gate: Numbers, up: Numbers, down: Numbers, alpha: float, limit: float
) -> Float[Array, "*T D"]:
    hidden = swigluoai(product(x, gate), product(x, up), alpha, limit).astype(x.dtype)
    return product(hidden, down)


def routed_experts(
    x: Float[Array, "T D"], routing: Routing, experts: MLPs, *, alpha: float, limit: float
) -> Float[Array, "T D"]:
    """The experts' weighted sum, in the precision of `mlp`.

    Walks over tiles of rows that share an expert, so that only experts with tokens are read. The sum over a
    token's experts runs in the router's order, so it does not depend on how the experts are stored.
    """
    n_tokens, d_model = x.shape
    top_k = routing.experts.shape[1]
    n_pairs = n_tokens * top_k

    def expert_tile(tile: Array, out: Array) -> Array:
        expert = routing.tile_expert[tile]
        row = jnp.arange(routing.tile_rows)
        live = row < routing.tile_count[tile]
        pair = routing.order[jnp.where(live, routing.tile_start[tile] + row, 0)]
        inputs = jnp.where(live[:, None], x[pair // top_k], 0)
        result = _mlp(inputs, *experts.matrices(expert), alpha, limit)
        return out.at[jnp.where(live, pair, n_pairs)].set(result, mode="drop")

    def step(out: Array, tile: Array) -> tuple[Array, None]:
        used = routing.tile_expert[tile] >= 0
        return lax.cond(used, expert_tile, lambda _, out: out, tile, out), None

    out = jnp.zeros((n_pairs, d_model), wide_dtype(x.dtype))
    out, _ = lax.scan(step, out, jnp.arange(routing.tile_expert.shape[0]))
    weighted = out.reshape(n_tokens, top_k, d_model)
    return jnp.einsum("txd,tx->td", weighted, wide(routing.weights).astype(out.dtype), precision=EXACT)


def moe(
    x: Float[Array, "T D"],
    routing: Routing,
    experts: MLPs,
    shared: MLPs | None,
    *,
    alpha: float,
    limit: float,
) -> Float[Array, "1 T D"]:
    """The experts' weighted sum plus the shared expert, if any, as the one term of a sum."""
    routed = routed_experts(x, routing, experts, alpha=alpha, limit=limit)[None]
    return routed if shared is None else routed + mlp(x, shared, alpha=alpha, limit=limit)
