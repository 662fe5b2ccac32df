"""Released-layout checkpoints of random weights, of any size, written without the project's code."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "vocab_size": 320,
    "hidden_size": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "rotary_dim": 32,
    "rope_theta": 5000000.0,
    "rms_norm_eps": 1e-06,
    "max_position": 4096,
    "dense_intermediate_size": 384,
    "expert_intermediate_size": 192,
    "shared_intermediate_size": 128,
    "num_experts": 6,
    "experts_per_token": 2,
    "routed_scaling_factor": 2.0,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "index_head_dim": 64,
    "block_size": 32,
    "top_blocks": 4,
    "local_blocks": 1,
    "init_blocks": 0,
    "moe_layers": [0, 1, 1],
    "sparse_layers": [0, 1, 1],
    "eos_token_ids": [256],
}


def write_checkpoint(directory: Path, *, seed: int = 0, **changes: object) -> Path:
    """A checkpoint of `CONFIG` with changes, one file a layer; normal weights in bfloat16."""
    c = {**CONFIG, **changes}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(c))
    rng = np.random.default_rng(seed)
    d, head, kv, index = c["hidden_size"], c["head_dim"], c["num_kv_heads"], c["index_head_dim"]
    weight_map: dict[str, str] = {}

    def normal(*shape: int, scale: float | None = None) -> np.ndarray:
        scale = shape[-1] ** -0.5 if scale is None else scale
        return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(ml_dtypes.bfloat16)

    def save(file: str, tensors: dict[str, np.ndarray]) -> None:
        tensors = {f"language_model.{name}": array for name, array in tensors.items()}
        save_file(tensors, directory / file)
        weight_map.update(dict.fromkeys(tensors, file))

    def mlp(width: int) -> dict[str, np.ndarray]:
        return {"gate_proj": normal(width, d), "up_proj": normal(width, d), "down_proj": normal(d, width)}

    for i, (moe, sparse) in enumerate(zip(c["moe_layers"], c["sparse_layers"], strict=True)):
        found = {
            "input_layernorm": normal(d, scale=0.1),
            "post_attention_layernorm": normal(d, scale=0.1),
            "self_attn.q_proj": normal(c["num_heads"] * head, d),
            "self_attn.k_proj": normal(kv * head, d),
            "self_attn.v_proj": normal(kv * head, d),
            "self_attn.o_proj": normal(d, c["num_heads"] * head),
            "self_attn.q_norm": normal(head, scale=0.1),
            "self_attn.k_norm": normal(head, scale=0.1),
        }
        if sparse:
            found["self_attn.index_q_proj"] = normal(kv * index, d)
            found["self_attn.index_k_proj"] = normal(index, d)
            found["self_attn.index_q_norm"] = normal(index, scale=0.1)
            found["self_attn.index_k_norm"] = normal(index, scale=0.1)
        if moe:
            width = c["expert_intermediate_size"]
            for e in range(c["num_experts"]):
                for name, array in zip(("w1", "w3", "w2"), mlp(width).values(), strict=True):
                    found[f"block_sparse_moe.experts.{e}.{name}"] = array
            shared = mlp(c["shared_intermediate_size"])
            found |= {f"block_sparse_moe.shared_experts.{name}": array for name, array in shared.items()}
            found["block_sparse_moe.gate"] = normal(c["num_experts"], d).astype(np.float32)
        else:
            found |= {f"mlp.{name}": array for name, array in mlp(c["dense_intermediate_size"]).items()}
        tensors = {f"model.layers.{i}.{name}.weight": array for name, array in found.items()}
        if moe:
            bias = normal(c["num_experts"], scale=0.1).astype(np.float32)
            tensors[f"model.layers.{i}.block_sparse_moe.e_score_correction_bias"] = bias
        save(f"layer-{i}.safetensors", tensors)
    ends = {
        "model.embed_tokens.weight": normal(c["vocab_size"], d, scale=1.0),
        "model.norm.weight": normal(d, scale=0.1),
        "lm_head.weight": normal(c["vocab_size"], d),
    }
    save("ends.safetensors", ends)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory
