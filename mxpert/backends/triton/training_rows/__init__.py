"""Activation and combine between the GEMMs of training, forward and backward."""
