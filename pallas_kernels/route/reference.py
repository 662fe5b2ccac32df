"""The definition of routing in plain JAX."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.add_norm.reference import add_norm
from pallas_kernels.moe.routing import Routing, make_routing
from pallas_kernels.precision import EXACT, wide


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterWeights:
    """The router's weight and bias, and the weight of the norm before it; float32."""

    norm: Float[Array, " D"]
    weight: Float[Array, "E D"]
    bias: Float[Array, " E"]


def route(
    x: Float[Array, "T D"],
    terms: Float[Array, "_ T D"],
    router: RouterWeights,
    valid: Bool[Array, " T"],
    *,
    eps: float,
    top_k: int,
    scale: float,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"], Routing]:
    """`x` with the terms added, its norm, and the routing of the tokens that are valid.

    The bias only takes part in the discrete choice: its gradient is exactly zero.
    """
    x, normed = add_norm(x, terms, router.norm, eps=eps)
    logits = jnp.einsum("td,ed->te", wide(normed), router.weight, precision=EXACT)
    p = jax.nn.sigmoid(logits)
    _, experts = lax.top_k(lax.stop_gradient(p + router.bias), top_k)
    chosen = jnp.take_along_axis(p, experts, axis=-1)
    weights = chosen / jnp.sum(chosen, axis=-1, keepdims=True) * scale
    return x, normed, make_routing(experts, weights, valid, router.weight.shape[0])
