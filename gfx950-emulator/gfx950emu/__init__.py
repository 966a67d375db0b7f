"""Executes gfx950 (MI355X) code objects on a CPU, instruction by instruction.

`run` executes one kernel on CPU tensors. It looks for what the hardware leaves undefined and raises
a `Fault` that names the kernel, the instruction and, where it is known, the source line.
"""

from .examples import example
from .faults import (
    AcquireFault,
    ConflictingStoreFault,
    EndlessLoopFault,
    Fault,
    HazardFault,
    LdsDirectFault,
    LdsRaceFault,
    MfmaHazardFault,
    MisalignedFault,
    OutOfBoundsFault,
    Place,
    ReleaseFault,
    ScratchFault,
    SharedBytesFault,
    WaitFault,
)
from .launcher import CodeObject, Reachable, Report, run
from .trace import WaveTrace

__version__ = "0.1.0"

__all__ = [
    "AcquireFault",
    "CodeObject",
    "ConflictingStoreFault",
    "EndlessLoopFault",
    "Fault",
    "HazardFault",
    "LdsDirectFault",
    "LdsRaceFault",
    "MfmaHazardFault",
    "MisalignedFault",
    "OutOfBoundsFault",
    "Place",
    "Reachable",
    "ReleaseFault",
    "Report",
    "ScratchFault",
    "SharedBytesFault",
    "WaitFault",
    "WaveTrace",
    "example",
    "run",
]
