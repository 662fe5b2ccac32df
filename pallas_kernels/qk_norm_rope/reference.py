"""The definition of the per-head norm and rotation in plain JAX."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.precision import wide


def rms_norm(x: Float[Array, "*T D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*T D"]:
    """Gemma's RMSNorm, x * rsqrt(mean(x^2) + eps) * (1 + weight), in float32 and not rounded."""
    x = wide(x)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * (1 + weight.astype(x.dtype))


def qk_norm_rope(
    x: Float[Array, "B T h H"],
    weight: Float[Array, " H"],
    cos: Float[Array, "B T R"],
    sin: Float[Array, "B T R"],
    *,
    eps: float,
) -> Float[Array, "B T h H"]:
    """Norm and rotate, in float32, rounded once to the dtype of `x`.

    Split-half (NeoX) pairs: dims i and i + R turn together, i < R; dims from 2 R on pass through.
    """
    n_pairs = cos.shape[-1]
    normed = rms_norm(x, weight, eps)
    a, b, rest = normed[..., :n_pairs], normed[..., n_pairs : 2 * n_pairs], normed[..., 2 * n_pairs :]
    cos, sin = cos[:, :, None].astype(normed.dtype), sin[:, :, None].astype(normed.dtype)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)
