"""Transformers models and checkpoints."""
