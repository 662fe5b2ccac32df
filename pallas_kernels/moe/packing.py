"""Weights of gated MLPs in the kernels' order."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.qtensor import QTensor
from pallas_kernels.tiles import ROWS, TILE_FORMATS, Rows, TiledTensor, pack, pad_rows, tile


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedMLP:
    """One gated MLP, or one for each expert: gate and up as one weight of 2 F rows, and down.

    The rows of gate and up are interleaved by eights, which puts a feature's gate and up into the same
    thread's registers: the activation costs no exchange.
    """

    gate_up: TiledTensor
    down: TiledTensor

    @property
    def features(self) -> int:
        return self.gate_up.shape[-2] // 2

    def matrices(self, expert: Array | None = None) -> tuple[QTensor, QTensor, TiledTensor]:
        """Gate, up and down, of one expert where there are several; for the reference."""
        both, down = self.gate_up, self.down
        if expert is not None:
            both, down = both.expert(expert), down.expert(expert)
        d_model, n_rows = down.shape[0], both.data.shape[0] * ROWS
        values = dataclasses.replace(both, shape=(n_rows, d_model)).dequantize()
        pairs = values.reshape(-1, 2, 8, d_model).swapaxes(0, 1).reshape(2, -1, d_model)
        gate, up = pairs[:, : self.features]
        gate, up = (QTensor(w.dtype.name, w.shape, {"data": w}) for w in (gate, up))
        return gate, up, down


def pack_mlp(gate: QTensor, up: QTensor, down: QTensor) -> PackedMLP:
    """Interleave gate and up by eight rows, and tile. Features up to a multiple of eight are zeros.

    Expert by expert, so that the scratch memory is one expert's. Raises ValueError where gate and up differ
    in format.
    """
    if gate.format != up.format:
        raise ValueError(f"gate is {gate.format} and up {up.format}: kernels take them in one format")
    *lead, features, d_model = gate.shape

    def rows(weight: QTensor) -> Rows:
        return pad_rows(weight.format, TILE_FORMATS[weight.format].rows(weight), 8)

    def interleave(a: Array, b: Array) -> Array:
        pair = [w.reshape(-1, 8, *w.shape[1:]) for w in (a, b)]
        return jnp.stack(pair, axis=1).reshape(-1, *a.shape[1:])

    def pack_one(tensors: tuple[QTensor, QTensor, QTensor]) -> PackedMLP:
        gate, up, down = (dataclasses.replace(w, shape=w.shape[-2:]) for w in tensors)
        both = jax.tree.map(interleave, rows(gate), rows(up))
        return PackedMLP(tile(gate.format, (2 * features, d_model), both), pack(down))

    if not lead:
        return pack_one((gate, up, down))
    packed = lax.map(pack_one, (gate, up, down))
    with_experts = [dataclasses.replace(w, shape=(*lead, *w.shape)) for w in (packed.gate_up, packed.down)]
    return PackedMLP(*with_experts)
