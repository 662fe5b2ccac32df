"""The paged cache: K, V and index keys of every layer, and which pages a sequence holds.

A page is a block of attention: `block_size` tokens of one layer. All layers share one page table per
sequence, and index keys travel with K and V.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from mmx_jax.config import ModelConfig
from pallas_kernels.paging import PagedRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerPages:
    """One layer's pages, head-major because each KV head picks its own blocks."""

    k: Float[Array, "pages K C H"]
    v: Float[Array, "pages K C H"]
    index_k: Float[Array, "pages C I"] | None

    def append(
        self,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        index_k: Float[Array, "B T I"] | None,
        rows: PagedRows,
    ) -> "LayerPages":
        """Write the new tokens' keys and values; those of padding tokens go nowhere."""
        n_pages, _, block_size, _ = self.k.shape
        page, offset = rows.slots(block_size, n_pages)
        return LayerPages(
            self.k.at[page, :, offset].set(k, mode="drop"),
            self.v.at[page, :, offset].set(v, mode="drop"),
            self.index_k if index_k is None else self.index_k.at[page, offset].set(index_k, mode="drop"),  # pyright: ignore[reportOptionalMemberAccess]
        )


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
