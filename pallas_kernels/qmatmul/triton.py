"""qmatmul as a Pallas-Triton kernel, for decoding: streams the weight once, whatever the tokens.

One program computes 64 weight rows for all tokens over a share of the contracted axis. Weights with few rows
would leave most of the chip idle, so their contracted axis is split and the parts are summed outside.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.tiles import ROWS, TiledTensor, pad_columns, tile_dot

MAX_TOKENS = 128
# Programs that keep the 132 multiprocessors of an H200 busy: about three on each.
PROGRAMS = 400


def _kernel(*refs: Any, form: str, rows: int, steps: int, interpret: bool) -> None:
    x_ref, data_ref, *scale_ref, out_ref = refs
    n, part = pl.program_id(0), pl.program_id(1)
    n_tokens = x_ref.shape[0]
    row = jnp.arange(rows)
    live = row < n_tokens

    def load_x(k: Array, width: int) -> Array:
        column = k + jnp.arange(width)[None, :]
        return plt.load(x_ref.at[row[:, None], column], mask=live[:, None], other=0)

    # The last part may be shorter.
    first = part * steps
    last = jnp.minimum(first + steps, data_ref.shape[1])
    scale = scale_ref[0] if scale_ref else None
    y = tile_dot(form, data_ref, scale, (n,), load_x, (first, last), rows, interpret)
    column = n * ROWS + jnp.arange(ROWS)
    plt.store(out_ref.at[part, row[None, :], column[:, None]], y)


def qmatmul(x: Float[Array, "T D"], weight: TiledTensor, *, interpret: bool = False) -> Float[Array, "T F"]:
    """`x @ w.T` in float32, as the reference defines it, for up to 128 tokens of bfloat16 `x`."""
    n_tokens = x.shape[0]
    n_tiles, all_steps = weight.data.shape[:2]
    x = pad_columns(x, weight)
    parts = max(1, min(all_steps, PROGRAMS // n_tiles))
    steps = -(-all_steps // parts)
    parts = -(-all_steps // steps)
    rows = max(8, 1 << (n_tokens - 1).bit_length())
    scale = () if weight.scale is None else (weight.scale,)
    operands = (x, weight.data, *scale)
    out = pl.pallas_call(
        partial(_kernel, form=weight.format, rows=rows, steps=steps, interpret=interpret),
        out_shape=jax.ShapeDtypeStruct((parts, rows, n_tiles * ROWS), jnp.float32),
        grid=(n_tiles, parts),
        in_specs=[pl.no_block_spec] * len(operands),
        out_specs=pl.no_block_spec,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3 if rows <= 32 else 2),
        interpret=interpret,
    )(*operands)
    return jnp.sum(out[:, :n_tokens, : weight.shape[0]], axis=0)
