"""transformers' own MiniMax-M3 on the numbers of a module tree, in torch on the CPU, one layer at a time.

Needs torch and transformers (`pip install 'mmx-jax[compare]'`); nothing else in the project does. Beside the
tree, memory holds one layer in the working dtype and half of one in float32 while it is filled, the hidden
states of all windows, and the attention mask of one window, 4 N T^2 bytes. So the released model can be
checked as far as its first layers fit.

In float32 both sides differ by the order of sums only. In bfloat16 they round in different places:
transformers rounds cos, sin, the router's weights and bias and the logits to bfloat16, where this project
keeps float32. transformers ignores `init_blocks`.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Array
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as theirs
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

from mmx_jax.compare import Sink, Windows
from mmx_jax.config import ModelConfig
from mmx_jax.engine import Progress
from mmx_jax.model import M3, Layer
from mmx_jax.moe import MLP
from mmx_jax.params import AnyWeight


@torch.inference_mode()
def run_transformers(tree: M3, windows: Windows, sink: Sink, progress: Progress) -> None:
    """transformers' forward over all windows, layer by layer; the tree must not be packed."""
    dtype = getattr(torch, tree.dtype)
    config = text_config(tree.config)
    rotary = theirs.MiniMaxM3VLRotaryEmbedding(config)
    embedding = _numbers(tree.embed, dtype)
    hidden = [embedding[torch.from_numpy(ids.astype(np.int64))][None] for ids in windows]
    del embedding
    for i, layer in enumerate(tree.layers):
        progress("transformers", i, len(tree.layers))
        module = _decoder_layer(config, i, layer, dtype)
        chosen = _watch(module)
        for window, x in enumerate(hidden):
            positions = torch.arange(x.shape[1])[None]
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
            hidden[window] = module(
                x,
                position_embeddings=rotary(x, positions),
                attention_mask=causal,
                position_ids=positions,
            )
            sink.layer(window, i, x[0].float().numpy(), chosen.get("experts"), chosen.get("blocks"))
        del module
    progress("transformers", len(tree.layers), len(tree.layers))
    norm = theirs.MiniMaxM3VLRMSNorm(config.hidden_size, config.rms_norm_eps)
    norm.load_state_dict({"weight": _tensor(tree.norm.weight[...], dtype)}, assign=True)
    head = _numbers(tree.head, dtype)
    for window, x in enumerate(hidden):
        sink.logits(window, torch.nn.functional.linear(norm(x[0]), head).float().numpy())


def text_config(c: ModelConfig) -> MiniMaxM3VLTextConfig:
    """The model's values under transformers' names."""
    config = MiniMaxM3VLTextConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rotary_dim=c.rotary_dim,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": c.rope_theta,
            "partial_rotary_factor": c.rotary_dim / c.head_dim,
        },
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position,
        dense_intermediate_size=c.dense_intermediate_size,
        intermediate_size=c.expert_intermediate_size,
        shared_intermediate_size=c.shared_intermediate_size,
        num_local_experts=c.num_experts,
        num_experts_per_tok=c.experts_per_token,
        routed_scaling_factor=c.routed_scaling_factor,
        swiglu_alpha=c.swiglu_alpha,
        swiglu_limit=c.swiglu_limit,
        index_n_heads=c.num_kv_heads,
        index_head_dim=c.index_head_dim,
        index_block_size=c.block_size,
        index_topk_blocks=c.top_blocks,
        index_local_blocks=c.local_blocks,
        layer_types=["minimax_m3_sparse" if sparse else "full_attention" for sparse in c.sparse_layers],
        mlp_layer_types=["sparse" if moe else "dense" for moe in c.moe_layers],
        bos_token_id=None,
        eos_token_id=None,
    )
    config._attn_implementation = "sdpa"  # less memory than "eager"; both take the indexer's block mask
    config._experts_implementation = "eager"  # the loop over experts of the model's own file
    return config


def _decoder_layer(config: MiniMaxM3VLTextConfig, index: int, layer: Layer, dtype: torch.dtype) -> Any:
    """transformers' layer with the numbers of ours; strict loading checks that every one of them is there."""
    attention = layer.attention
    weights = {
        "self_attn.q_proj": attention.q,
        "self_attn.k_proj": attention.k,
        "self_attn.v_proj": attention.v,
        "self_attn.o_proj": attention.o,
    }
    norms = {
        "input_layernorm": layer.input_norm,
        "post_attention_layernorm": layer.post_norm,
        "self_attn.q_norm": attention.q_norm,
        "self_attn.k_norm": attention.k_norm,
    }
    if (indexer := attention.indexer) is not None:
        weights |= {"self_attn.indexer.q_proj": indexer.q, "self_attn.indexer.k_proj": indexer.k}
        norms |= {"self_attn.indexer.q_norm": indexer.q_norm, "self_attn.indexer.k_norm": indexer.k_norm}
    state = {f"{name}.weight": _numbers(weight, dtype) for name, weight in weights.items()}
    state |= {f"{name}.weight": _tensor(norm.weight[...], dtype) for name, norm in norms.items()}
    if config.mlp_layer_types[index] == "dense":
        state |= _mlp("mlp", layer.mlp, dtype)
    else:
        router, experts = layer.moe.router, layer.moe.experts
        state |= _mlp("mlp.shared_experts", layer.moe.shared, dtype)
        state["mlp.gate.weight"] = _tensor(router.weight[...], dtype)
        state["mlp.gate.e_score_correction_bias"] = _tensor(router.bias[...], dtype)
        state["mlp.experts.gate_up_proj"] = _gate_up(experts.gate, experts.up, dtype)
        state["mlp.experts.down_proj"] = _numbers(experts.down, dtype)
    with torch.device("meta"):
        module = theirs.MiniMaxM3VLDecoderLayer(config, index)
    module.load_state_dict(state, strict=True, assign=True)
    return module.eval()


def _mlp(name: str, mlp: MLP, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        f"{name}.gate_up_proj.weight": _gate_up(mlp.gate, mlp.up, dtype),
        f"{name}.down_proj.weight": _numbers(mlp.down, dtype),
    }


def _gate_up(gate: AnyWeight, up: AnyWeight, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([_numbers(gate, dtype), _numbers(up, dtype)], dim=-2)


def _numbers(weight: AnyWeight, dtype: torch.dtype) -> torch.Tensor:
    return _tensor(weight.tensor().dequantize(), dtype)


def _tensor(values: Array, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.float32)).to(dtype)


def _watch(module: Any) -> dict[str, np.ndarray]:
    """A dictionary that holds the layer's choices after each of its calls: experts and blocks, if any."""
    chosen: dict[str, np.ndarray] = {}

    def router(_module: Any, _inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        chosen["experts"] = output[2].numpy()

    def indexer(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        chosen["blocks"] = output[0].transpose(0, 1).numpy()

    if module.self_attn.indexer is not None:
        module.self_attn.indexer.register_forward_hook(indexer)
    if hasattr(module.mlp, "gate"):
        module.mlp.gate.register_forward_hook(router)
    return chosen
