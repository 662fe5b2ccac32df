"""Precomputed rotary tables: cos and sin of position times inverse frequency."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mmx_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RopeTables:
    """cos and sin for every position up to the capacity, R = rotary_dim / 2 pairs each, float32."""

    cos: Float[Array, "S R"]
    sin: Float[Array, "S R"]

    def at(self, positions: Int[Array, "B T"]) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
        """Rows of the tables; a padding token's position may lie beyond them and gets the last row."""
        positions = jnp.minimum(positions, self.cos.shape[0] - 1)
        return self.cos[positions], self.sin[positions]


def rope_tables(config: ModelConfig, length: int) -> RopeTables:
    """Tables for positions 0 to length - 1.

    The angle is the float32 product of float32 position and float32 inverse frequency, theta^(-2i/R), as in
    transformers and vLLM: float64 angles would differ by 0.006 in cos at 512K tokens. cos and sin of that
    angle are then exact to float32.
    """
    exponent = np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)
    inverse_frequency = np.float32(1) / np.float32(config.rope_theta) ** exponent
    angle = np.arange(length, dtype=np.float32)[:, None] * inverse_frequency
    cos, sin = (np.asarray(f(angle.astype(np.float64)), np.float32) for f in (np.cos, np.sin))
    return RopeTables(jnp.asarray(cos), jnp.asarray(sin))
