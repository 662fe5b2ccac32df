"""How weights are held in the module tree, and the tree's parameters by name."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.formats import FORMATS, Plain, Shape
from pallas_kernels.ops import Ops
from pallas_kernels.qtensor import QTensor
from pallas_kernels.tiles import TiledTensor, pack


@partial(jax.jit, static_argnums=0)
def _quantize(format: str, values: Array) -> dict[str, Array]:
    """Expert by expert, so that the scratch memory is one expert's."""
    quantize = FORMATS[format].quantize
    return lax.map(quantize, values) if values.ndim == 3 else quantize(values)


class Weight(nnx.Module):
    """A weight `[..., F, D]`, output features by inputs, in a format of `FORMATS`.

    Each buffer of the format is an attribute, an `nnx.Param` of its own. A new weight is normal with
    standard deviation 1 / sqrt(D), which keeps the activations of a random model in range.
    """

    def __init__(self, shape: Sequence[int], format: str, *, rngs: nnx.Rngs):
        self.shape = tuple(shape)
        self.format = format
        self.set(jax.random.normal(rngs.params(), self.shape) * self.shape[-1] ** -0.5)

    def set(self, values: Array) -> None:
        """Replace the weight by `values`, quantised to its format."""
        form = FORMATS[self.format]
        # Plain numbers need no scratch memory, and no program to be compiled.
        self.hold(form.quantize(values) if isinstance(form, Plain) else _quantize(self.format, values))

    def hold(self, buffers: Mapping[str, Array]) -> None:
        """Replace the weight by buffers of its format."""
        for name, buffer in buffers.items():
            setattr(self, name, nnx.Param(buffer))

    def requantize(self, format: str) -> None:
        """Hold the weight in another format."""
        values = self.tensor().dequantize()
        for name in FORMATS[self.format].buffers(self.shape):
            delattr(self, name)
        self.format = format
        self.set(values)

    def tensor(self) -> QTensor:
        """The weight as the operations take it."""
        buffers = {name: getattr(self, name)[...] for name in FORMATS[self.format].buffers(self.shape)}
        return QTensor(self.format, self.shape, buffers)


class TiledWeight(nnx.Module):
    """A weight in the kernels' order; each array of a `TiledTensor` is an `nnx.Param` of its own."""

    def __init__(self, tensor: TiledTensor):
        self.shape, self.format = tensor.shape, tensor.format
        for name in TiledTensor.ARRAYS:
            if (array := getattr(tensor, name)) is not None:
                setattr(self, name, nnx.Param(array))

    def tensor(self) -> TiledTensor:
        """The weight as the operations take it."""
        arrays: dict[str, Any] = {
            n: getattr(self, n)[...] if hasattr(self, n) else None for n in TiledTensor.ARRAYS
        }
        return TiledTensor(self.format, self.shape, **arrays)


AnyWeight = Weight | TiledWeight

_pack = jax.jit(pack)


def tiled(weights: Sequence[AnyWeight]) -> list[TiledWeight]:
    """Weights that read the same input in the kernels' order, neighbours of one format as one weight."""
    return [
        TiledWeight(_pack(*(w.tensor() for w in group)))
        for _, group in groupby(weights, key=lambda weight: weight.format)
    ]


def project(x: Float[Array, "*T D"], weights: Sequence[AnyWeight], ops: Ops) -> Float[Array, "_ *T F"]:
    """The outputs of all weights side by side, as terms of a sum."""
    terms = [ops.qmatmul(x, w.tensor()) for w in weights]
    if len(terms) == 1:
        return terms[0]
    return jnp.concatenate([jnp.sum(t, axis=0, keepdims=True) for t in terms], axis=-1)


class RMSNorm(nnx.Module):
    """Gemma's RMSNorm, (1 + weight) * x / rms(x), in float32 and rounded once. The weight stays float32."""

    def __init__(self, dim: int, eps: float, *, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (dim,)) * 0.1)
        self.eps = eps

    def __call__(
        self, x: Float[Array, "*T D"], terms: Float[Array, "_ *T D"], ops: Ops
    ) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"]]:
        """`x` with the terms added, and its norm."""
        return ops.add_norm(x, terms, self.weight[...], eps=self.eps)


def formats_and_shapes(model: nnx.Module) -> dict[str, tuple[str, Shape]]:
    """Every parameter of an (abstract) model by its path, such as `layers.3.attention.q`.

    A weight is one parameter whatever arrays it has, with its logical shape.
    """
    found: dict[str, tuple[str, Shape]] = {}
    for path, module in nnx.iter_modules(model):
        prefix = "".join(f"{part}." for part in path)
        if isinstance(module, AnyWeight):
            found[prefix[:-1]] = module.format, module.shape
        else:
            found |= {
                prefix + name: (value.dtype.name, value.shape)
                for name, value in vars(module).items()
                if isinstance(value, nnx.Param)
            }
    return found


def parameters(model: nnx.Module) -> dict[str, jax.ShapeDtypeStruct]:
    """Every parameter with the dtype that its numbers come in."""
    return {
        path: jax.ShapeDtypeStruct(shape, FORMATS[form].dtype)
        for path, (form, shape) in formats_and_shapes(model).items()
    }


def assign(model: nnx.Module, path: str, values: Array) -> None:
    """Set the parameter at `path` (as `parameters` names it), rounded to its format."""
    node, name = _parent(model, path)
    if isinstance(target := getattr(node, name), Weight):
        target.set(values)
    else:
        setattr(node, name, nnx.Param(values))


def hold(model: nnx.Module, path: str, buffers: Mapping[str, Array]) -> None:
    """Set the parameter at `path` to buffers of its format, or to numbers of another plain format."""
    node, name = _parent(model, path)
    target = getattr(node, name)
    if isinstance(target, Weight) and not isinstance(FORMATS[target.format], Plain):
        target.hold(buffers)
    else:
        assign(model, path, buffers["data"])


def _parent(model: nnx.Module, path: str) -> tuple[Any, str]:
    *parents, name = path.split(".")
    node: Any = model
    for part in parents:
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    return node, name
