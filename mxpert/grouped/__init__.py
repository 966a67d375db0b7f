"""Grouped GEMMs of training: forward, gradient of the input, gradient of the weights."""
