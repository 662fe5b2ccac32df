"""qmatmul: y[t, f] = sum_d x[t, d] w[f, d], with `w` in any format and sums in float32."""
