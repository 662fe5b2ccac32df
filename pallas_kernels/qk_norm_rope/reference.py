"""The definition of what lies between the projections and the attention, in plain JAX."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from pallas_kernels.add_norm.reference import rms_norm
from pallas_kernels.paging import LayerPages, PagedRows


@dataclass(frozen=True)
class HeadLayout:
    """Which heads the projections of one layer hold, in this order: q, k, v, index q, index k.

    `index_dim` is None in a layer without an indexer; else there are as many index queries as KV heads, and
    one index key.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    index_dim: int | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadNorms:
    """The norm weights of each kind of head; float32."""

    q: Float[Array, " H"]
    k: Float[Array, " H"]
    index_q: Float[Array, " I"] | None
    index_k: Float[Array, " I"] | None


def norm_rope(
    x: Float[Array, "B T h H"],
    weight: Float[Array, " H"],
    cos: Float[Array, "B T R"],
    sin: Float[Array, "B T R"],
    eps: float,
) -> Float[Array, "B T h H"]:
    """Norm and rotate, in float32, rounded once to the dtype of `x`.

    Split-half (NeoX) pairs: dims i and i + R turn together, i < R; dims from 2 R on pass through.
    """
    n_pairs = cos.shape[-1]
    normed = rms_norm(x, weight, eps)
    a, b, rest = normed[..., :n_pairs], normed[..., n_pairs : 2 * n_pairs], normed[..., 2 * n_pairs :]
    cos, sin = cos[:, :, None].astype(normed.dtype), sin[:, :, None].astype(normed.dtype)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)


def qk_norm_rope(
    terms: Float[Array, "_ B T F"],
    layout: HeadLayout,
    norms: HeadNorms,
    cos: Float[Array, "B T R"],
    sin: Float[Array, "B T R"],
    pages: LayerPages,
    rows: PagedRows,
    *,
    dtype: DTypeLike,
    eps: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K I"] | None, LayerPages]:
    """Queries, index queries (None without an indexer), and the pages with the new keys and values.

    The projections are the sum of `terms`, rounded to `dtype`.
    """
    projected = jnp.sum(terms, axis=0).astype(dtype)
    sizes = [(layout.n_heads, layout.head_dim)] + [(layout.n_kv_heads, layout.head_dim)] * 2
    if layout.index_dim is not None:
        sizes += [(layout.n_kv_heads, layout.index_dim), (1, layout.index_dim)]
    heads, first = [], 0
    for n, dim in sizes:
        heads.append(projected[..., first : first + n * dim].reshape(*projected.shape[:2], n, dim))
        first += n * dim
    q = norm_rope(heads[0], norms.q, cos, sin, eps)
    k = norm_rope(heads[1], norms.k, cos, sin, eps)
    if norms.index_q is None or norms.index_k is None:
        return q, None, pages.append(k, heads[2], None, rows)
    index_q = norm_rope(heads[3], norms.index_q, cos, sin, eps)
    index_k = norm_rope(heads[4], norms.index_k, cos, sin, eps)
    return q, index_q, pages.append(k, heads[2], index_k[:, :, 0], rows)
