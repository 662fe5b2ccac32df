"""qk_norm_rope as one Pallas-Triton kernel, for decoding: a program norms and rotates one head of one token.

Queries go to new arrays; keys and values go straight to their slots in the pages, which are changed in place,
rounded where the pages are. In the decode step of M3 on one H200, 1 row, bfloat16 pages: 2.1 µs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, DTypeLike, Float

from pallas_kernels.add_norm.triton import sum_terms
from pallas_kernels.call import Call
from pallas_kernels.paging import LayerPages, PagedRows, round_heads
from pallas_kernels.qk_norm_rope.reference import HeadLayout, HeadNorms


class _Part(NamedTuple):
    """Some dims of a head, which of them are real, and their values."""

    dims: Array
    real: Array
    values: Array


@dataclass(frozen=True)
class _Heads:
    """Neighbouring heads of one kind in the projections, and what becomes of them."""

    count: int
    dim: int
    norm_ref: Any  # None: passed through
    store: Callable[[Array, list[_Part]], None]  # of a head, whose parts are these


def _norm_rope(x_ref, cos_ref, sin_ref, row, first, heads: _Heads, head, dtype, eps) -> None:
    """One head: its two rotated parts and the rest are held apart, so that pairs need no exchange."""
    n_pairs = cos_ref.shape[2]
    pair = jnp.arange(pl.next_power_of_2(n_pairs))
    parts = [(pair, pair < n_pairs), (n_pairs + pair, pair < n_pairs)]
    if (n_rest := heads.dim - 2 * n_pairs) > 0:
        rest = jnp.arange(pl.next_power_of_2(n_rest))
        parts.append((2 * n_pairs + rest, rest < n_rest))
    base = first + head * heads.dim
    values = [sum_terms(x_ref, row, base + i, m).astype(dtype) for i, m in parts]
    if heads.norm_ref is not None:
        values = [x.astype(jnp.float32) for x in values]
        mean = sum(jnp.sum(x * x, axis=0) for x in values) / heads.dim
        scale = lax.rsqrt(mean + eps)
        weights = [plt.load(heads.norm_ref.at[i], mask=m, other=0) for i, m in parts]
        values = [x * scale * (1 + w.astype(jnp.float32)) for x, w in zip(values, weights, strict=True)]
        cos, sin = (
            plt.load(ref.at[row, 0, pair], mask=pair < n_pairs, other=0) for ref in (cos_ref, sin_ref)
        )
        a, b, *others = values
        values = [a * cos - b * sin, b * cos + a * sin, *others]
        values = [x.astype(dtype) for x in values]
    heads.store(head, [_Part(i, m, x) for (i, m), x in zip(parts, values, strict=True)])


def _kernel(
    x_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    table_ref: Any,
    positions_ref: Any,
    lengths_ref: Any,
    norms: HeadNorms,
    _: LayerPages,  # the pages before; the same memory as those after
    q_ref: Any,
    index_q_ref: Any,
    pages: LayerPages,
    *,
    layout: HeadLayout,
    eps: float,
) -> None:
    row, program = pl.program_id(0), pl.program_id(1)
    position = positions_ref[row, 0]
    block_size = pages.k.shape[2]
    block = jnp.minimum(position // block_size, table_ref.shape[1] - 1)
    page, offset = table_ref[row, block], position % block_size
    valid = position < lengths_ref[row]

    def to_query(ref: Any) -> Callable:
        def store(head: Array, parts: list[_Part]) -> None:
            for part in parts:
                plt.store(ref.at[row, 0, head, part.dims], part.values, mask=part.real)

        return store

    def to_pages(ref: Any, scale_ref: Any = None) -> Callable:
        def store(head: Array, parts: list[_Part]) -> None:
            values = [part.values for part in parts]
            if scale_ref is not None:
                values, scale = round_heads(values, ref.dtype)
                plt.store(scale_ref.at[page, head, offset], scale, mask=valid)
            for (dims, real, _), x in zip(parts, values, strict=True):
                at = ref.at[page, head, offset, dims] if len(ref.shape) == 4 else ref.at[page, offset, dims]
                plt.store(at, x, mask=real & valid)

        return store

    kinds = [
        _Heads(layout.n_heads, layout.head_dim, norms.q, to_query(q_ref)),
        _Heads(layout.n_kv_heads, layout.head_dim, norms.k, to_pages(pages.k, pages.k_scale)),
        _Heads(layout.n_kv_heads, layout.head_dim, None, to_pages(pages.v, pages.v_scale)),
    ]
    if layout.index_dim is not None:
        kinds += [
            _Heads(layout.n_kv_heads, layout.index_dim, norms.index_q, to_query(index_q_ref)),
            _Heads(1, layout.index_dim, norms.index_k, to_pages(pages.index_k)),
        ]
    head, first = 0, 0
    for kind in kinds:
        pl.when((program >= head) & (program < head + kind.count))(
            partial(_norm_rope, x_ref, cos_ref, sin_ref, row, first, kind, program - head, q_ref.dtype, eps)
        )
        head, first = head + kind.count, first + kind.count * kind.dim


def supported(call: Call) -> str | None:
    """What is in the way of this call, if anything."""
    return call.wrong_dtype() or call.no_decoding()


def qk_norm_rope(
    terms: Float[Array, "_ B 1 F"],
    layout: HeadLayout,
    norms: HeadNorms,
    cos: Float[Array, "B 1 R"],
    sin: Float[Array, "B 1 R"],
    pages: LayerPages,
    rows: PagedRows,
    *,
    dtype: DTypeLike,
    eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 K I"] | None, LayerPages]:
    """Queries, index queries and the pages with the new keys, as the reference defines them."""
    n_rows = terms.shape[1]
    n_heads = layout.n_heads + 2 * layout.n_kv_heads
    index_q = None
    if layout.index_dim is not None:
        index_q = jax.ShapeDtypeStruct((n_rows, 1, layout.n_kv_heads, layout.index_dim), dtype)
        n_heads += layout.n_kv_heads + 1
    q = jax.ShapeDtypeStruct((n_rows, 1, layout.n_heads, layout.head_dim), dtype)
    out = (q, index_q, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), pages))
    operands = (terms[:, :, 0], cos, sin, rows.page_table, rows.positions, rows.lengths, norms, pages)
    n_pages, n_in, n_out = (len(jax.tree.leaves(tree)) for tree in (pages, operands, out))
    return pl.pallas_call(
        partial(_kernel, layout=layout, eps=eps),
        out_shape=out,
        grid=(n_rows, n_heads),
        in_specs=jax.tree.map(lambda _: pl.no_block_spec, operands),
        out_specs=jax.tree.map(lambda _: pl.no_block_spec, out),
        input_output_aliases={n_in - 1 - i: n_out - 1 - i for i in range(n_pages)},
        compiler_params=plt.CompilerParams(num_warps=1),
        interpret=interpret,
        name="qk_norm_rope",
    )(*operands)
