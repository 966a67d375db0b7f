"""Executes the gfx950 code of Triton and Gluon kernels on a CPU, instruction by instruction."""
