"""What a model and its state take in memory, by kind, before anything is allocated."""

import math
import os
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from mmx_jax.cache import make_pages
from mmx_jax.errors import InputError
from mmx_jax.model import M3
from mmx_jax.params import parameters

# Kind of a parameter -> a part of its path; the first that fits counts.
WEIGHT_KINDS = {
    "norms": "norm.",
    "embedding": "embed",
    "output head": "head",
    "indexer": ".attention.indexer.",
    "attention": ".attention.",
    "dense MLP": ".mlp.",
    "router": ".moe.router.",
    "routed experts": ".moe.experts.",
    "shared experts": ".moe.shared.",
}


@dataclass(frozen=True)
class MemoryPlan:
    """Parameters and bytes by kind of weight, and bytes by kind of state. One device holds everything."""

    parameters: dict[str, int]
    weight_bytes: dict[str, int]
    state_bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.weight_bytes.values()) + sum(self.state_bytes.values())

    def check(self, mesh: Mesh) -> None:
        """Raise InputError if the device cannot hold the model and its state."""
        device = mesh.devices.flat[0]
        limit = device_bytes(device)
        if self.total > limit:
            raise InputError(
                f"the model and its state take {self.total / 1e9:.1f} GB and {device} has"
                f" {limit / 1e9:.1f} GB: ask for fewer layers, a smaller max_length or a smaller batch"
                " (mmx_jax.decode --plan shows what takes how much)"
            )


def device_bytes(device: Any) -> int:
    """Memory that programs can use on a device; a CPU's is the machine's."""
    stats: dict[str, Any] = device.memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_plan(model: M3, batch: int, max_length: int) -> MemoryPlan:
    """The plan for `batch` sequences of up to `max_length` tokens."""
    c = model.config
    counts = dict.fromkeys(WEIGHT_KINDS, 0)
    sizes = dict.fromkeys(WEIGHT_KINDS, 0)

    def kind(path: str) -> str:
        return next(kind for kind, part in WEIGHT_KINDS.items() if part in path)

    for path, spec in parameters(model).items():
        counts[kind(path)] += math.prod(spec.shape)
    for path, buffer in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        sizes[kind(".".join(map(str, path)))] += math.prod(buffer.shape) * buffer.dtype.itemsize
    blocks = -(-max_length // c.block_size)
    pages = jax.eval_shape(lambda: make_pages(c, batch * blocks, model.dtype, model.kv_format))

    def nbytes(tree: Any) -> int:
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))

    state = {
        "K and V pages": nbytes([(p.k, p.v, p.k_scale, p.v_scale) for p in pages]),
        "index key pages": nbytes([p.index_k for p in pages]),
        "rotary tables": max_length * c.rotary_dim * 4,
        "batch state": batch * (c.vocab_size + 4 * blocks),
    }
    used = [kind for kind, count in counts.items() if count]
    return MemoryPlan({k: counts[k] for k in used}, {k: sizes[k] for k in used}, state)


def step_bytes(model: M3, batch: int, keys: int, experts: float) -> int:
    """Bytes that decoding one token for each row must read, where a row sees `keys` keys.

    All weights but the embedding and the routed experts, once; of those `experts` in each layer, which are
    as many as the rows chose together; and for each row keys and values of all blocks in a dense layer, of at
    most `top_blocks` in a sparse one, and there all index keys.
    """
    c = model.config
    plan = memory_plan(model, 1, c.block_size)  # the state of one block
    left_out = ("embedding", "routed experts")
    weights = sum(size for kind, size in plan.weight_bytes.items() if kind not in left_out)
    weights += plan.weight_bytes.get("routed experts", 0) * experts / c.num_experts
    blocks = keys / c.block_size
    n_sparse = sum(c.sparse_layers)
    read = blocks * (c.num_layers - n_sparse) + min(blocks, c.top_blocks) * n_sparse
    kv_bytes = plan.state_bytes["K and V pages"] / c.num_layers * read
    return round(weights + batch * (kv_bytes + plan.state_bytes["index key pages"] * blocks))
