"""route as two Pallas-Triton kernels, for decoding: scores by parts of the contracted axis, then the choice.

The norm is a factor of the scores, W (x / rms(x)) = (W x) / rms(x): so the first kernel can score what it has
just added up, before anyone knows rms(x). In the second, one program routes all tokens while others norm one
row each. Scores are of the norm before it is rounded.

In the decode step of M3 on one H200: 3.7 and 3.0 µs with 1 row, 15.7 and 9.3 with 32.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float

from pallas_kernels.add_norm.triton import add_terms, store_norm
from pallas_kernels.call import Call
from pallas_kernels.moe.routing import Routing, max_tiles, tile_rows
from pallas_kernels.route.reference import RouterWeights

# What one program scores: of one token, and of several.
ONE_EXPERTS, ONE_LANES = 4, 1024
EXPERTS, LANES, MAX_ROWS = 64, 64, 32
MAX_SCORES = 512  # of an expert: tokens times parts
LOWEST = -1e30  # below any score, above those that are out


def _score_one(
    x_ref: Any, terms_ref: Any, router: Any, out_ref: Any, squares_ref: Any, scores_ref: Any
) -> None:
    """For one token, a matter of latency: no loop, so that all of a program's loads are under way at once."""
    part, block, token = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    lane, expert = part * ONE_LANES + jnp.arange(ONE_LANES), block * ONE_EXPERTS + jnp.arange(ONE_EXPERTS)
    real, is_expert = lane < x_ref.shape[1], expert < scores_ref.shape[2]
    x = add_terms(x_ref, terms_ref, token, lane, real)
    plt.store(out_ref.at[token, lane], x, mask=real & (block == 0))
    x = x.astype(jnp.float32)
    plt.store(squares_ref.at[part, token], jnp.sum(x * x, axis=0), mask=block == 0)
    x *= 1 + plt.load(router.norm.at[lane], mask=real, other=0)
    mask = is_expert[:, None] & real[None, :]
    weight = plt.load(router.weight.at[expert[:, None], lane[None, :]], mask=mask, other=0)
    plt.store(scores_ref.at[part, token, expert], jnp.sum(weight * x[None, :], axis=1), mask=is_expert)


def _score(
    x_ref: Any,
    terms_ref: Any,
    router: Any,
    out_ref: Any,
    squares_ref: Any,  # [parts, T]
    scores_ref: Any,  # [parts, T, E]
    *,
    n_rows: int,
    steps: int,
) -> None:
    part, block, tile = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    n_tokens, dim = x_ref.shape
    token = tile * n_rows + jnp.arange(n_rows)
    expert = block * EXPERTS + jnp.arange(EXPERTS)
    is_token, is_expert = token < n_tokens, expert < scores_ref.shape[2]

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        squares, scores = carry
        lane = i * LANES + jnp.arange(LANES)
        real = lane < dim
        mask = is_token[:, None] & real[None, :]
        x = add_terms(x_ref, terms_ref, token[:, None], lane[None, :], mask)
        plt.store(out_ref.at[token[:, None], lane[None, :]], x, mask=mask & (block == 0))
        mask = is_expert[:, None] & real[None, :]
        weight = plt.load(router.weight.at[expert[:, None], lane[None, :]], mask=mask, other=0)
        weight *= 1 + plt.load(router.norm.at[lane], mask=real, other=0)[None, :]
        for _ in range(3):  # float32 is the sum of three bfloat16, and x is one: the products are exact
            high = weight.astype(x.dtype)
            scores += plt.dot(high, x, trans_b=True)
            weight -= high.astype(jnp.float32)
        return squares + jnp.sum(x.astype(jnp.float32) ** 2, axis=1), scores

    zeros = jnp.zeros(n_rows, jnp.float32), jnp.zeros((EXPERTS, n_rows), jnp.float32)
    last = jnp.minimum((part + 1) * steps, pl.cdiv(dim, LANES))
    squares, scores = lax.fori_loop(part * steps, last, step, zeros)
    plt.store(squares_ref.at[part, token], squares, mask=is_token & (block == 0))
    at = scores_ref.at[part, token[None, :], expert[:, None]]
    plt.store(at, scores, mask=is_expert[:, None] & is_token[None, :])


