"""add_norm: what a layer's parts add to the residual stream, and the norm that the next part reads.

x' = x + sum_p terms[p], rounded once; y = x' / rms(x') * (1 + w).
"""
