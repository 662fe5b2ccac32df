"""block_select: which key blocks each query reads, for each KV head by itself.

score[block] = max over the block's visible keys of iq . ik, in float32. The last `local_blocks` up to the
query's own and the first `init_blocks` are always taken; the best of the others fill up to `top_blocks`.
Among equal scores the lower block id wins.
"""
