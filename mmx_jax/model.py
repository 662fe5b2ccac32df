"""MiniMax-M3's forward as a Flax module tree, one for every member of the family.

Letters in shapes, here and in the other files:
    B batch · T new tokens · S cached tokens · D model · N query heads · K kv heads · G = N / K ·
    H head dim · R rotary pairs · I index dim · M blocks of a sequence · C block size · P picked blocks ·
    E experts · X experts per token · F feed-forward · V vocabulary · L layers
A star (`*T`) stands for any leading axes. Source of the maths: arXiv 2606.13392 and transformers'
`minimax_m3_vl`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmx_jax.attention import Attention, Step
from mmx_jax.cache import Pages, make_pages
from mmx_jax.config import ModelConfig
from mmx_jax.moe import MLP, MoE
from mmx_jax.params import AnyWeight, RMSNorm, Weight, tiled
from mmx_jax.recipes import Recipe
from mmx_jax.rope import rope_tables
from pallas_kernels.ops import Ops
from pallas_kernels.paging import LayerPages, PagedRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerTrace:
    """What one layer did, for parity tests and research; None where the layer has no such part.

    `experts` are in the router's order; `blocks` ascend, with -1 in unused slots.
    """

    hidden: Float[Array, "B T D"]  # the layer's input
    experts: Int[Array, "B T X"] | None
    expert_weights: Float[Array, "B T X"] | None
    blocks: Int[Array, "B T K P"] | None


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)).

    What is added last is added by whoever norms the sum: as terms, it is read once.
    """

    def __init__(self, config: ModelConfig, index: int, dtype: str, *, rngs: nnx.Rngs):
        c = config
        self.input_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, rngs=rngs)
        self.attention = Attention(c, c.sparse_layers[index], dtype, rngs=rngs)
        self.post_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, rngs=rngs)
        if c.moe_layers[index]:
            self.moe = MoE(c, dtype, rngs=rngs)
        else:
            self.mlp = MLP(c, c.dense_intermediate_size, dtype, rngs=rngs)

    def pack(self) -> None:
        """Hold the weights in the kernels' order."""
        self.attention.pack()
        (self.moe if hasattr(self, "moe") else self.mlp).pack()

    def __call__(
        self, x: Float[Array, "B T D"], terms: Float[Array, "_ B T D"], pages: LayerPages, step: Step
    ) -> tuple[Float[Array, "B T D"], Float[Array, "_ B T D"], LayerPages, LayerTrace]:
        """The residual stream and the terms that are still to be added to it, from layer to layer."""
        ops, shape = step.ops, x.shape
        with jax.named_scope("attention"):
            x, normed = self.input_norm(x, terms, ops)
            hidden = x
            terms, pages, blocks = self.attention(normed, pages, step)
        if hasattr(self, "mlp"):
            with jax.named_scope("mlp"):
                x, normed = self.post_norm(x, terms, ops)
                terms = self.mlp(normed, ops)
            return x, terms, pages, LayerTrace(hidden, None, None, blocks)
        x, terms = (a.reshape(*a.shape[:-3], -1, a.shape[-1]) for a in (x, terms))
        with jax.named_scope("router"):
            x, normed, routing = self.moe.router(x, terms, self.post_norm, step.rows.valid.reshape(-1), ops)
        with jax.named_scope("moe"):
            terms = self.moe(normed, routing, ops)
        experts, weights = (a.reshape(*shape[:2], -1) for a in (routing.experts, routing.weights))
        trace = LayerTrace(hidden, experts, weights, blocks)
        return x.reshape(shape), terms.reshape(-1, *shape), pages, trace


