"""Distances that the hardware requires between dependent instructions.

Source: LLVM's GCNHazardRecognizer for gfx950.
"""

from __future__ import annotations

from .program import Program


def check_wait_states(program: Program) -> None:
    """Fail if two dependent instructions of a program stand too close on some path."""
