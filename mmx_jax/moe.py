"""Feed-forward of one layer: a dense MLP, or routed experts with one shared expert beside them."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float

from mmx_jax.config import ModelConfig
from mmx_jax.params import AnyWeight, RMSNorm, TiledWeight, Weight
from pallas_kernels.moe.packing import PackedMLP, pack_mlp
from pallas_kernels.moe.reference import MLPWeights
from pallas_kernels.moe.routing import Routing
from pallas_kernels.ops import Ops
from pallas_kernels.route.reference import RouterWeights


class MLP(nnx.Module):
    """down . swigluoai(gate . x, up . x): a dense MLP, or as many as there are experts."""

    def __init__(
        self, config: ModelConfig, width: int, dtype: str, *, experts: int | None = None, rngs: nnx.Rngs
    ):
        d, lead = config.hidden_size, () if experts is None else (experts,)
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.gate = Weight((*lead, width, d), dtype, rngs=rngs)
        self.up = Weight((*lead, width, d), dtype, rngs=rngs)
        self.down: AnyWeight = Weight((*lead, d, width), dtype, rngs=rngs)

    def tensors(self) -> MLPWeights | PackedMLP:
        """The weights as the operations take them."""
        down: Any = self.down.tensor()
        if hasattr(self, "gate_up"):
            return PackedMLP(self.gate_up.tensor(), down)
        return MLPWeights(self.gate.tensor(), self.up.tensor(), down)

    def pack(self) -> None:
        """Hold the weights in the kernels' order."""
        packed = _pack_mlp(self.gate.tensor(), self.up.tensor(), self.down.tensor())
        self.gate_up, self.down = TiledWeight(packed.gate_up), TiledWeight(packed.down)
        del self.gate, self.up

    def __call__(self, x: Float[Array, "*T D"], ops: Ops) -> Float[Array, "_ *T D"]:
        """The terms of the output."""
        return ops.mlp(x, self.tensors(), alpha=self.alpha, limit=self.limit)


_pack_mlp = jax.jit(pack_mlp)


class Router(nnx.Module):
    """Chooses experts; its weight and its bias stay float32."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = config
        self.top_k, self.scale = c.experts_per_token, c.routed_scaling_factor
        shape = (c.num_experts, c.hidden_size)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape) * c.hidden_size**-0.5)
        self.bias = nnx.Param(jax.random.normal(rngs.params(), shape[:1]) * 0.1)

    def __call__(
        self,
        x: Float[Array, "T D"],
        terms: Float[Array, "_ T D"],
        norm: RMSNorm,
        valid: Bool[Array, " T"],
        ops: Ops,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"], Routing]:
        """`x` with the terms added, its norm, and static routing buffers for T tokens."""
        weights = RouterWeights(norm.weight[...], self.weight[...], self.bias[...])
        return ops.route(x, terms, weights, valid, eps=norm.eps, top_k=self.top_k, scale=self.scale)


class MoE(nnx.Module):
    """The routed experts' weighted sum plus the unscaled shared expert."""

    def __init__(self, config: ModelConfig, dtype: str, *, rngs: nnx.Rngs):
        c = config
        self.router = Router(c, rngs=rngs)
        self.experts = MLP(c, c.expert_intermediate_size, dtype, experts=c.num_experts, rngs=rngs)
        self.shared = MLP(c, c.shared_intermediate_size, dtype, rngs=rngs)

    def pack(self) -> None:
        """Hold the weights in the kernels' order."""
        self.experts.pack()
        self.shared.pack()

    def __call__(self, x: Float[Array, "T D"], routing: Routing, ops: Ops) -> Float[Array, "_ T D"]:
        """The terms of the output."""
        experts, shared = self.experts, self.shared.tensors()
        return ops.moe(x, routing, experts.tensors(), shared, alpha=experts.alpha, limit=experts.limit)
