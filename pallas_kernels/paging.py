"""Where the tokens of one call live in the paged cache. A page holds the keys of one attention block.

A block is anchored to the absolute position of its tokens: position p of a row is at offset p % C of page
`page_table[row, p // C]`. There is no left padding anywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Integer, Num

from pallas_kernels.formats import E4M3
from pallas_kernels.precision import TINY, divide, nearest, wide


@jax.tree_util.register_dataclass
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


@dataclass(frozen=True)
class PageFormat:
    """How keys and values are rounded: half to even, to codes of which `largest` is the largest.

    Its dtype tells the format of a page, so no two share one.
    """

    dtype: DTypeLike
    largest: float
    encode: Callable[[Array], Array]
    decode: Callable[[Array], Array]  # exact, in float32


PAGE_FORMATS: Mapping[str, PageFormat] = {
    "int8": PageFormat(
        jnp.int8, 127.0, lambda x: nearest(x).astype(jnp.int8), lambda codes: codes.astype(jnp.float32)
    ),
    "fp8": PageFormat(jnp.uint8, E4M3.largest, E4M3.encode, E4M3.decode),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerPages:
    """One layer's pages, head-major because each KV head picks its own blocks.

    Keys and values are plain numbers, or codes of a format of `PAGE_FORMATS` with a scale for each token and
    head: k = code * scale, scale = max |k| / largest to within an ulp, 1 for zeros.
    """

    k: Num[Array, "pages K C H"]
    v: Num[Array, "pages K C H"]
    index_k: Float[Array, "pages C I"] | None
    k_scale: Float[Array, "pages K C"] | None = None
    v_scale: Float[Array, "pages K C"] | None = None

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
        k_scale, v_scale = self.k_scale, self.v_scale
        if k_scale is not None and v_scale is not None:
            ((k,), k_new), ((v,), v_new) = (round_heads([x], self.k.dtype) for x in (k, v))
            k_scale = k_scale.at[page, :, offset].set(k_new, mode="drop")
            v_scale = v_scale.at[page, :, offset].set(v_new, mode="drop")
        return LayerPages(
            self.k.at[page, :, offset].set(k, mode="drop"),
            self.v.at[page, :, offset].set(v, mode="drop"),
            self.index_k if index_k is None else self.index_k.at[page, offset].set(index_k, mode="drop"),  # pyright: ignore[reportOptionalMemberAccess]
            k_scale,
            v_scale,
        )

    def read(
        self, page: Int[Array, "..."], head: Int[Array, "..."], held: Bool[Array, "... C"]
    ) -> tuple[Float[Array, "... C H"], Float[Array, "... C H"]]:
        """Keys and values of pages and KV heads, zeros where not held: whatever the memory contains stays."""
        k, v = (jnp.where(held[..., None], a[page, head], 0) for a in (self.k, self.v))
        if self.k_scale is None or self.v_scale is None:
            return k, v
        k_scale, v_scale = (jnp.where(held, a[page, head], 0) for a in (self.k_scale, self.v_scale))
        decode = _format(self.k.dtype).decode
        return decode(k) * k_scale[..., None], decode(v) * v_scale[..., None]


def round_heads(
    parts: Sequence[Float[Array, "*T _"]], dtype: DTypeLike
) -> tuple[list[Integer[Array, "*T _"]], Float[Array, "*T"]]:
    """Codes of each part of some heads, along the last axis, and the scale that the parts of a head share."""
    form = _format(dtype)
    parts = [wide(x) for x in parts]
    most = reduce(jnp.maximum, [jnp.max(jnp.abs(x), axis=-1) for x in parts])
    # A product, which is rounded alike everywhere, unlike a quotient. Subnormals may be taken for 0.
    scale = jnp.where(most == 0, 1, jnp.maximum(most * (1 / form.largest), TINY))
    return [form.encode(divide(x, scale[..., None])) for x in parts], scale


def _format(dtype: DTypeLike) -> PageFormat:
    (found,) = (form for form in PAGE_FORMATS.values() if form.dtype == dtype)
    return found
