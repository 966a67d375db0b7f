"""Quantisation of tensors in one direction or in both, and its kernels."""
