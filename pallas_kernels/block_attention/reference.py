"""The definition of block attention in plain JAX: a softmax that runs over blocks, one after the other."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.block_select.reference import block_select
from pallas_kernels.paging import LayerPages, PagedRows
from pallas_kernels.precision import EXACT, wide_dtype

# Stands for minus infinity in running maxima, where -inf - -inf would be NaN.
LOWEST = -1e30


def attend(
    q: Float[Array, "B T N H"],
    pages: LayerPages,
    rows: PagedRows,
    blocks: Int[Array, "B T K P"] | None,
) -> Float[Array, "B T N H"]:
    """Attention of each query over its chosen blocks (-1: unused slot), or over all if `blocks` is None.

    Statistics and sums are float32, rounded once to the dtype of `q`. Keys and values that a row does not
    hold are masked themselves, not only their scores: whatever the memory contains, NaN included, reaches
    neither the result nor a gradient. A row without any visible key gives zeros.
    """
    n_rows, n_tokens, n_heads, head_dim = q.shape
    n_kv_heads, block_size = pages.k.shape[1:3]
    dtype = wide_dtype(q.dtype)
    queries = q.reshape(n_rows, n_tokens, n_kv_heads, n_heads // n_kv_heads, head_dim)
    kv_head = jnp.arange(n_kv_heads)
    table = jnp.maximum(rows.page_table, 0)
    row = jnp.arange(n_rows)[:, None, None]

    def add_block(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        best, total, out = carry
        # [B, T, K] for chosen blocks; one block for all queries and heads, [1, 1, 1], for dense attention.
        block = jnp.full((1, 1, 1), step) if blocks is None else blocks[..., step]
        page = table[row, jnp.maximum(block, 0)]
        key_position = block[..., None] * block_size + jnp.arange(block_size)
        held = (block[..., None] >= 0) & (key_position < rows.lengths[:, None, None, None])
        visible = held & (key_position <= rows.positions[..., None, None])
        k, v = pages.read(page, kv_head, held)
        s = jnp.matmul(queries, k.swapaxes(-1, -2), precision=EXACT, preferred_element_type=dtype)
        s = jnp.where(visible[..., None, :], s * head_dim**-0.5, LOWEST)
        new_best = jnp.maximum(best, lax.stop_gradient(jnp.max(s, axis=-1)))
        weight = jnp.where(visible[..., None, :], jnp.exp(s - new_best[..., None]), 0)
        decay = jnp.exp(best - new_best)
        total = total * decay + jnp.sum(weight, axis=-1)
        out = out * decay[..., None] + jnp.matmul(weight, v.astype(dtype), precision=EXACT)
        return new_best, total, out

    shape = queries.shape[:-1]
    carry = (jnp.full(shape, LOWEST, dtype), jnp.zeros(shape, dtype), jnp.zeros(queries.shape, dtype))
    n_steps = rows.n_blocks if blocks is None else blocks.shape[-1]
    _, total, out = lax.fori_loop(0, n_steps, add_block, carry)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    return out.reshape(q.shape).astype(q.dtype)


def block_attention(
    q: Float[Array, "B T N H"],
    index_q: Float[Array, "B T K I"] | None,
    pages: LayerPages,
    rows: PagedRows,
    *,
    top_blocks: int,
    local_blocks: int,
    init_blocks: int,
) -> tuple[Float[Array, "B T N H"], Int[Array, "B T K P"] | None]:
    """Attention over the blocks that `index_q` chooses, or over all without one; and the chosen blocks."""
    blocks = None
    if index_q is not None and pages.index_k is not None:
        choice = {"top_blocks": top_blocks, "local_blocks": local_blocks, "init_blocks": init_blocks}
        blocks = block_select(index_q, pages.index_k, rows, **choice)
    return attend(q, pages, rows, blocks), blocks
