"""route: add_norm, and which experts the tokens go to.

p = sigmoid(W y) in float32; the experts of a token are the top-k of p + bias, the lower of equal ones first,
and their weights are p, without the bias, divided by their sum and scaled.
"""
