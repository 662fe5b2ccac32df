"""The feed-forward as two Pallas-Triton kernels, for decoding: gate and up with the activation, then down.

One program computes 64 weight rows for one tile of tokens, so every weight is read once, by programs that
stream contiguous tiles; programs of unused tiles end at once. The shared expert's programs come first in the
same launches, in whatever format; its tiles are of all tokens in order. With many tokens it has its own.

Tried on one H200, int4_g64 without a shared expert, both kernels and the weighted sum at 1 / 8 / 32 / 64 /
128 tokens in µs:
- this, with the scales of two groups in a word: 43 / 240 / 629 / 854 / 1008.
- a load for each group's scales: 47 / 260 / 675 / 895 / 1057; loaded after the dot: 8% slower than that.
- no scales at all, which is wrong: - / 214 / - / 756. Half as many dots, also wrong: - / 229 / - / 781.
- the next step's scales carried through the loop: equal. Scales folded into the weights: 17% slower.
- two / four / five stages: 7 / 8 / 25% slower. One or two warps, or x as the first operand with 16 rows:
  twice as slow. 128 rows a program with 8 warps: 20 to 30% slower; 8 warps on 64 rows: twice as slow.
- zero point taken off the sums with row sums of x, instead of off each weight: 4% slower.
- tiles before experts in the grid, evict-first loads, no shift by zero: no difference.

Instructions of a warp in the loop per 1024 values of k, compiled for sm_90 by jax 0.11.2: bfloat16 680,
int3_g64 1061, nvfp4 1224, int4_g64 1244, int8 1468, int8_g64 1620, fp8 1868, mxfp8 2452. int4_g64, int3_g64
and nvfp4 take as long as each other, 44 / 240 / 630 at 1 / 8 / 32 tokens, whatever their bits: by our count
issue slots, arithmetic and shared memory are each about half busy, and none bounds it alone (twice the dots
cost 25 %, twice the programs on a multiprocessor save 5 %). Fewer bytes do not help, so int3_g64 stays at
44 % of the read rate with 1 token and 58 to 63 % with more. Tried on one H200 at 1 / 8 / 64 tokens in µs:
- int3_g64 (this: 47 / 246 / 853): 32-bit words 48 / 237 / 832; two stages 49 / 259 / 902, four 52 / 251 /
  855; one tile a step 52 / 235 / 818; zero point by the matrix unit 59 / 292 / 1009; 16 token rows 54 / 300
  / 1057.
- int4_g64 (45 / 236 / 834): words of 16 bits, two tiles a step 57 / 301 / 1028, one 48 / 228 / 789, with
  two or four stages 61 / 267 / 891 and 49 / 235 / 817; with 16 token rows 55 / 290 / 1016.
- nvfp4 (44 / 232 / 818): two stages 50 / 234 / 818; sums scaled group by group 81 / 440 / 1548; with a tile
  of scales as large as that of the words, which multiplied weights, 64 / 338 / 1210.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels import tuning
from pallas_kernels.call import Call
from pallas_kernels.moe.packing import PackedMLP
from pallas_kernels.moe.routing import MIN_TILE_ROWS, Routing
from pallas_kernels.qmatmul.triton import qmatmul
from pallas_kernels.tiles import ROWS, TILE_FORMATS, TiledTensor, arrange, columns, n_steps, place, tile_dot

# Rows of x, those of all groups together, of one program of an MLP by itself. A shared expert has tiles of as
# few rows as the others: with more, the launch would take more shared memory, and fewer of its programs would
# run on a multiprocessor. So each tile of tokens reads the weight again, which for many costs too much.
MAX_ROWS = 32
MAX_SHARED_TOKENS = 32


def _neighbours(tile: Array, n_rows: int, n_tokens: int) -> tuple[Array, Array]:
    """The tokens of a tile of all tokens, and which of them there are."""
    token = tile * n_rows + jnp.arange(n_rows)
    return token, token < n_tokens


def _pairs(routing: Any, tile: Array) -> tuple[Array, Array]:
    """The pairs of an expert's tile, and which of them there are; `routing` is of references."""
    row = jnp.arange(routing.tile_rows)
    live = row < routing.tile_count[tile]
    return plt.load(routing.order.at[routing.tile_start[tile] + row], mask=live, other=0), live


