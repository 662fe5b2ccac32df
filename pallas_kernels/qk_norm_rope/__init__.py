"""qk_norm_rope: from a layer's projections to its queries and pages.

RMSNorm over each head, (1 + w) x / rms(x), then RoPE on the first 2 * R of its dims; v passes. Keys and
values are written to the pages, so that the attention finds the new tokens there.
"""
