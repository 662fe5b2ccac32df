"""transformers' own MiniMax-M3 decoding, for `mmx_jax.bench`, which starts this as a process of its own.

    python -m mmx_jax.peer '{"config": "configs/minimax_m3.json", "layers": 5, "points": [[1, 1024]],
                             "tokens": 24, "runs": 5}'

Random bfloat16 weights and a static cache; on a GPU the experts run by grouped_mm, and torch compiles the
step for each shape. One line of JSON for each point, [rows, keys], with milliseconds of a step: the time of
a run that makes `tokens` + 1 beyond that of a run that makes one, which is the prefill.

Needs torch and transformers.
"""

import json
import sys
import time
from typing import Any

import torch
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

from mmx_jax.arms import summary
from mmx_jax.config import ModelConfig
from mmx_jax.parity import text_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_default_dtype(torch.bfloat16)
    torch._dynamo.config.automatic_dynamic_shapes = False  # shapes it knows make it faster
    config = text_config(ModelConfig.from_file(asked["config"]).first_layers(asked["layers"]))
    model: Any = None
    for batch, context in asked["points"]:
        row: dict[str, Any] = {"batch": batch, "context": context}
        try:
            if model is None:
                with torch.device(DEVICE):
                    model = MiniMaxM3VLForCausalLM(config).eval()
                if DEVICE == "cuda":
                    model.set_experts_implementation("grouped_mm")
            row |= summary(_seconds(model, batch, context, asked["tokens"], asked["runs"]), asked["tokens"])
            row |= {"runs": asked["runs"], "tokens": batch * asked["tokens"]}
        except torch.OutOfMemoryError:
            row["failed"] = "out of memory"
            torch.cuda.empty_cache()
        print(json.dumps(row), flush=True)


@torch.no_grad()
def _seconds(model: Any, batch: int, context: int, tokens: int, runs: int) -> list[float]:
    """Of `tokens` steps in each run."""
    prompt = torch.randint(0, model.config.vocab_size, (batch, context), device=DEVICE)

    def run(count: int) -> float:
        start = time.perf_counter()
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            cache_implementation="static",
            disable_compile=False,
        )
        made = made.cpu()
        if made.shape[1] != context + count:
            raise RuntimeError(f"{made.shape[1] - context} tokens in place of {count}")
        return time.perf_counter() - start

    for count in (3, tokens + 1):  # compiles
        run(count)
    return [run(tokens + 1) - run(1) for _ in range(runs)]


if __name__ == "__main__":
    main()
