"""What the Hopper kernels share: pipeline, tile scheduler, TMA descriptors, PTX."""
