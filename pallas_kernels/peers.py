"""The peer that the experts' kernels are measured against: humming-kernels' two int4 grouped matmuls.

Needs torch and humming-kernels (`pip install torch humming-kernels`); nothing else in the project does.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

GROUP = 64


def humming_int4(
    experts: Sequence[np.ndarray], n_experts: int, d_model: int, features: int
) -> list[Callable[[], None]]:
    """For each `[T, X]` choice of experts, a call of gate-and-up and then down: no activation, no sum.

    Weights are random; block shapes are those that its own heuristics choose. Each call is checked once
    against a float32 product on the dequantised weights.
    """
    import torch
    from humming import ops
    from humming.kernel.humming import HummingKernel
    from humming.schema import HummingWeightSchema
    from humming.transform import prepare_layer_config, transform_humming_tensors
    from humming.tune import get_heuristics_config

    schema = HummingWeightSchema(b_dtype="uint4", weight_scale_group_size=GROUP)
    locks = torch.zeros(8192, dtype=torch.int32, device="cuda")

    def layer(n: int, k: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        raw = torch.randint(-(2**31), 2**31 - 1, (n_experts, n, k // 8), dtype=torch.int32, device="cuda")
        scale = ((torch.rand(n_experts, n, k // GROUP, device="cuda") + 0.5) / (7 * k**0.5)).bfloat16()
        tensors = {"weight": raw, "weight_scale": scale}
        config = prepare_layer_config(
            n, k, schema, num_experts=n_experts, torch_dtype=torch.bfloat16, device=0, tensors=tensors
        )
        return config, transform_humming_tensors(config, dict(tensors)), tensors

    def launcher(weights: tuple, chosen: np.ndarray, x: Any, top_k: int) -> Callable[[], None]:
        config, tensors, source = weights
        tuned = get_heuristics_config(config, shape_m=chosen.size, gemm_type="indexed", device=0)
        kernel = HummingKernel.prepare_kernels(
            config.to_str(), json.dumps({"gemm_type": "indexed"}), json.dumps(tuned), device=0
        )
        ids, tiles, padded = (
            torch.from_numpy(a).cuda() for a in _aligned(chosen, n_experts, tuned["block_shape"][0])
        )
        out = torch.empty(chosen.size, source["weight"].shape[1], dtype=torch.bfloat16, device="cuda")

        def launch() -> None:
            ops.launch_kernel(
                configs=kernel,
                inputs=x,
                outputs=out,
                locks=locks,
                top_k=top_k,
                sorted_ids=ids,
                expert_ids=tiles,
                num_tokens_padded=padded,
                expert_layout=None,
                **tensors,
            )

        launch()
        pair = chosen.size - 1
        one = {name: t[int(chosen.flat[pair])].contiguous() for name, t in source.items()}
        exact = x[pair // top_k].float() @ schema.dequant_tensors(one).float().T
        error = float((out[pair].float() - exact).norm() / exact.norm())
        if not error < 2.0**-6:
            raise RuntimeError(f"humming-kernels: relative error {error:.1e}")
        return launch

    gate_up, down = layer(2 * features, d_model), layer(d_model, features)
    calls = []
    for chosen in experts:
        n_tokens, top_k = chosen.shape
        x = torch.randn(n_tokens, d_model, device="cuda").bfloat16()
        hidden = torch.randn(chosen.size, features, device="cuda").bfloat16()
        first = launcher(gate_up, chosen, x, top_k)
        second = launcher(down, chosen, hidden, 1)

        def call(first: Callable[[], None] = first, second: Callable[[], None] = second) -> None:
            first()
            second()
            torch.cuda.synchronize()

        calls.append(call)
    return calls


def _aligned(chosen: np.ndarray, n_experts: int, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs sorted by expert and padded to whole blocks, the blocks' experts, and how many ids there are."""
    flat = chosen.reshape(-1)
    ids: list[np.ndarray] = []
    tiles: list[int] = []
    for expert in np.unique(flat):
        pairs = np.flatnonzero(flat == expert)
        n_blocks = -(-len(pairs) // block)
        ids.append(np.pad(pairs, (0, n_blocks * block - len(pairs)), constant_values=flat.size))
        tiles += [int(expert)] * n_blocks
    sorted_ids = np.concatenate(ids).astype(np.int32)
    n_ids = np.array([len(sorted_ids)], np.int32)
    capacity = min(flat.size * block, flat.size + n_experts * (block - 1))
    capacity = -(-capacity // block) * block
    padded_ids = np.full(capacity, flat.size, np.int32)
    padded_ids[: len(sorted_ids)] = sorted_ids
    padded_tiles = np.zeros(capacity // block, np.int32)
    padded_tiles[: len(tiles)] = tiles
    return padded_ids, padded_tiles, n_ids
