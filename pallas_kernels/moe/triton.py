"""The routed experts as two Pallas-Triton kernels, for decoding: gate and up with the activation, then down.

One program computes 64 weight rows for one tile of tokens, so every weight is read once, by programs that
stream contiguous tiles; programs of unused tiles end at once. The rows of gate and up are interleaved by
eights, which puts a feature's gate and up into the same thread's registers: the activation costs no exchange.

Tried on one H200, int4_g64, both kernels and the weighted sum at 1 / 8 / 32 / 64 / 128 tokens in µs:
- this, with the scales of two groups in a word: 43 / 240 / 629 / 854 / 1008.
- a load for each group's scales: 47 / 260 / 675 / 895 / 1057; loaded after the dot: 8% slower than that.
- no scales at all, which is wrong: - / 214 / - / 756. Half as many dots, also wrong: - / 229 / - / 781.
- the next step's scales carried through the loop: equal. Scales folded into the weights: 17% slower.
- two / four / five stages: 7 / 8 / 25% slower. One or two warps, or x as the first operand with 16 rows:
  twice as slow. 128 rows a program with 8 warps: 20 to 30% slower; 8 warps on 64 rows: twice as slow.
- zero point taken off the sums with row sums of x, instead of off each weight: 4% slower.
- tiles before experts in the grid, evict-first loads, no shift by zero: no difference.

What bounds it is issue slots and the latency of eight dots a step, not bytes. Instructions of a warp in the
loop per 1024 values of k, compiled for sm_90 by jax 0.11.2: bfloat16 680, int3_g64 950, nvfp4 1224, int4_g64
1244, int8 1468, int8_g64 1620, fp8 1868, mxfp8 2452. None of them was timed since sums are scaled by fma,
which was two instructions: int4_g64 had 1308 in the times above. int3_g64 took 48 / 237 / - / 832 with 1203,
in words of 32 bits; of its 950, 128 are the matrix unit's, half of them for the zero point, without which it
has 1061. nvfp4 took 81 / 440 / - / 1548 with 2748, its sums scaled group by group; with a tile of scales as
large as that of the words, which multiplied weights, 64 / 338 / - / 1210.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
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
from pallas_kernels.moe.routing import Routing
from pallas_kernels.precision import EXACT
from pallas_kernels.qtensor import QTensor
from pallas_kernels.tiles import (
    ROWS,
    TILE_FORMATS,
    Rows,
    TiledTensor,
    arrange,
    columns,
    n_steps,
    pack,
    pad_rows,
    place,
    tile,
    tile_dot,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedExperts:
    """The experts' weights in the kernels' order: gate and up as one weight of 2 F rows, and down."""

    gate_up: TiledTensor
    down: TiledTensor

    def expert(self, index: Array) -> tuple[QTensor, QTensor, TiledTensor]:
        """Gate, up and down of one expert, for the reference."""
        both, down = self.gate_up.expert(index), self.down.expert(index)
        (d_model, features), n_rows = down.shape, both.data.shape[0] * ROWS
        values = dataclasses.replace(both, shape=(n_rows, d_model)).dequantize()
        gate, up = values.reshape(-1, 2, 8, d_model).swapaxes(0, 1).reshape(2, -1, d_model)[:, :features]
        gate, up = (QTensor(w.dtype.name, w.shape, {"data": w}) for w in (gate, up))
        return gate, up, down


def pack_experts(gate: QTensor, up: QTensor, down: QTensor) -> PackedExperts:
    """Interleave gate and up by eight rows, and tile. Features up to a multiple of eight are zeros.

    Expert by expert, so that the scratch memory is one expert's.
    """
    n_experts, features, d_model = gate.shape

    def rows(weight: QTensor) -> Rows:
        return pad_rows(weight.format, TILE_FORMATS[weight.format].rows(weight), 8)

    def interleave(a: Array, b: Array) -> Array:
        pair = [w.reshape(-1, 8, *w.shape[1:]) for w in (a, b)]
        return jnp.stack(pair, axis=1).reshape(-1, *a.shape[1:])

    def pack_one(tensors: tuple[QTensor, QTensor, QTensor]) -> tuple[TiledTensor, TiledTensor]:
        gate, up, down = (dataclasses.replace(w, shape=w.shape[1:]) for w in tensors)
        both = jax.tree.map(interleave, rows(gate), rows(up))
        return tile(gate.format, (2 * features, d_model), both), pack(down)

    gate_up, packed_down = lax.map(pack_one, (gate, up, down))
    return PackedExperts(
        dataclasses.replace(gate_up, shape=(n_experts, *gate_up.shape)),
        dataclasses.replace(packed_down, shape=(n_experts, *packed_down.shape)),
    )


def _kernel(
    expert_ref: Any,
    start_ref: Any,
    count_ref: Any,
    order_ref: Any,
    x_ref: Any,
    weight: TiledTensor,
    out_ref: Any,
    *,
    top_k: int,
    n_rows: int,
    steps: int,
    activation: Callable[[Array], Array] | None,
    column: Callable[[Array], Array],
    interpret: bool,
) -> None:
    n, tile = pl.program_id(0), pl.program_id(1)
    expert = expert_ref[tile]

    @pl.when(expert >= 0)
    def _() -> None:
        row = jnp.arange(n_rows)
        live = row < count_ref[tile]
        pair = plt.load(order_ref.at[start_ref[tile] + row], mask=live, other=0)
        token = jnp.where(live, pair // top_k, 0)
        y = tile_dot(weight, (expert, n), x_ref, token, live, (0, steps), interpret)
        if activation is not None:
            y = activation(y)
        # The last row of the output is a place for tokens that are none.
        target = jnp.where(live, pair, out_ref.shape[0] - 1)

        def store(first: Array | int, values: Array, width: int) -> None:
            k = jnp.arange(values.shape[0])
            mask = live[None, :] & (k < width)[:, None]
            plt.store(out_ref.at[target[None, :], column(first + k)[:, None]], values, mask=mask)

        store(n * y.shape[0], y.astype(out_ref.dtype), y.shape[0])
        used = weight.data.shape[1] * y.shape[0]
        if spare := out_ref.shape[1] - used:
            zeros = jnp.zeros((pl.next_power_of_2(spare), n_rows), out_ref.dtype)
            pl.when(n == 0)(lambda: store(used, zeros, spare))


def _swigluoai(y: Float[Array, "64 T"], alpha: float, limit: float) -> Float[Array, "32 T"]:
    """The activation of interleaved rows: eight of gate, then their eight of up."""
    y = y.reshape(ROWS // 16, 2, 8, y.shape[1])
    is_up = lax.broadcasted_iota(jnp.int32, y.shape, 1) == 1
    gate = jnp.minimum(jnp.sum(jnp.where(is_up, 0, y), axis=1), limit)
    up = jnp.clip(jnp.sum(jnp.where(is_up, y, 0), axis=1), -limit, limit)
    return ((up + 1) * gate / (1 + jnp.exp(-alpha * gate))).reshape(ROWS // 2, -1)


def _run(
    x: Array,
    routing: Routing,
    weight: TiledTensor,
    out: jax.ShapeDtypeStruct,
    top_k: int,
    activation: Callable[[Array], Array] | None,
    column: Callable[[Array], Array],
    interpret: bool,
    name: str,
) -> Array:
    """`x` is arranged for `weight`. Column k of the result goes to `column(k)`, and zeros to what is left."""
    tuned = tuning.parameters("moe")
    kernel = partial(
        _kernel,
        top_k=top_k,
        n_rows=routing.tile_rows,
        steps=n_steps(weight),
        activation=activation,
        column=column,
        interpret=interpret,
    )
    tiles = (routing.tile_expert, routing.tile_start, routing.tile_count, routing.order)
    operands = (*tiles, x, weight)
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(weight.data.shape[1], routing.tile_expert.shape[0]),
        in_specs=jax.tree.map(lambda _: pl.no_block_spec, operands),
        out_specs=pl.no_block_spec,
        compiler_params=plt.CompilerParams(num_warps=tuned["warps"], num_stages=tuned["stages"]),
        interpret=interpret,
        name=name,
    )(*operands)


def supported(call: Call) -> str | None:
    """What is in the way of this call, if anything."""
    return call.wrong_dtype() or call.too_many_tokens()


def moe(
    x: Float[Array, "T D"],
    routing: Routing,
    experts: PackedExperts,
    *,
    alpha: float,
    limit: float,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """The experts' weighted sum in float32, as the reference defines it, for bfloat16 `x`."""
    n_tokens, top_k = routing.experts.shape
    n_pairs, n_experts = n_tokens * top_k, experts.down.shape[0]
    outputs = experts.down.data.shape[1] * ROWS
    activation = partial(_swigluoai, alpha=alpha, limit=limit)
    x = arrange(x, experts.gate_up)
    # The first kernel leaves what the second reads, as `arrange` would.
    hidden = jax.ShapeDtypeStruct((n_pairs + 1, columns(experts.down)), x.dtype)
    column = partial(place, experts.down.format)
    hidden = _run(x, routing, experts.gate_up, hidden, top_k, activation, column, interpret, "moe_gate_up")
    out = jax.ShapeDtypeStruct((n_pairs + 1, outputs), jnp.float32)
    out = _run(hidden, routing, experts.down, out, 1, None, lambda k: k, interpret, "moe_down")
    out = out[:n_pairs, : experts.down.shape[1]].reshape(n_tokens, top_k, -1)
    out = jnp.where((routing.experts < n_experts)[..., None], out, 0)
    return jnp.einsum("txd,tx->td", out, routing.weights, precision=EXACT)
