"""moe: the routed experts' weighted sum, for static routing buffers.

y[t] = sum_x weights[t, x] * down[e] . swigluoai(gate[e] . x[t], up[e] . x[t]),  e = experts[t, x]
"""
