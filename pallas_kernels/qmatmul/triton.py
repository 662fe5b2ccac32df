"""qmatmul as a Pallas-Triton kernel, for decoding: streams the weight once, whatever the tokens.

One program computes 64 weight rows for all tokens over a share of the contracted axis. Weights with few rows
would leave most of the chip idle, so their contracted axis is split; whoever reads the terms sums them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels import tuning
from pallas_kernels.call import Call
from pallas_kernels.tiles import ROWS, TILE_FORMATS, TiledTensor, arrange, n_steps, tile_dot

# Rows of x of one program, those of all groups together: with 128, int4_g64 and int3_g64 compile to more
# shared memory than a multiprocessor has. More tokens are further programs, beside those of the same weights.
MAX_ROWS = 64


def _kernel(
    x_ref: Any, weight: TiledTensor, out_ref: Any, *, n_rows: int, steps: int, interpret: bool
) -> None:
    block, n, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    n_tokens, n_columns = out_ref.shape[1:]
    token = block * n_rows + jnp.arange(n_rows)
    live = token < n_tokens
    # The last part may be shorter.
    first = part * steps
    last = jnp.minimum(first + steps, n_steps(weight))
    y = tile_dot(weight, (n,), x_ref, token, live, (first, last), interpret)
    column = n * ROWS + jnp.arange(ROWS)
    mask = live[None, :] & (column < n_columns)[:, None]
    plt.store(out_ref.at[part, token[None, :], column[:, None]], y, mask=mask)


def supported(call: Call) -> str | None:
    """What is in the way of this call, if anything."""
    return call.wrong_dtype() or call.too_many_tokens()


def qmatmul(
    x: Float[Array, "*T D"], weight: TiledTensor, *, interpret: bool = False
) -> Float[Array, "_ *T F"]:
    """`x @ w.T` in float32 as terms of a sum, for up to 128 tokens of bfloat16."""
    lead, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
    n_tokens = x.shape[0]
    n_tiles, all_steps = weight.data.shape[0], n_steps(weight)
    tuned = tuning.parameters("qmatmul")
    parts = max(1, min(all_steps, tuned["programs"] // n_tiles))
    steps = -(-all_steps // parts)
    parts = -(-all_steps // steps)
    groups = TILE_FORMATS[weight.format].groups
    n_rows = max(8, min(pl.next_power_of_2(n_tokens), MAX_ROWS // groups))
    stages = tuned["stages"] if groups * n_rows <= 32 else 2
    operands = arrange(x, weight), weight
    terms = pl.pallas_call(
        partial(_kernel, n_rows=n_rows, steps=steps, interpret=interpret),
        out_shape=jax.ShapeDtypeStruct((parts, n_tokens, weight.shape[0]), jnp.float32),
        grid=(-(-n_tokens // n_rows), n_tiles, parts),
        in_specs=jax.tree.map(lambda _: pl.no_block_spec, operands),
        out_specs=pl.no_block_spec,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=stages),
        interpret=interpret,
        name="qmatmul",
    )(*operands)
    return terms.reshape(parts, *lead, -1)
