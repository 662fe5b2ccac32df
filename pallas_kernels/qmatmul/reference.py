"""The definition of qmatmul in plain JAX."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.precision import EXACT, wide_dtype
from pallas_kernels.qtensor import Numbers


def product(x: Float[Array, "*T D"], w: Numbers) -> Float[Array, "*T F"]:
    """`x @ w.T` accumulated and returned in float32 (float64 for float64 `x`)."""
    values = w.dequantize().astype(x.dtype)
    return jnp.einsum("...d,fd->...f", x, values, precision=EXACT, preferred_element_type=wide_dtype(x.dtype))


def qmatmul(x: Float[Array, "*T D"], w: Numbers) -> Float[Array, "1 *T F"]:
    """The product as the one term of a sum."""
    return product(x, w)[None]
