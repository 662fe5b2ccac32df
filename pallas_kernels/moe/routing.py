"""Routing buffers of static shape: who goes where, sorted by expert, whatever the router chose."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@dataclass(frozen=True)
class Routing:
    """T tokens with X experts each, and the T * X (token, expert) pairs in the order of their experts.

    Pair p belongs to token p // X. The pairs of expert e are `order[offsets[e]:offsets[e + 1]]`; those of
    padding tokens come after `offsets[E]` and belong to no expert.
    """

    experts: Int[Array, "T X"]
    weights: Float[Array, "T X"]
    order: Int[Array, " T*X"]
    offsets: Int[Array, " ends"]


def make_routing(
    experts: Int[Array, "T X"],
    weights: Float[Array, "T X"],
    valid: Bool[Array, " T"],
    n_experts: int,
) -> Routing:
    """Sort the pairs by expert (stable, so by token within an expert)."""
    experts = jnp.where(valid[:, None], experts, n_experts)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    offsets = jnp.searchsorted(flat[order], jnp.arange(n_experts + 1))
    return Routing(experts, weights, order.astype(jnp.int32), offsets.astype(jnp.int32))
