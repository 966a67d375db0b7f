"""Device code that the gfx950 kernels share."""