def _choose(scores_ref: Any, squares_ref: Any, bias_ref: Any, valid_ref: Any, routing: Any, dim, eps, scale):
    """All tokens' experts and their tiles; `routing` is of references."""
    n_tokens, n_experts = scores_ref.shape[1:]
    top_k, rows = routing.experts.shape[1], routing.tile_rows
    token = jnp.arange(pl.next_power_of_2(n_tokens))
    expert = jnp.arange(pl.next_power_of_2(n_experts))
    is_token, is_expert = token < n_tokens, expert < n_experts
    squares, logits = jnp.zeros(token.shape, jnp.float32), jnp.zeros((token.size, expert.size), jnp.float32)
    for part in range(scores_ref.shape[0]):
        squares += plt.load(squares_ref.at[part, token], mask=is_token, other=0)
        at = scores_ref.at[part, token[:, None], expert[None, :]]
        logits += plt.load(at, mask=is_token[:, None] & is_expert[None, :], other=0)
    p = 1 / (1 + jnp.exp(-logits * lax.rsqrt(squares / dim + eps)[:, None]))
    score = p + plt.load(bias_ref.at[expert], mask=is_expert, other=0)[None, :]
    score = jnp.where(score != score, jnp.inf, jnp.maximum(score, LOWEST))
    score = jnp.where(is_expert[None, :], score, -jnp.inf)

    valid = plt.load(valid_ref.at[token], mask=is_token, other=0) != 0
    chosen, weights = [], []
    taken = jnp.zeros(p.shape, jnp.int32)
    for _ in range(top_k):
        best = jnp.argmax(score, axis=1).astype(jnp.int32)
        hit = expert[None, :] == best[:, None]
        chosen.append(best)
        weights.append(jnp.sum(jnp.where(hit, p, 0), axis=1))
        score = jnp.where(hit, -jnp.inf, score)
        taken += (hit & valid[:, None]).astype(jnp.int32)

    # Tokens in order within an expert, experts in order: where each pair stands, without sorting.
    rank = jnp.cumsum(taken, axis=0) - taken
    count = jnp.sum(taken, axis=0)
    start = jnp.cumsum(count, axis=0) - count
    n_tiles = lax.div(count + rows - 1, rows)
    first = jnp.cumsum(n_tiles, axis=0) - n_tiles
    total = sum(weights)
    for slot in range(top_k):
        hit = expert[None, :] == chosen[slot][:, None]
        place = jnp.sum(jnp.where(hit, start[None, :] + rank, 0), axis=1)
        place = jnp.where(valid, place, n_tokens * top_k)  # behind the end, where nothing is written
        plt.store(routing.order.at[place], token * top_k + slot, mask=valid)
        plt.store(routing.experts.at[token, slot], jnp.where(valid, chosen[slot], n_experts), mask=is_token)
        plt.store(routing.weights.at[token, slot], weights[slot] / total * scale, mask=is_token)

    def store(at: Array, mask: Array, expert: Array, start: Array, count: Array) -> None:
        at = jnp.where(mask, at, routing.tile_expert.shape[0])
        plt.store(routing.tile_expert.at[at], expert, mask=mask)
        plt.store(routing.tile_start.at[at], start, mask=mask)
        plt.store(routing.tile_count.at[at], count, mask=mask)

    def tile(i: Array, _: None) -> None:
        begin = i * rows
        store(first + i, i < n_tiles, expert, start + begin, jnp.minimum(count - begin, rows))

    lax.fori_loop(0, pl.cdiv(n_tokens, rows), tile, None)
    unused = jnp.arange(pl.next_power_of_2(routing.tile_expert.shape[0]))
    is_unused = (unused >= jnp.sum(n_tiles, axis=0)) & (unused < routing.tile_expert.shape[0])
    nothing = jnp.zeros(unused.shape, jnp.int32)
    store(unused, is_unused, nothing - 1, nothing, nothing)


