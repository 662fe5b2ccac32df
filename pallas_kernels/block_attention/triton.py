"""block_attention as two Pallas-Triton kernels, for decoding: partial results, then their weighted sum.

A program takes one row, one KV head and a share of the keys, so that even one sequence keeps the chip busy;
all query heads of the KV head use a key while it is there. A row is cut into the same number of shares
whatever its length.

Tried on one H200, M3's dims, all blocks of 128K / 512K keys in µs (this: 70 / 248):
- 264 / 528 / 1056 programs: 74 / 71 / 77 at 128K; 1056 programs with 32 keys a step: 92 / 348.
- 128 keys a step with 264 programs: 72 / 249 with two stages, 71 / 250 with 8 warps. Two or four stages with
  64 keys: within 2%.

Rounded pages, of half as many bytes, save 12 % (int8) and 7 % (fp8) at 512K: what unpacks them costs the
rest. Instructions of a warp for 64 keys, compiled offline with another Triton: bfloat16 370, int8 974, fp8
1038. Plain integer operations in place of fp8's assembly took 406 more; a cast, 90 fewer, but it needs
compute capability 8.9.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels import tuning
from pallas_kernels.block_select.triton import block_scores, choose, visible
from pallas_kernels.call import Call
from pallas_kernels.paging import LayerPages, PagedRows
from pallas_kernels.tiles import e4m3_to_bfloat16

# Stands for minus infinity in running maxima, where -inf - -inf would be NaN.
LOWEST = -1e30


def _numbers(codes: Array, interpret: bool) -> Array:
    """Codes of rounded pages in bfloat16; exact."""
    return e4m3_to_bfloat16(codes, interpret) if codes.dtype == jnp.uint8 else codes.astype(jnp.bfloat16)


def _attend(
    q_ref: Any,
    pages: Any,  # the references of LayerPages
    table_ref: Any,
    positions_ref: Any,
    lengths_ref: Any,
    scores_ref: Any,
    out_ref: Any,
    best_ref: Any,
    total_ref: Any,
    blocks_ref: Any,
    *,
    keys: int,
    shares: int,
    choice: Mapping[str, int],
    interpret: bool,
) -> None:
    dense = scores_ref is None
    n_heads, head_dim = q_ref.shape[2:]
    n_kv_heads, block_size = pages.k.shape[1:3]
    group = n_heads // n_kv_heads
    row, kv_head, share = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head = jnp.arange(max(16, pl.next_power_of_2(group)))
    lane = jnp.arange(max(16, pl.next_power_of_2(head_dim)))
    in_head = lane < head_dim
    heads = kv_head * group + head
    q_mask = (head < group)[:, None] & in_head[None, :]
    q = plt.load(q_ref.at[row, 0, heads[:, None], lane[None, :]], mask=q_mask, other=0)

    chosen, place = None, None
    if not dense:
        refs = scores_ref, positions_ref, lengths_ref
        chosen, place = choose(*refs, row, kv_head, block_size=block_size, **choice)
        n_chosen = blocks_ref.shape[2]
        plt.store(blocks_ref.at[row, kv_head, place], chosen, mask=(place < n_chosen) & (share == 0))

    n_keys = visible(positions_ref, lengths_ref, row)
    steps_per_page = pl.cdiv(block_size, keys)
    n_blocks = pl.cdiv(n_keys, block_size) if dense else blocks_ref.shape[2]
    steps = pl.cdiv(n_blocks * steps_per_page, shares)
    first = share * steps
    last = jnp.minimum(first + steps, n_blocks * steps_per_page)

    def attend(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        best, total, out = carry
        block = step // steps_per_page
        if chosen is not None:
            block = jnp.sum(jnp.where(place == block, chosen, 0), axis=0)
        page = table_ref[row, jnp.maximum(block, 0)]
        offset = step % steps_per_page * keys + jnp.arange(keys)
        seen = (offset < block_size) & (block * block_size + offset < n_keys) & (block >= 0)
        # What a row does not hold is masked itself: the memory may contain NaN.
        mask = seen[:, None] & in_head[None, :]
        k, v = (
            plt.load(ref.at[page, kv_head, offset[:, None], lane[None, :]], mask=mask, other=0)
            for ref in (pages.k, pages.v)
        )
        k_scale: Any = 1
        v_scale: Any = 1
        if pages.k_scale is not None:
            k, v = (_numbers(codes, interpret) for codes in (k, v))
            # They multiply scores and weights, of which there are fewer than codes.
            k_scale, v_scale = (
                plt.load(ref.at[page, kv_head, offset], mask=seen, other=1)[None, :]
                for ref in (pages.k_scale, pages.v_scale)
            )
        s = plt.dot(q, k, trans_b=True) * (k_scale * (head_dim**-0.5 * math.log2(math.e)))
        s = jnp.where(seen[None, :], s, LOWEST)
        new_best = jnp.maximum(best, jnp.max(s, axis=1))
        weight = jnp.where(seen[None, :], jnp.exp2(s - new_best[:, None]), 0)
        decay = jnp.exp2(best - new_best)
        scaled = (weight * v_scale).astype(v.dtype)
        if pages.v_scale is not None:
            # What the rounding leaves of it. Else a value's dims are all off alike, too much if keys are few.
            weight = scaled.astype(jnp.float32) / v_scale
        total = total * decay + jnp.sum(weight, axis=1)
        out = out * decay[:, None] + plt.dot(scaled, v)
        return new_best, total, out

    carry = (
        jnp.full(head.shape, LOWEST, jnp.float32),
        jnp.zeros(head.shape, jnp.float32),
        jnp.zeros((head.size, lane.size), jnp.float32),
    )
    best, total, out = lax.fori_loop(first, last, attend, carry)
    plt.store(out_ref.at[row, share, heads[:, None], lane[None, :]], out, mask=q_mask)
    plt.store(best_ref.at[row, share, heads], best, mask=head < group)
    plt.store(total_ref.at[row, share, heads], total, mask=head < group)


def _merge(out_ref, best_ref, total_ref, merged_ref) -> None:
    shares, _, head_dim = out_ref.shape[1:]
    row, head = pl.program_id(0), pl.program_id(1)
    share = jnp.arange(pl.next_power_of_2(shares))
    lane = jnp.arange(pl.next_power_of_2(head_dim))
    live = share < shares
    best = plt.load(best_ref.at[row, share, head], mask=live, other=LOWEST)
    total = plt.load(total_ref.at[row, share, head], mask=live, other=0)
    weight = jnp.exp2(best - jnp.max(best, axis=0))
    mask = live[:, None] & (lane < head_dim)[None, :]
    out = plt.load(out_ref.at[row, share[:, None], head, lane[None, :]], mask=mask, other=0)
    out = jnp.sum(out * weight[:, None], axis=0)
    total = jnp.sum(total * weight, axis=0)
    out = out / jnp.where(total > 0, total, 1)
    plt.store(merged_ref.at[row, 0, head, lane], out.astype(merged_ref.dtype), mask=lane < head_dim)


def supported(call: Call) -> str | None:
    """What is in the way of this call, if anything."""
    return call.wrong_dtype() or call.no_decoding()


def block_attention(
    q: Float[Array, "B 1 N H"],
    index_q: Float[Array, "B 1 K I"] | None,
    pages: LayerPages,
    rows: PagedRows,
    *,
    top_blocks: int,
    local_blocks: int,
    init_blocks: int,
    interpret: bool = False,
) -> tuple[Float[Array, "B 1 N H"], Int[Array, "B 1 K P"] | None]:
    """Attention of one new token per row, as the reference defines it, with weights in bfloat16."""
    n_rows, _, n_heads, head_dim = q.shape
    n_kv_heads, block_size = pages.k.shape[1:3]
    n_blocks, scores, blocks = rows.page_table.shape[1], None, None
    if index_q is not None and pages.index_k is not None:
        scores = block_scores(index_q, pages.index_k, rows, interpret=interpret)
        n_blocks = min(top_blocks, n_blocks)
        blocks = jax.ShapeDtypeStruct((n_rows, n_kv_heads, n_blocks), jnp.int32)
    choice = {"top_blocks": n_blocks, "local_blocks": local_blocks, "init_blocks": init_blocks}
    tuned = tuning.parameters("block_attention")
    # A step never crosses a page.
    keys = min(tuned["keys"], max(16, pl.next_power_of_2(block_size)))
    shares = min(max(tuned["programs"] // (n_rows * n_kv_heads), 1), n_blocks * pl.cdiv(block_size, keys))
    pages = replace(pages, index_k=None)
    operands = (q, pages, rows.page_table, rows.positions, rows.lengths, scores)
    out_shape = (
        jax.ShapeDtypeStruct((n_rows, shares, n_heads, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((n_rows, shares, n_heads), jnp.float32),
        jax.ShapeDtypeStruct((n_rows, shares, n_heads), jnp.float32),
        blocks,
    )
    *partials, blocks = pl.pallas_call(
        partial(_attend, keys=keys, shares=shares, choice=choice, interpret=interpret),
        out_shape=out_shape,
        grid=(n_rows, n_kv_heads, shares),
        in_specs=jax.tree.map(lambda _: pl.no_block_spec, operands),
        out_specs=jax.tree.map(lambda _: pl.no_block_spec, out_shape),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="block_attention",
    )(*operands)
    merged = pl.pallas_call(
        _merge,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(n_rows, n_heads),
        in_specs=[pl.no_block_spec] * 3,
        out_specs=pl.no_block_spec,
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="merge",
    )(*partials)
    return merged, None if blocks is None else blocks[:, None]
