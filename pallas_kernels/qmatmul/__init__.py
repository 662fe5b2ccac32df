"""qmatmul: y[t, f] = sum_d x[t, d] w[f, d], with `w` in any format and sums in float32.

It returns terms `[P, T, F]` that whoever reads them adds up and rounds: a kernel that cuts the contracted
axis into parts then needs no further launch.
"""
