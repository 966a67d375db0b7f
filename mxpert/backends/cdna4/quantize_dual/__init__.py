"""Rowwise and columnwise MXFP8 copies of a tensor from one read, on gfx950."""
