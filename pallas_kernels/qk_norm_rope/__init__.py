"""qk_norm_rope: RMSNorm over each head, (1 + w) x / rms(x), then RoPE on the first 2 * R of its dims."""
