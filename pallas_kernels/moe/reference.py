"""The definition of the routed experts in plain JAX."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.moe.routing import Routing
from pallas_kernels.precision import EXACT, wide, wide_dtype
from pallas_kernels.qmatmul.reference import qmatmul
from pallas_kernels.qtensor import Numbers, QTensor


@runtime_checkable
class Experts(Protocol):
    """The weights of all experts, in whatever order."""

    def expert(self, index: Array) -> tuple[Numbers, Numbers, Numbers]:
        """Gate and up `[F, D]` and down `[D, F]` of one expert."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertWeights:
    """The weights of all experts as they are at rest: gate and up `[E, F, D]`, down `[E, D, F]`."""

    gate: QTensor
    up: QTensor
    down: QTensor

    def expert(self, index: Array) -> tuple[QTensor, QTensor, QTensor]:
        return self.gate.expert(index), self.up.expert(index), self.down.expert(index)


def swigluoai(
    gate: Float[Array, "*T F"], up: Float[Array, "*T F"], alpha: float, limit: float
) -> Float[Array, "*T F"]:
    """(u + 1) * g * sigmoid(alpha * g) with g = min(gate, limit) and u = clip(up, -limit, limit)."""
    g = jnp.minimum(gate, limit)
    u = jnp.clip(up, -limit, limit)
    return (u + 1) * g * jax.nn.sigmoid(alpha * g)


def moe(
    x: Float[Array, "T D"],
    routing: Routing,
    experts: Experts,
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
    top_k = routing.experts.shape[1]
    n_pairs = n_tokens * top_k

    def expert_tile(tile: Array, out: Array) -> Array:
        expert = routing.tile_expert[tile]
        row = jnp.arange(routing.tile_rows)
        live = row < routing.tile_count[tile]
        pair = routing.order[jnp.where(live, routing.tile_start[tile] + row, 0)]
        inputs = jnp.where(live[:, None], x[pair // top_k], 0)
        gate, up, down = experts.expert(expert)
        hidden = swigluoai(qmatmul(inputs, gate), qmatmul(inputs, up), alpha, limit).astype(x.dtype)
        return out.at[jnp.where(live, pair, n_pairs)].set(qmatmul(hidden, down), mode="drop")

    def step(out: Array, tile: Array) -> tuple[Array, None]:
        used = routing.tile_expert[tile] >= 0
        return lax.cond(used, expert_tile, lambda _, out: out, tile, out), None

    out = jnp.zeros((n_pairs, d_model), wide_dtype(x.dtype))
    out, _ = lax.scan(step, out, jnp.arange(routing.tile_expert.shape[0]))
    weighted = out.reshape(n_tokens, top_k, d_model)
    return jnp.einsum("txd,tx->td", weighted, wide(routing.weights).astype(out.dtype), precision=EXACT)
