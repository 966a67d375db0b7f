"""Code objects to try things with; each stands beside its source."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "data"


def example(name: str = "copy") -> bytes:
    """A code object: "copy" copies 64 dwords with one wave, out[i] = x[i]."""
    return (_FOLDER / f"{name}.hsaco").read_bytes()
