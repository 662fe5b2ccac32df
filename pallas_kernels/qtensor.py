"""Weights at rest: a format's name, a logical shape and the buffers that the format lists."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import jax
from jax import lax
from jaxtyping import Array

from pallas_kernels.formats import FORMATS


@runtime_checkable
class Numbers(Protocol):
    """What the reference operations ask of a weight, in whatever order it is held."""

    def dequantize(self) -> Array:
        """The weight's numbers, in its logical shape."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QTensor:
    """A weight `[..., F, D]`: output features, then the contracted axis; experts, if any, come first."""

    format: str = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})
    buffers: dict[str, Array]

    def dequantize(self) -> Array:
        """The tensor's numbers, in its logical shape."""
        return FORMATS[self.format].dequantize(self.buffers, self.shape)

    def expert(self, index: Array) -> "QTensor":
        """The weight of one expert: every buffer has the experts on its first axis.

        The barrier keeps XLA from converting all experts at once ahead of a loop over some of them.
        """
        buffers = lax.optimization_barrier({name: b[index] for name, b in self.buffers.items()})
        return QTensor(self.format, self.shape[1:], buffers)
