"""Feed-forward of one layer: a dense MLP, or routed experts with one shared expert beside them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float

from mmx_jax.config import ModelConfig
from mmx_jax.params import AnyWeight, TiledWeight, Weight, project, tiled
from pallas_kernels.moe.reference import ExpertWeights, swigluoai
from pallas_kernels.moe.routing import Routing, make_routing
from pallas_kernels.moe.triton import PackedExperts, pack_experts
from pallas_kernels.ops import Ops
from pallas_kernels.precision import EXACT, wide


class MLP(nnx.Module):
    """down . swigluoai(gate . x, up . x); the dense layers' MLP and the shared expert."""

    def __init__(self, config: ModelConfig, width: int, dtype: str, *, rngs: nnx.Rngs):
        d = config.hidden_size
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.gate = Weight((width, d), dtype, rngs=rngs)
        self.up = Weight((width, d), dtype, rngs=rngs)
        self.down: AnyWeight = Weight((d, width), dtype, rngs=rngs)

    @property
    def projections(self) -> list[AnyWeight]:
        """The weights that read the input: gate, then up."""
        return list(self.tiled) if hasattr(self, "tiled") else [self.gate, self.up]

    def pack(self) -> None:
        """Hold the weights in the kernels' order."""
        self.tiled = nnx.List(tiled(self.projections))
        [self.down] = tiled([self.down])
        del self.gate, self.up

    def __call__(self, x: Float[Array, "*T D"], ops: Ops) -> Float[Array, "*T D"]:
        """In float32, for the caller to round."""
        gate, up = jnp.split(project(x, self.projections, ops), 2, axis=-1)
        hidden = swigluoai(gate, up, self.alpha, self.limit).astype(x.dtype)
        return ops.qmatmul(hidden, self.down.tensor())


class Router(nnx.Module):
    """Chooses experts by sigmoid score plus bias; the weights are the scores without it, normalised.

    All in float32, weights and bias included. The bias only takes part in the discrete choice: its gradient
    is exactly zero.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = config
        self.top_k, self.scale = c.experts_per_token, c.routed_scaling_factor
        shape = (c.num_experts, c.hidden_size)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape) * c.hidden_size**-0.5)
        self.bias = nnx.Param(jax.random.normal(rngs.params(), shape[:1]) * 0.1)

    def __call__(self, x: Float[Array, "T D"], valid: Bool[Array, " T"]) -> Routing:
        """Static routing buffers for T tokens."""
        weight = self.weight[...]
        logits = jnp.einsum("td,ed->te", wide(x), weight, precision=EXACT)
        p = jax.nn.sigmoid(logits)
        _, experts = lax.top_k(lax.stop_gradient(p + self.bias[...]), self.top_k)
        chosen = jnp.take_along_axis(p, experts, axis=-1)
        weights = chosen / jnp.sum(chosen, axis=-1, keepdims=True) * self.scale
        return make_routing(experts, weights, valid, weight.shape[0])


class Experts(nnx.Module):
    """The routed experts' weights, gate and up apart until they are packed."""

    def __init__(self, config: ModelConfig, dtype: str, *, rngs: nnx.Rngs):
        e, f, d = config.num_experts, config.expert_intermediate_size, config.hidden_size
        self.gate = Weight((e, f, d), dtype, rngs=rngs)
        self.up = Weight((e, f, d), dtype, rngs=rngs)
        self.down: AnyWeight = Weight((e, d, f), dtype, rngs=rngs)

    def tensors(self) -> ExpertWeights | PackedExperts:
        """The weights as the operation takes them."""
        down: Any = self.down.tensor()
        if hasattr(self, "gate_up"):
            return PackedExperts(self.gate_up.tensor(), down)
        return ExpertWeights(self.gate.tensor(), self.up.tensor(), down)

    def pack(self) -> None:
        """Hold the weights in the kernels' order."""
        packed = _pack_experts(self.gate.tensor(), self.up.tensor(), self.down.tensor())
        self.gate_up, self.down = TiledWeight(packed.gate_up), TiledWeight(packed.down)
        del self.gate, self.up


_pack_experts = jax.jit(pack_experts)


class MoE(nnx.Module):
    """The routed experts' weighted sum plus the unscaled shared expert."""

    def __init__(self, config: ModelConfig, dtype: str, *, rngs: nnx.Rngs):
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.router = Router(config, rngs=rngs)
        self.experts = Experts(config, dtype, rngs=rngs)
        self.shared = MLP(config, config.shared_intermediate_size, dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "T D"], valid: Bool[Array, " T"], ops: Ops
    ) -> tuple[Float[Array, "T D"], Routing]:
        """The sum in float32, for the caller to round, and how the tokens were routed."""
        with jax.named_scope("router"):
            routing = self.router(x, valid)
        with jax.named_scope("experts"):
            routed = ops.moe(x, routing, self.experts.tensors(), alpha=self.alpha, limit=self.limit)
        with jax.named_scope("shared_expert"):
            return routed + self.shared(x, ops), routing
