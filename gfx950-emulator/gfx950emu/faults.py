"""What a kernel can do wrong, each with its own exception."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a kernel went wrong.

    Args:
        kernel: its name. index: of the instruction. text: the instruction as listed.
        line: source position as "file.py:12", or "".
        workgroup, wave, lane: who executed it first; None if it holds for all.
    """

    kernel: str
    index: int
    text: str
    line: str
    workgroup: int | None = None
    wave: int | None = None
    lane: int | None = None

    def __str__(self) -> str:
        who = [
            f"{name} {number}"
            for name, number in (
                ("workgroup", self.workgroup),
                ("wave", self.wave),
                ("lane", self.lane),
            )
            if number is not None
        ]
        line = f" ({self.line})" if self.line else ""
        return f"{self.kernel}+{self.index}{line}: {self.text}" + "".join(f", {w}" for w in who)


class Fault(RuntimeError):  # noqa: N818, it is the kernel's, not the caller's
    """A kernel did something that the hardware does not define.

    Attributes:
        place: the instruction, its source line, and the wave and lane.
        what: what is wrong, as one phrase.

    Example:
        >>> raise Fault(Place("kernel", 7, "ds_read_b32 v1, v2", "k.py:3", wave=1), "a race")
        Traceback (most recent call last):
        gfx950emu.faults.Fault: kernel+7 (k.py:3): ds_read_b32 v1, v2, wave 1 — a race
    """

    def __init__(self, place: Place, what: str) -> None:
        super().__init__(f"{place} — {what}")
        self.place, self.what = place, what


class WaitFault(Fault):
    """A register is used before the ``s_waitcnt`` that covers its load."""


class LdsRaceFault(Fault):
    """Two waves share LDS bytes without a barrier, or without the wait ahead of it."""


class LdsDirectFault(Fault):
    """LDS bytes of a load straight to LDS are used before ``vmcnt`` says that it is done."""


class OutOfBoundsFault(Fault):
    """An access lies outside of every tensor, or outside of the workgroup's LDS."""


class MisalignedFault(Fault):
    """An address is no multiple of the access's size (of 4 bytes for wider ones)."""


class SharedBytesFault(Fault):
    """Two workgroups share bytes of global memory that one writes, without atomics."""


class ReleaseFault(Fault):
    """A flag for other devices is set before what it publishes has reached them."""


class AcquireFault(Fault):
    """Bytes that other devices change are read from a cache that may hold old ones."""


class ConflictingStoreFault(Fault):
    """One store gives a byte of LDS two values."""


class HazardFault(Fault):
    """Two dependent instructions stand closer than the hardware requires."""


class MfmaHazardFault(HazardFault):
    """An instruction stands too close to a matrix instruction that it depends on."""


class ScratchFault(Fault):
    """The kernel uses scratch memory: registers are spilled."""


class EndlessLoopFault(Fault):
    """A wave executes more instructions than the budget allows."""
