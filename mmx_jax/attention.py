"""Attention of one layer: projections, per-head norm and rotation, the paged cache, block selection."""

from dataclasses import dataclass

from flax import nnx
from jaxtyping import Array, Float, Int

from mmx_jax.cache import LayerPages
from mmx_jax.config import ModelConfig
from mmx_jax.params import RMSNorm, Weight
from pallas_kernels.ops import Ops
from pallas_kernels.paging import PagedRows


@dataclass(frozen=True)
class Step:
    """What every layer needs to know about the tokens of one call."""

    rows: PagedRows
    cos: Float[Array, "B T R"]
    sin: Float[Array, "B T R"]
    ops: Ops

    def norm_rope(self, x: Float[Array, "B T h H"], norm: RMSNorm) -> Float[Array, "B T h H"]:
        return self.ops.qk_norm_rope(x, norm.weight[...], self.cos, self.sin, eps=norm.eps)


class Indexer(nnx.Module):
    """Scores key blocks: one query head per KV head against one shared key head. It has no values.

    Selection is discrete, so the gradient of any loss with respect to these weights is exactly zero.
    """

    def __init__(self, config: ModelConfig, format: str, *, rngs: nnx.Rngs):
        c = config
        self.heads = (c.num_kv_heads, c.index_head_dim)
        self.q = Weight((c.num_kv_heads * c.index_head_dim, c.hidden_size), format, rngs=rngs)
        self.k = Weight((c.index_head_dim, c.hidden_size), format, rngs=rngs)
        self.q_norm = RMSNorm(c.index_head_dim, c.rms_norm_eps, rngs=rngs)
        self.k_norm = RMSNorm(c.index_head_dim, c.rms_norm_eps, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], step: Step
    ) -> tuple[Float[Array, "B T K I"], Float[Array, "B T I"]]:
        """Index queries and index keys of the new tokens."""
        qmatmul = step.ops.qmatmul
        q = qmatmul(x, self.q.tensor()).astype(x.dtype).reshape(*x.shape[:2], *self.heads)
        k = qmatmul(x, self.k.tensor()).astype(x.dtype)[:, :, None]
        return step.norm_rope(q, self.q_norm), step.norm_rope(k, self.k_norm)[:, :, 0]


class Attention(nnx.Module):
    """Grouped-query attention, block-sparse where the layer has an indexer and dense where it has none."""

    def __init__(self, config: ModelConfig, sparse: bool, format: str, *, rngs: nnx.Rngs):
        c = config
        self.config = c
        self.q = Weight((c.num_heads * c.head_dim, c.hidden_size), format, rngs=rngs)
        self.k = Weight((c.num_kv_heads * c.head_dim, c.hidden_size), format, rngs=rngs)
        self.v = Weight((c.num_kv_heads * c.head_dim, c.hidden_size), format, rngs=rngs)
        self.o = Weight((c.hidden_size, c.num_heads * c.head_dim), format, rngs=rngs)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, rngs=rngs)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, rngs=rngs)
        self.indexer = Indexer(c, format, rngs=rngs) if sparse else None

    def __call__(
        self, x: Float[Array, "B T D"], pages: LayerPages, step: Step
    ) -> tuple[Float[Array, "B T D"], LayerPages, Int[Array, "B T K P"] | None]:
        """The layer's output, the pages with the new tokens in them, and the blocks each KV head chose."""
        c, ops = self.config, step.ops

        def project(weight: Weight) -> Float[Array, "B T h H"]:
            return ops.qmatmul(x, weight.tensor()).astype(x.dtype).reshape(*x.shape[:2], -1, c.head_dim)

        q = step.norm_rope(project(self.q), self.q_norm)
        k = step.norm_rope(project(self.k), self.k_norm)
        v = project(self.v)
        if self.indexer is None:
            pages = pages.append(k, v, None, step.rows)
            blocks = None
        else:
            index_q, index_k = self.indexer(x, step)
            pages = pages.append(k, v, index_k, step.rows)
            blocks = ops.block_select(
                index_q,
                pages.index_k,
                step.rows,
                top_blocks=c.top_blocks,
                local_blocks=c.local_blocks,
                init_blocks=c.init_blocks,
            )
        out = ops.block_attention(q, pages.k, pages.v, step.rows, blocks)
        return ops.qmatmul(out.reshape(*x.shape[:2], -1), self.o.tensor()).astype(x.dtype), pages, blocks
