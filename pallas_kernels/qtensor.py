"""Weights at rest: a format's name, a logical shape and the buffers that the format lists.

`FORMATS` owns everything about a format: which buffers it has, how numbers become buffers and buffers
numbers, and how many bytes that takes. Nothing else in the project infers any of it. Only the plain formats
are here; a quantised one is one more entry.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike


@dataclass(frozen=True)
class PlainFormat:
    """Unquantised numbers of one dtype, in one buffer called `data`."""

    dtype: DTypeLike
    buffers: tuple[str, ...] = ("data",)

    def quantize(self, values: Array) -> dict[str, Array]:
        """Round `values` to this format, half to even."""
        return {"data": values.astype(self.dtype)}

    def dequantize(self, buffers: Mapping[str, Array]) -> Array:
        """The numbers that `buffers` stand for; exact."""
        return buffers["data"]

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of all buffers of a tensor of this logical shape."""
        return math.prod(shape) * jnp.dtype(self.dtype).itemsize


FORMATS: dict[str, PlainFormat] = {
    "bfloat16": PlainFormat(jnp.bfloat16),
    "float32": PlainFormat(jnp.float32),
    "float64": PlainFormat(jnp.float64),  # for numerical derivatives, under jax_enable_x64
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QTensor:
    """A weight `[..., F, D]`: output features, then the contracted axis; experts, if any, come first."""

    format: str = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})
    buffers: dict[str, Array]

    def dequantize(self) -> Array:
        """The tensor's numbers, in its logical shape."""
        return FORMATS[self.format].dequantize(self.buffers)

    def expert(self, index: Array) -> "QTensor":
        """The weight of one expert: every buffer has the experts on its first axis.

        The barrier keeps XLA from converting all experts at once ahead of a loop over some of them.
        """
        buffers = lax.optimization_barrier({name: b[index] for name, b in self.buffers.items()})
        return QTensor(self.format, self.shape[1:], buffers)
