"""The paged cache: K, V and index keys of every layer, and which pages a sequence holds.

A page is a block of attention: `block_size` tokens of one layer. All layers share one page table per
sequence, and index keys travel with K and V.
"""

import jax.numpy as jnp
from jaxtyping import DTypeLike

from mmx_jax.config import ModelConfig
from pallas_kernels.paging import PAGE_FORMATS, LayerPages

Pages = tuple[LayerPages, ...]


def make_pages(config: ModelConfig, n_pages: int, dtype: DTypeLike, kv_format: str | None = None) -> Pages:
    """Pages for all layers; keys and values of a format of `PAGE_FORMATS`, or as they are.

    Their content never matters before it is written; zeros are as good as any.
    """
    c = config
    kv_dtype = dtype if kv_format is None else PAGE_FORMATS[kv_format].dtype
    kv_shape = (n_pages, c.num_kv_heads, c.block_size, c.head_dim)
    index_shape = (n_pages, c.block_size, c.index_head_dim)
    return tuple(
        LayerPages(
            jnp.zeros(kv_shape, kv_dtype),
            jnp.zeros(kv_shape, kv_dtype),
            jnp.zeros(index_shape, dtype) if sparse else None,
            *([] if kv_format is None else [jnp.zeros(kv_shape[:-1]) for _ in "kv"]),
        )
        for sparse in c.sparse_layers
    )
