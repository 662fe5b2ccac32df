"""Routing buffers of static shape: who goes where, sorted by expert, whatever the router chose."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.call import DECODE_TOKENS

# For decoding, when an expert has few rows, tiles of the fewest rows that a matrix unit takes serve best.
MIN_TILE_ROWS = 8
MAX_TILE_ROWS = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """T tokens with X experts each; their T * X (token, expert) pairs, cut into tiles of one expert each.

    Pair p belongs to token p // X. Tile i holds the pairs `order[start:start + count]`, at most `tile_rows`
    of them, all of expert `tile_expert[i]`; unused tiles come last, with expert -1 and count 0. Pairs of
    padding tokens are in no tile, and their expert is E.
    """

    experts: Int[Array, "T X"]
    weights: Float[Array, "T X"]
    order: Int[Array, " pairs"]
    tile_expert: Int[Array, " tiles"]
    tile_start: Int[Array, " tiles"]
    tile_count: Int[Array, " tiles"]
    tile_rows: int = field(metadata={"static": True})


def tile_rows(n_tokens: int, top_k: int, n_experts: int) -> int:
    """Rows of a tile: the fewest for decoding, else about the pairs that an expert can expect."""
    if n_tokens <= DECODE_TOKENS:
        return MIN_TILE_ROWS
    expected = 1 << max(n_tokens * top_k // n_experts - 1, 0).bit_length()
    return min(max(expected, MIN_TILE_ROWS), MAX_TILE_ROWS)


def max_tiles(n_tokens: int, top_k: int, n_experts: int) -> int:
    """Tiles that so many tokens can fill, whatever experts they have."""
    n_pairs = n_tokens * top_k
    return min(n_pairs, n_pairs // tile_rows(n_tokens, top_k, n_experts) + n_experts)


def make_routing(
    experts: Int[Array, "T X"],
    weights: Float[Array, "T X"],
    valid: Bool[Array, " T"],
    n_experts: int,
) -> Routing:
    """Sort the pairs by expert (stable, so by token within an expert) and cut them into tiles."""
    n_tokens, top_k = experts.shape
    rows = tile_rows(n_tokens, top_k, n_experts)
    flat = jnp.where(valid[:, None], experts, n_experts).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    offsets = jnp.searchsorted(flat[order], jnp.arange(n_experts + 1))
    n_tiles = (jnp.diff(offsets) + rows - 1) // rows
    ends = jnp.cumsum(n_tiles)

    tile = jnp.arange(max_tiles(n_tokens, top_k, n_experts))
    used = tile < ends[-1]
    expert = jnp.where(used, jnp.searchsorted(ends, tile, side="right"), 0)
    start = offsets[expert] + (tile - (ends - n_tiles)[expert]) * rows
    count = jnp.where(used, jnp.minimum(offsets[expert + 1] - start, rows), 0)
    return Routing(
        experts=jnp.where(valid[:, None], experts, n_experts),
        weights=weights,
        order=order.astype(jnp.int32),
        tile_expert=jnp.where(used, expert, -1).astype(jnp.int32),
        tile_start=jnp.where(used, start, 0).astype(jnp.int32),
        tile_count=count.astype(jnp.int32),
        tile_rows=rows,
    )
