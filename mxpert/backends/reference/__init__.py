"""The reference backend: vectorised torch on any device, the oracle of every other backend."""

from .routing import PLAN, TOPK

KERNELS = (TOPK, PLAN)
