"""Kernels: reference, portable Triton, Hopper; `common` holds what they share."""
