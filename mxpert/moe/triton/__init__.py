"""The portable MoE kernels, in Triton."""