class M3(nnx.Module):
    """The language model.

    `dtype` is that of activations, pages and weights that are not quantised. `kv_format` names the entry of
    `PAGE_FORMATS` that programs round keys and values to; None leaves them as they are.
    """

    def __init__(self, config: ModelConfig, dtype: str, kv_format: str | None = None, *, rngs: nnx.Rngs):
        c = config
        self.config, self.dtype, self.kv_format = c, dtype, kv_format
        self.embed = Weight((c.vocab_size, c.hidden_size), dtype, rngs=rngs)
        self.layers = nnx.List([Layer(c, i, dtype, rngs=rngs) for i in range(c.num_layers)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, rngs=rngs)
        self.head: AnyWeight = Weight((c.vocab_size, c.hidden_size), dtype, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "B T"], pages: Pages, step: Step
    ) -> tuple[Float[Array, "B T D"], Pages, tuple[LayerTrace, ...]]:
        """Hidden states after the final norm."""
        terms = self.embed.tensor().dequantize()[tokens][None]
        x = jnp.zeros_like(terms[0])
        new_pages, traces = [], []
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                x, terms, layer_pages, trace = layer(x, terms, pages[i], step)
            new_pages.append(layer_pages)
            traces.append(trace)
        with jax.named_scope("norm"):
            _, normed = self.norm(x, terms, step.ops)
        return normed, tuple(new_pages), tuple(traces)

    def pack(self, part: str | None = None) -> None:
        """Hold the weights below `part`, such as `layers.3` or `head`, or all, in the kernels' order.

        This changes where numbers lie, and no number. The embedding stays as it is.
        """
        for i, layer in enumerate(self.layers):
            if part in (None, f"layers.{i}"):
                layer.pack()
        if part in (None, "head"):
            [self.head] = tiled([self.head])

    def logits(self, hidden: Float[Array, "*T D"], ops: Ops) -> Float[Array, "*T V"]:
        """The head, in float32."""
        with jax.named_scope("head"):
            return jnp.sum(ops.qmatmul(hidden, self.head.tensor()), axis=0)


def random_model(
    config: ModelConfig, dtype: str, recipe: Recipe | None = None, kv_format: str | None = None
) -> M3:
    """A model of random weights, in the formats of the recipe."""
    model = M3(config, dtype, kv_format, rngs=nnx.Rngs(0))
    if recipe is not None:
        for path, module in nnx.iter_modules(model):
            if isinstance(module, Weight) and module is not model.embed:
                module.requantize(recipe.format_of(".".join(map(str, path))))
    return model


def abstract_model(
    config: ModelConfig, dtype: str, recipe: Recipe | None = None, kv_format: str | None = None
) -> M3:
    """The module tree with shapes in place of arrays."""
    return nnx.eval_shape(lambda: random_model(config, dtype, recipe, kv_format))


def packed(model: M3) -> M3:
    """The tree with shapes that `M3.pack` makes of this one, which stays as it is."""

    def pack(tree: M3) -> M3:
        tree.pack()
        return tree

    return nnx.eval_shape(pack, model)


def forward(
    model: M3, tokens: Int[Array, "B S"], ops: Ops | None = None, pages: Pages | None = None
) -> tuple[Float[Array, "B S V"], tuple[LayerTrace, ...]]:
    """Logits in float32 at every position of whole sequences, and what each layer did. Pure; no cache stays.

    Differentiable in every parameter with `jax.grad`; the gradients of the indexer's weights and of the
    router's bias are exactly zero, because all they do is a discrete choice. `pages` may give the memory the
    keys are kept in (one page per block and row): whatever it holds reaches neither result nor gradient.
    """
    ops = ops or Ops()
    c = model.config
    n_rows, length = tokens.shape
    n_blocks = -(-length // c.block_size)
    tables = rope_tables(c, length)
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    rows = PagedRows(
        page_table=jnp.arange(n_rows * n_blocks).reshape(n_rows, n_blocks),
        positions=positions,
        lengths=jnp.full(n_rows, length),
        n_blocks=n_blocks,
    )
    if pages is None:
        pages = make_pages(c, n_rows * n_blocks, model.dtype)
    hidden, _, traces = model(tokens, pages, Step(rows, *tables.at(positions), ops))
    return model.logits(hidden, ops), traces
