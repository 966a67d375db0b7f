"""The MoE kernels of gfx950."""
