"""MiniMax-M3 in JAX: block-sparse attention and mixture of experts as one static decode graph.

The names below are imported when first used, so that the tokenizer, `--help` and messages about a broken
installation do not need JAX to start.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmx_jax.config import ModelConfig
    from mmx_jax.errors import MmxError
    from mmx_jax.generate import Completion, Model, SamplingParams
    from mmx_jax.loading import load

__version__ = "0.1.0"
__all__ = ["Completion", "MmxError", "Model", "ModelConfig", "SamplingParams", "load"]

_HOMES = {
    "Completion": "generate",
    "MmxError": "errors",
    "Model": "generate",
    "ModelConfig": "config",
    "SamplingParams": "generate",
    "load": "loading",
}


def __getattr__(name: str) -> Any:
    if name == "tokenizer":  # public as a module: mmx_jax.tokenizer.load(DIR)
        return importlib.import_module("mmx_jax.tokenizer")
    if name not in _HOMES:
        raise AttributeError(f"module 'mmx_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mmx_jax.{_HOMES[name]}"), name)
