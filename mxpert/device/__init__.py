"""Compiled helpers that the kernels of several ops share; a chip is the first word of a file."""
