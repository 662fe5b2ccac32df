"""block_attention: causal attention over chosen blocks of the paged cache, or over all of them.

out[t] = sum_s softmax_s(q[t] . k[s] / sqrt(H)) v[s] over keys s <= t in the blocks chosen for t's KV head.
"""
