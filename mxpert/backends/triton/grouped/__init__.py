"""Portable grouped GEMMs of training."""
