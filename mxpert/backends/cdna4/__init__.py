"""gfx950 kernels (CDNA4): weights in matrix fragment order, scaled MFMA, written in Gluon."""

from ...runtime.replay import replayed

KERNELS = replayed()

__all__ = ["KERNELS"]
