"""Grouped GEMMs of training on gfx950's scaled MFMA."""
