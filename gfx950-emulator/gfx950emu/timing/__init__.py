"""Cycle model of one gfx950 compute unit: replays executed waves. Its figures are *modelled*.

`model_loop` gives the steady state of a kernel's hot loop, `model_tiles` the time of whole
workgroups with start and epilogue. What the model assumes, and where each figure comes from, is in
`chip` and `classes`; its error against published measurements is in mxpert's docs/gfx950-model.md.
"""

from .chip import MI355X, Chip
from .execution import Execution, LoopError
from .loop import LoopReport, model_loop
from .tiles import TileReport, model_tiles

__all__ = [
    "MI355X",
    "Chip",
    "Execution",
    "LoopError",
    "LoopReport",
    "TileReport",
    "model_loop",
    "model_tiles",
]
