"""Executes the gfx950 code of Triton and Gluon kernels on a CPU, instruction by instruction.

`run` executes one compiled kernel on CPU tensors; `emulate` lets the library's own ops run through
their gfx950 code. Both look for what the hardware leaves undefined and raise a `Fault` that names
the kernel, the instruction and the source line. See docs/gfx950.md.
"""

from ..ahead_of_time import compile_kernel
from .emulation import MI355X, Emulation, KernelTotals, emulate
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

__all__ = [
    "MI355X",
    "AcquireFault",
    "CodeObject",
    "ConflictingStoreFault",
    "Emulation",
    "EndlessLoopFault",
    "Fault",
    "HazardFault",
    "KernelTotals",
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
    "compile_kernel",
    "emulate",
    "run",
]
