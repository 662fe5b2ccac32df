"""MiniMax-M3 in JAX."""