def _gate_up(
    x_ref: Any,
    shared_x_ref: Any,
    routing: Any,
    experts: TiledTensor | None,
    shared: TiledTensor | None,
    hidden_ref: Any,
    shared_hidden_ref: Any,
    *,
    n_rows: int,
    activation: Callable[[Array], Array],
    readers: tuple[str | None, str | None],  # the formats that the hidden activations are arranged for
    interpret: bool,
) -> None:
    n, program = pl.program_id(0), pl.program_id(1)
    n_tokens = shared_x_ref.shape[0]
    shared_tiles = 0 if shared is None else pl.cdiv(n_tokens, n_rows)

    def compute(
        weight: TiledTensor,
        at: tuple,
        x_ref: Any,
        token: Array,
        live: Array,
        out_ref: Any,
        row: Array,
        reader: str | None,
    ) -> None:
        y = tile_dot(weight, at, x_ref, token, live, (0, n_steps(weight)), interpret)
        y = activation(y).astype(out_ref.dtype)
        # Behind the last row, where nothing is written, if there is no token.
        row = jnp.where(live, row, out_ref.shape[0])

        def store(first: Array | int, values: Array) -> None:
            k = first + jnp.arange(values.shape[0])
            column = k if reader is None else place(reader, k)
            mask = live[None, :] & (k < out_ref.shape[1])[:, None]
            plt.store(out_ref.at[row[None, :], column[:, None]], values, mask=mask)

        store(n * y.shape[0], y)
        used = weight.data.shape[-4] * y.shape[0]
        if used < out_ref.shape[1]:  # the reader takes whole steps
            zeros = jnp.zeros((pl.next_power_of_2(out_ref.shape[1] - used), y.shape[1]), y.dtype)
            pl.when(n == 0)(lambda: store(used, zeros))

    if shared is not None:

        @pl.when((program < shared_tiles) & (n < shared.data.shape[0]))
        def _() -> None:
            token, live = _neighbours(program, n_rows, n_tokens)
            compute(shared, (n,), shared_x_ref, token, live, shared_hidden_ref, token, readers[1])

    if experts is None:
        return
    tile = jnp.maximum(program - shared_tiles, 0)
    expert = routing.tile_expert[tile]

    @pl.when((program >= shared_tiles) & (expert >= 0) & (n < experts.data.shape[1]))
    def _() -> None:
        pair, live = _pairs(routing, tile)
        token = jnp.where(live, pair // routing.experts.shape[1], 0)
        compute(experts, (expert, n), x_ref, token, live, hidden_ref, pair, readers[0])


def _down(
    hidden_ref: Any,
    shared_hidden_ref: Any,
    routing: Any,
    experts: TiledTensor,
    shared: TiledTensor | None,
    terms_ref: Any,  # [X or X + 1, T, D]: of each of a token's experts, then of the shared one
    *,
    n_rows: int,
    interpret: bool,
) -> None:
    n, program = pl.program_id(0), pl.program_id(1)
    top_k, (n_tokens, d_model) = routing.experts.shape[1], terms_ref.shape[1:]
    shared_tiles = 0 if shared is None else pl.cdiv(n_tokens, n_rows)
    column = n * ROWS + jnp.arange(ROWS)

    def store(term: Array | int, token: Array, live: Array, y: Array) -> None:
        mask = live[None, :] & (column < d_model)[:, None]
        token = jnp.where(live, token, n_tokens)[None, :]
        plt.store(terms_ref.at[term, token, column[:, None]], y, mask=mask)

    if shared is not None:

        @pl.when(program < shared_tiles)
        def _() -> None:
            token, live = _neighbours(program, n_rows, n_tokens)
            steps = (0, n_steps(shared))
            y = tile_dot(shared, (n,), shared_hidden_ref, token, live, steps, interpret)
            store(top_k, token, live, y)

    tile = jnp.maximum(program - shared_tiles, 0)
    expert = routing.tile_expert[tile]

    @pl.when((program >= shared_tiles) & (expert >= 0))
    def _() -> None:
        pair, live = _pairs(routing, tile)
        y = tile_dot(experts, (expert, n), hidden_ref, pair, live, (0, n_steps(experts)), interpret)
        token, term = lax.div(pair, top_k), lax.rem(pair, top_k)
        weight = plt.load(routing.weights.at[token, term], mask=live, other=0)
        store(term[None, :], token, live, y * weight[None, :])

    @pl.when(program < pl.cdiv(n_tokens, n_rows))
    def _() -> None:
        token, live = _neighbours(program, n_rows, n_tokens)
        for term in range(top_k):  # padding, which no expert has
            expert = plt.load(routing.experts.at[token, term], mask=live, other=0)
            store(term, token, live & (expert >= experts.data.shape[0]), jnp.zeros((ROWS, n_rows)))


def _swigluoai(y: Float[Array, "64 T"], alpha: float, limit: float) -> Float[Array, "32 T"]:
    """The activation of interleaved rows: eight of gate, then their eight of up."""
    y = y.reshape(ROWS // 16, 2, 8, y.shape[1])
    is_up = lax.broadcasted_iota(jnp.int32, y.shape, 1) == 1
    gate = jnp.minimum(jnp.sum(jnp.where(is_up, 0, y), axis=1), limit)
    up = jnp.clip(jnp.sum(jnp.where(is_up, y, 0), axis=1), -limit, limit)
    return ((up + 1) * gate / (1 + jnp.exp(-alpha * gate))).reshape(ROWS // 2, -1)


def _call(
    kernel: Callable[..., None],
    operands: tuple,
    out: Any,
    tiles: int,
    n_rows: int,
    name: str,
    interpret: bool,
) -> Any:
    """Launch `kernel` for every 64 rows of the larger weight and every tile of tokens."""
    tuned = tuning.parameters("moe")
    *_, experts, shared = operands
    row_tiles = max(w.data.shape[-4] for w in (experts, shared) if w is not None)
    return pl.pallas_call(
        partial(kernel, n_rows=n_rows, interpret=interpret),
        out_shape=out,
        grid=(row_tiles, tiles),
        in_specs=jax.tree.map(lambda _: pl.no_block_spec, operands),
        out_specs=jax.tree.map(lambda _: pl.no_block_spec, out),
        compiler_params=plt.CompilerParams(num_warps=tuned["warps"], num_stages=tuned["stages"]),
        interpret=interpret,
        name=name,
    )(*operands)


def supported(call: Call) -> str | None:
    """What is in the way of this call, if anything."""
    return call.wrong_dtype() or call.too_many_tokens()


def mlp(
    x: Float[Array, "*T D"], weights: PackedMLP, *, alpha: float, limit: float, interpret: bool = False
) -> Float[Array, "_ *T D"]:
    """The terms of one MLP, as the reference defines it, for up to 128 tokens of bfloat16 `x`."""
    lead, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
    groups = TILE_FORMATS[weights.gate_up.format].groups
    n_rows = max(MIN_TILE_ROWS, min(pl.next_power_of_2(len(x)), MAX_ROWS // groups))
    activation = partial(_swigluoai, alpha=alpha, limit=limit)
    kernel = partial(_gate_up, activation=activation, readers=(None, None))  # qmatmul arranges what it reads
    out = None, jax.ShapeDtypeStruct((len(x), weights.features), x.dtype)
    operands = (None, arrange(x, weights.gate_up), None, None, weights.gate_up)
    _, hidden = _call(kernel, operands, out, pl.cdiv(len(x), n_rows), n_rows, "mlp_gate_up", interpret)
    return qmatmul(hidden.reshape(*lead, -1), weights.down, interpret=interpret)


def moe(
    x: Float[Array, "T D"],
    routing: Routing,
    experts: PackedMLP,
    shared: PackedMLP | None,
    *,
    alpha: float,
    limit: float,
    interpret: bool = False,
) -> Float[Array, "_ T D"]:
    """A term for each of a token's experts and for the shared one; the reference defines their sum."""
    n_tokens, top_k = routing.experts.shape
    if shared is not None and n_tokens > MAX_SHARED_TOKENS:
        constants = {"alpha": alpha, "limit": limit, "interpret": interpret}
        return jnp.concatenate([moe(x, routing, experts, None, **constants), mlp(x, shared, **constants)])
    n_rows = MIN_TILE_ROWS
    tiles = routing.tile_expert.shape[0]
    gate_up, down, shared_x, shared_hidden = None, None, x, None
    if shared is not None:
        tiles += pl.cdiv(n_tokens, n_rows)
        gate_up, down, shared_x = shared.gate_up, shared.down, arrange(x, shared.gate_up)
        shared_hidden = jax.ShapeDtypeStruct((n_tokens, columns(down)), x.dtype)
    hidden = jax.ShapeDtypeStruct((n_tokens * top_k, columns(experts.down)), x.dtype)
    readers = experts.down.format, None if down is None else down.format
    kernel = partial(_gate_up, activation=partial(_swigluoai, alpha=alpha, limit=limit), readers=readers)
    operands = (arrange(x, experts.gate_up), shared_x, routing, experts.gate_up, gate_up)
    hidden = _call(kernel, operands, (hidden, shared_hidden), tiles, n_rows, "moe_gate_up", interpret)
    n_terms = top_k if shared is None else top_k + 1
    terms = jax.ShapeDtypeStruct((n_terms, n_tokens, x.shape[1]), jnp.float32)
    operands = (*hidden, routing, experts.down, down)
    return _call(_down, operands, terms, tiles, n_rows, "moe_down", interpret)
