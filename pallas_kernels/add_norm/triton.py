"""add_norm as a Pallas-Triton kernel, for decoding: one program a row.

In the decode step of M3 on one H200, 1 row: 4.0 µs with the sum over the feed-forward's terms.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.call import Call


def sum_terms(terms_ref: Any, row: Array, lane: Array, mask: Array) -> Array:
    """The sum over the terms of some numbers of a row, or of rows, in float32; inside a kernel."""
    total = jnp.zeros(mask.shape, jnp.float32)
    for p in range(terms_ref.shape[0]):
        total += plt.load(terms_ref.at[p, row, lane], mask=mask, other=0)
    return total


def add_terms(x_ref: Any, terms_ref: Any, row: Array, lane: Array, mask: Array) -> Array:
    """Some numbers of a row of x, or of rows, with the terms added, in the dtype of x; inside a kernel."""
    x = plt.load(x_ref.at[row, lane], mask=mask, other=0).astype(jnp.float32)
    return (x + sum_terms(terms_ref, row, lane, mask)).astype(x_ref.dtype)


def store_norm(x: Array, squares: Array | int, weight_ref: Any, out_ref: Any, row: Array, eps: float) -> None:
    """Write the norm of a row, padded to a power of two, with that sum of squares; inside a kernel."""
    dim, lane = out_ref.shape[1], jnp.arange(x.size)
    real = lane < dim
    weight = plt.load(weight_ref.at[lane], mask=real, other=0)
    normed = x.astype(jnp.float32) * lax.rsqrt(squares / dim + eps) * (1 + weight)
    plt.store(out_ref.at[row, lane], normed.astype(out_ref.dtype), mask=real)


def _kernel(
    x_ref: Any, terms_ref: Any, weight_ref: Any, out_ref: Any, normed_ref: Any, *, eps: float
) -> None:
    row, dim = pl.program_id(0), x_ref.shape[1]
    lane = jnp.arange(pl.next_power_of_2(dim))
    x = add_terms(x_ref, terms_ref, row, lane, lane < dim)
    plt.store(out_ref.at[row, lane], x, mask=lane < dim)
    squares = jnp.sum(x.astype(jnp.float32) ** 2, axis=0)
    store_norm(x, squares, weight_ref, normed_ref, row, eps)


def supported(call: Call) -> str | None:
    """What is in the way of this call, if anything."""
    return call.wrong_dtype() or call.no_decoding()


def add_norm(
    x: Float[Array, "*T D"],
    terms: Float[Array, "_ *T D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"]]:
    """`x` with the terms added, and its norm, as the reference defines them."""
    rows = x.reshape(-1, x.shape[-1])
    operands = (rows, terms.reshape(terms.shape[0], *rows.shape), weight)
    added, normed = pl.pallas_call(
        partial(_kernel, eps=eps),
        out_shape=[jax.ShapeDtypeStruct(rows.shape, x.dtype)] * 2,
        grid=(rows.shape[0],),
        in_specs=[pl.no_block_spec] * 3,
        out_specs=[pl.no_block_spec] * 2,
        compiler_params=plt.CompilerParams(num_warps=32),
        interpret=interpret,
        name="add_norm",
    )(*operands)
    return added.reshape(x.shape), normed.reshape(x.shape)
