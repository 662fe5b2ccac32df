"""block_select in Pallas-Triton, for decoding: a kernel for the scores of all blocks; and the choice, which
the programs of the attention make for themselves, to save a launch.

Scoring reads every index key once: one program takes a few blocks of one row and keeps the maximum of each.
Choosing picks the best block so often as blocks are wanted; the lower of two equal blocks wins.

Tried on one H200, 1 row of 512K keys and 32 rows of 128K, with the choice as a kernel of its own, in µs (so:
41 / 246): 528, 1056, 2112 programs: 41 / 249, 43 / 264, 41 / 251; two or four stages, 2 or 8 warps: equal or
slower. Now scores take 33.9 at 1 row, and attention with the choice 10.8, of 8K keys 3.3 and 7.3.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels import tuning
from pallas_kernels.paging import PagedRows

# The choice runs over the first of these many blocks that holds the row's own, so that a short sequence does
# not pay for the capacity.
WIDTHS = (256, 2048)


def visible(positions_ref: Any, lengths_ref: Any, row: Array) -> Array:
    """How many keys, from the first one on, the row's new token may see."""
    return jnp.minimum(lengths_ref[row], positions_ref[row, 0] + 1)


def _score(q_ref, pages_ref, table_ref, positions_ref, lengths_ref, out_ref, *, shares: int) -> None:
    n_heads, dim = q_ref.shape[2:]
    block_size = pages_ref.shape[1]
    row, share = pl.program_id(0), pl.program_id(1)
    n_keys = visible(positions_ref, lengths_ref, row)
    n_blocks = pl.cdiv(n_keys, block_size)
    steps = pl.cdiv(n_blocks, shares)
    head = jnp.arange(max(8, pl.next_power_of_2(n_heads)))
    lane = jnp.arange(max(16, pl.next_power_of_2(dim)))
    q_mask = (head < n_heads)[:, None] & (lane < dim)[None, :]
    q = plt.load(q_ref.at[row, 0, head[:, None], lane[None, :]], mask=q_mask, other=0)

    def score_block(block: Array, _: None) -> None:
        page = table_ref[row, block]
        key = jnp.arange(max(16, pl.next_power_of_2(block_size)))
        held = (key < block_size) & (block * block_size + key < n_keys)
        mask = held[:, None] & (lane < dim)[None, :]
        keys = plt.load(pages_ref.at[page, key[:, None], lane[None, :]], mask=mask, other=0)
        s = jnp.where(held[:, None], plt.dot(keys, q, trans_b=True), -jnp.inf)
        plt.store(out_ref.at[row, head, block], jnp.max(s, axis=0), mask=head < n_heads)

    lax.fori_loop(share * steps, jnp.minimum((share + 1) * steps, n_blocks), score_block, None)


def choose(
    scores_ref: Any,
    positions_ref: Any,
    lengths_ref: Any,
    row: Array,
    head: Array,
    *,
    block_size: int,
    top_blocks: int,
    local_blocks: int,
    init_blocks: int,
) -> tuple[Array, Array]:
    """The blocks of one row and head, inside a kernel: -1 for none, and each one's place in ascending order.

    As many as the next power of two of `top_blocks`.
    """
    n_blocks = pl.cdiv(visible(positions_ref, lengths_ref, row), block_size)
    own = positions_ref[row, 0] // block_size
    capacity = scores_ref.shape[2]
    slot = jnp.arange(pl.next_power_of_2(top_blocks))
    # Slots that stay unused hold ids beyond any block, which stand behind all others.
    unused = capacity + slot

    def among(width: int) -> Array:
        block = jnp.arange(width)
        scores = plt.load(scores_ref.at[row, head, block], mask=block < n_blocks, other=-jnp.inf)
        forced = (block <= own) & ((block > own - local_blocks) | (block < init_blocks))
        scores = jnp.where(forced, jnp.inf, scores)

        def pick(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            scores, picked = carry
            best = jnp.argmax(scores, axis=0).astype(jnp.int32)
            return jnp.where(block == best, -jnp.inf, scores), jnp.where(slot == i, best, picked)

        return lax.fori_loop(0, jnp.minimum(n_blocks, top_blocks), pick, (scores, unused))[1]

    largest = pl.next_power_of_2(capacity)
    *narrower, widest = *(w for w in WIDTHS if w < largest), largest
    search = partial(among, widest)
    for width in reversed(narrower):
        search = partial(lax.cond, n_blocks <= width, partial(among, width), search)
    picked = search()
    place = jnp.sum((picked[None, :] < picked[:, None]).astype(jnp.int32), axis=1)
    return jnp.where(picked < capacity, picked, -1), place


def block_scores(
    index_q: Float[Array, "B 1 K I"],
    index_pages: Float[Array, "pages C I"],
    rows: PagedRows,
    *,
    interpret: bool = False,
) -> Float[Array, "B K M"]:
    """The score of every block that the new token of a row can see; of others it is anything."""
    n_rows, _, n_heads, _ = index_q.shape
    capacity = rows.page_table.shape[1]
    # A row is cut into equal shares, whatever its length.
    shares = min(max(tuning.parameters("block_select")["programs"] // n_rows, 1), capacity)
    return pl.pallas_call(
        partial(_score, shares=shares),
        out_shape=jax.ShapeDtypeStruct((n_rows, n_heads, capacity), jnp.float32),
        grid=(n_rows, shares),
        in_specs=[pl.no_block_spec] * 5,
        out_specs=pl.no_block_spec,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="block_scores",
    )(index_q, index_pages, rows.page_table, rows.positions, rows.lengths)
