"""Where the tokens of one call live in the paged cache. A page holds the keys of one attention block.

A block is anchored to the absolute position of its tokens: position p of a row is at offset p % C of page
`page_table[row, p // C]`. There is no left padding anywhere.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@dataclass(frozen=True)
class PagedRows:
    """B sequences with T new tokens each, and the pages behind them.

    `lengths` counts the tokens a row holds once the new ones are written; a new token at or beyond it is
    padding: it is not written, routed to no expert, and its result is meaningless but finite.
    `n_blocks` bounds the blocks that any row has in use. As a Python int it makes loops over blocks
    differentiable; as a traced scalar it makes their cost follow the sequences and not the capacity.
    """

    page_table: Int[Array, "B M"]
    positions: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    n_blocks: int | Int[Array, ""]

    @property
    def valid(self) -> Bool[Array, "B T"]:
        """Which new tokens are real."""
        return self.positions < self.lengths[:, None]

    def slots(self, block_size: int, n_pages: int) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
        """Page and offset of each new token; padding gets page `n_pages`, which a dropping scatter skips."""
        block = jnp.minimum(self.positions // block_size, self.page_table.shape[1] - 1)
        page = jnp.take_along_axis(self.page_table, block, axis=1)
        return jnp.where(self.valid, page, n_pages), self.positions % block_size


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
