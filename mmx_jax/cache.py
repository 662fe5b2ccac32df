"""The paged cache: K, V and index keys of every layer, and which pages a sequence holds.

A page is a block of attention: `block_size` tokens of one layer. All layers share one page table per
sequence, and index keys travel with K and V.
"""

import jax.numpy as jnp
from jaxtyping import DTypeLike

from mmx_jax.config import ModelConfig
from pallas_kernels.paging import LayerPages

Pages = tuple[LayerPages, ...]


def make_pages(config: ModelConfig, n_pages: int, dtype: DTypeLike) -> Pages:
    """Pages for all layers. Their content never matters before it is written; zeros are as good as any."""
    c = config
    kv_shape = (n_pages, c.num_kv_heads, c.block_size, c.head_dim)
    index_shape = (n_pages, c.block_size, c.index_head_dim)
    return tuple(
        LayerPages(
            jnp.zeros(kv_shape, dtype),
            jnp.zeros(kv_shape, dtype),
            jnp.zeros(index_shape, dtype) if sparse else None,
        )
        for sparse in c.sparse_layers
    )
