"""The one rule about working precision: statistics and accumulators are at least float32."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike

# XLA's default for float32 operands on a GPU is TF32, which is not float32.
EXACT = lax.Precision.HIGHEST


def wide_dtype(dtype: DTypeLike) -> jnp.dtype:
    """float32 for bfloat16, float16 and float32; float64 stays float64."""
    return jnp.promote_types(dtype, jnp.float32)


def wide(x: Array) -> Array:
    """`x` in the precision that norms, softmax, routing and selection are computed in."""
    return x.astype(wide_dtype(x.dtype))
