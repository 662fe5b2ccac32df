"""The definition of adding to the residual stream and its norm, in plain JAX."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.precision import wide


def rms_norm(x: Float[Array, "*T D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*T D"]:
    """Gemma's RMSNorm, x * rsqrt(mean(x^2) + eps) * (1 + weight), in float32 and not rounded."""
    x = wide(x)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * (1 + weight.astype(x.dtype))


def add_norm(
    x: Float[Array, "*T D"], terms: Float[Array, "_ *T D"], weight: Float[Array, " D"], *, eps: float
) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"]]:
    """`x` with the terms added, and its norm; both in the dtype of `x`."""
    x = (wide(x) + jnp.sum(wide(terms), axis=0)).astype(x.dtype)
    return x, rms_norm(x, weight, eps).astype(x.dtype)
