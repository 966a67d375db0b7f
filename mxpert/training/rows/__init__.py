"""Activation and combine of training, forward and backward."""
