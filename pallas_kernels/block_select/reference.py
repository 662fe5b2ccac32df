"""The definition of block selection in plain JAX."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.paging import PagedRows
from pallas_kernels.precision import EXACT, wide_dtype


def block_select(
    index_q: Float[Array, "B T K I"],
    index_pages: Float[Array, "pages C I"],
    rows: PagedRows,
    *,
    top_blocks: int,
    local_blocks: int,
    init_blocks: int,
) -> Int[Array, "B T K P"]:
    """The chosen block ids in ascending order, -1 in unused slots behind them; P = min(top_blocks, M).

    A discrete choice: its gradient with respect to both inputs is exactly zero.
    """
    index_q, index_pages = lax.stop_gradient((index_q, index_pages))
    block_size = index_pages.shape[1]
    n_table = rows.page_table.shape[1]
    dtype = wide_dtype(index_q.dtype)
    query_block = rows.positions // block_size

    def score_block(block: Array, scores: Array) -> Array:
        keys = index_pages[jnp.maximum(rows.page_table[:, block], 0)]
        s = jnp.einsum("btki,bci->btkc", index_q, keys, precision=EXACT, preferred_element_type=dtype)
        key_position = block * block_size + jnp.arange(block_size)
        visible = (key_position <= rows.positions[..., None]) & (key_position < rows.lengths[:, None, None])
        best = jnp.max(jnp.where(visible[:, :, None], s, -jnp.inf), axis=-1)
        return scores.at[..., block].set(best)

    scores = jnp.full((*index_q.shape[:3], n_table), -jnp.inf, dtype)
    scores = lax.fori_loop(0, rows.n_blocks, score_block, scores)

    block = jnp.arange(n_table)
    own = query_block[..., None]
    forced = (block <= own) & ((block > own - local_blocks) | (block < init_blocks))
    scores = jnp.where(forced[:, :, None], jnp.inf, scores)
    best, chosen = lax.top_k(scores, min(top_blocks, n_table))
    chosen = jnp.sort(jnp.where(best > -jnp.inf, chosen, n_table), axis=-1)
    return jnp.where(chosen < n_table, chosen, -1).astype(jnp.int32)
