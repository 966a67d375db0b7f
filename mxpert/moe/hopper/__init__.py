"""The MoE kernels of Hopper: FP4 weights are decoded to fragments of FP8 wgmma."""
