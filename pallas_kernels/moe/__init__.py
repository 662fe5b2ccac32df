"""mlp and moe: feed-forward by one gated MLP, or by routed experts with a shared one beside them.

mlp(x) = down . a,  a = (u + 1) g sigmoid(alpha g),  g = min(gate . x, limit),  u = clip(up . x, +-limit)
moe(x[t]) = sum_x weights[t, x] * mlp_e(x[t]) + mlp_shared(x[t]),  e = experts[t, x]

Both return terms, as qmatmul does. Routing buffers are of static shape.
"""
