"""Attention of one layer: projections, per-head norm and rotation, the paged cache, block selection."""

from dataclasses import dataclass

from flax import nnx
from jaxtyping import Array, Float, Int

from mmx_jax.config import ModelConfig
from mmx_jax.params import AnyWeight, RMSNorm, Weight, project, tiled
from pallas_kernels.ops import Ops
from pallas_kernels.paging import LayerPages, PagedRows
from pallas_kernels.qk_norm_rope.reference import HeadLayout, HeadNorms


@dataclass(frozen=True)
class Step:
    """What every layer needs to know about the tokens of one call."""

    rows: PagedRows
    cos: Float[Array, "B T R"]
    sin: Float[Array, "B T R"]
    ops: Ops


class Indexer(nnx.Module):
    """Scores key blocks: one query head per KV head against one shared key head. It has no values.

    Selection is discrete, so the gradient of any loss with respect to these weights is exactly zero.
    """

    def __init__(self, config: ModelConfig, dtype: str, *, rngs: nnx.Rngs):
        c = config
        self.q = Weight((c.num_kv_heads * c.index_head_dim, c.hidden_size), dtype, rngs=rngs)
        self.k = Weight((c.index_head_dim, c.hidden_size), dtype, rngs=rngs)
        self.q_norm = RMSNorm(c.index_head_dim, c.rms_norm_eps, rngs=rngs)
        self.k_norm = RMSNorm(c.index_head_dim, c.rms_norm_eps, rngs=rngs)


class Attention(nnx.Module):
    """Grouped-query attention, block-sparse where the layer has an indexer and dense where it has none."""

    def __init__(self, config: ModelConfig, sparse: bool, dtype: str, *, rngs: nnx.Rngs):
        c = config
        self.config = c
        self.layout = HeadLayout(
            c.num_heads, c.num_kv_heads, c.head_dim, c.index_head_dim if sparse else None
        )
        self.q = Weight((c.num_heads * c.head_dim, c.hidden_size), dtype, rngs=rngs)
        self.k = Weight((c.num_kv_heads * c.head_dim, c.hidden_size), dtype, rngs=rngs)
        self.v = Weight((c.num_kv_heads * c.head_dim, c.hidden_size), dtype, rngs=rngs)
        self.o: AnyWeight = Weight((c.hidden_size, c.num_heads * c.head_dim), dtype, rngs=rngs)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, rngs=rngs)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, rngs=rngs)
        self.indexer = Indexer(c, dtype, rngs=rngs) if sparse else None

    @property
    def projections(self) -> list[AnyWeight]:
        """The weights that read the layer's input, in the order of `HeadLayout`."""
        if hasattr(self, "tiled"):
            return list(self.tiled)
        index = [] if self.indexer is None else [self.indexer.q, self.indexer.k]
        return [self.q, self.k, self.v, *index]

    def pack(self) -> None:
        """Hold the weights in the kernels' order."""
        self.tiled = nnx.List(tiled(self.projections))
        [self.o] = tiled([self.o])
        del self.q, self.k, self.v
        if self.indexer is not None:
            del self.indexer.q, self.indexer.k

    @property
    def head_norms(self) -> HeadNorms:
        indexer = self.indexer
        index = (None, None) if indexer is None else (indexer.q_norm.weight[...], indexer.k_norm.weight[...])
        return HeadNorms(self.q_norm.weight[...], self.k_norm.weight[...], *index)

    def __call__(
        self, x: Float[Array, "B T D"], pages: LayerPages, step: Step
    ) -> tuple[Float[Array, "_ B T D"], LayerPages, Int[Array, "B T K P"] | None]:
        """The output's terms, the pages with the new tokens in them, and the blocks each KV head chose."""
        c, ops = self.config, step.ops
        q, index_q, pages = ops.qk_norm_rope(
            project(x, self.projections, ops),
            self.layout,
            self.head_norms,
            step.cos,
            step.sin,
            pages,
            step.rows,
            dtype=x.dtype,
            eps=c.rms_norm_eps,
        )
        out, blocks = ops.block_attention(
            q,
            index_q,
            pages,
            step.rows,
            top_blocks=c.top_blocks,
            local_blocks=c.local_blocks,
            init_blocks=c.init_blocks,
        )
        return ops.qmatmul(out.reshape(*x.shape[:2], -1), self.o.tensor()), pages, blocks
