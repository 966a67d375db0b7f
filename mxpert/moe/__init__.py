"""The two-stage MoE layer: weights, checks, the reference, and kernels by chip."""
