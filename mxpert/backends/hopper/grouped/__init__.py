"""Grouped GEMMs of training on Hopper: forward, dgrad, wgrad."""