def _route(
    x_ref: Any,
    squares_ref: Any,
    scores_ref: Any,
    router: Any,
    valid_ref: Any,
    normed_ref: Any,
    routing: Any,
    *,
    eps: float,
    scale: float,
) -> None:
    program, dim = pl.program_id(0), x_ref.shape[1]

    @pl.when(program == 0)
    def _() -> None:
        _choose(scores_ref, squares_ref, router.bias, valid_ref, routing, dim, eps, scale)

    @pl.when(program > 0)
    def _() -> None:
        row, lane = jnp.maximum(program - 1, 0), jnp.arange(pl.next_power_of_2(dim))
        squares = sum(squares_ref[part, row] for part in range(squares_ref.shape[0]))
        x = plt.load(x_ref.at[row, lane], mask=lane < dim, other=0)
        store_norm(x, squares, router.norm, normed_ref, row, eps)


def supported(call: Call) -> str | None:
    """What is in the way of this call, if anything."""
    return call.wrong_dtype() or call.too_many_tokens()


def route(
    x: Float[Array, "T D"],
    terms: Float[Array, "_ T D"],
    router: RouterWeights,
    valid: Bool[Array, " T"],
    *,
    eps: float,
    top_k: int,
    scale: float,
    interpret: bool = False,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"], Routing]:
    """As the reference defines it; entries of `Routing.order` that are in no tile are anything."""
    (n_tokens, dim), n_experts = x.shape, router.bias.shape[0]
    if n_tokens == 1:
        score, parts = _score_one, pl.cdiv(dim, ONE_LANES)
        grid = parts, pl.cdiv(n_experts, ONE_EXPERTS), 1
    else:
        n_rows = max(8, min(pl.next_power_of_2(n_tokens), MAX_ROWS))
        all_steps = pl.cdiv(dim, LANES)
        # One program of the next kernel reads all parts of all tokens: few tokens may have many.
        steps = pl.cdiv(all_steps, max(MAX_SCORES // n_tokens, 1))
        score, parts = partial(_score, n_rows=n_rows, steps=steps), pl.cdiv(all_steps, steps)
        grid = parts, pl.cdiv(n_experts, EXPERTS), pl.cdiv(n_tokens, n_rows)
    same = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def float32(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def int32(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def specs(tree: Any) -> Any:
        return jax.tree.map(lambda _: pl.no_block_spec, tree)

    operands = x, terms, router
    out = same, float32(parts, n_tokens), float32(parts, n_tokens, n_experts)
    x, squares, scores = pl.pallas_call(
        score,
        out_shape=out,
        grid=grid,
        in_specs=specs(operands),
        out_specs=specs(out),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="router_scores",
    )(*operands)
    pairs = n_tokens, top_k
    tiles = int32(max_tiles(n_tokens, top_k, n_experts))
    rows = tile_rows(n_tokens, top_k, n_experts)
    routing = Routing(int32(*pairs), float32(*pairs), int32(n_tokens * top_k), tiles, tiles, tiles, rows)
    operands, out = (x, squares, scores, router, valid.astype(jnp.int32)), (same, routing)
    normed, routing = pl.pallas_call(
        partial(_route, eps=eps, scale=scale),
        out_shape=out,
        grid=(1 + n_tokens,),
        in_specs=specs(operands),
        out_specs=specs(out),
        compiler_params=plt.CompilerParams(num_warps=8 if n_tokens <= 32 else 16),
        interpret=interpret,
        name="route",
    )(*operands)
    return x, normed, routing
