"""Checkpoints on disk: read, inspected, quantised, written. Import the module that you need."""
