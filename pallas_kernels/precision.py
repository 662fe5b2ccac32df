"""The one rule about working precision: statistics and accumulators are at least float32. And rounding."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int32

# XLA's default for float32 operands on a GPU is TF32, which is not float32.
EXACT = lax.Precision.HIGHEST

TINY = 2.0**-126  # float32's smallest normal


def wide_dtype(dtype: DTypeLike) -> jnp.dtype:
    """float32 for bfloat16, float16 and float32; float64 stays float64."""
    return jnp.promote_types(dtype, jnp.float32)


def wide(x: Array) -> Array:
    """`x` in the precision that norms, softmax, routing and selection are computed in."""
    return x.astype(wide_dtype(x.dtype))


def divide(x: Array, y: Array | float) -> Array:
    """x / y, correctly rounded by XLA; within 2 ulp in a compiled kernel.

    XLA makes x * (1 / y) of a division by a broadcast value, which is an ulp off and breaks ties. It leaves
    the division by a select alone.
    """
    return x / jnp.where(x == 0, 1, y)


def nearest(x: Float[Array, "*S"]) -> Int32[Array, "*S"]:
    """The nearest integer, half to even, of |x| < 2^22; in operations that Triton has, unlike `jnp.round`.

    1.5 * 2^23 + x has no bits below 1. The difference is taken of the bits, because XLA may simplify that of
    the numbers to x.
    """
    info = jnp.finfo(x.dtype)
    whole = np.asarray(1.5 * 2.0**info.nmant, x.dtype)
    integer = f"int{info.bits}"
    return (lax.bitcast_convert_type(x + whole, integer) - whole.view(integer)).astype(jnp.int32)
