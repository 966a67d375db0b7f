"""SASS scanner: finds writes to registers that a wgmma still reads.

A wgmma with operand A in registers reads them asynchronously, until a wait (``WARPGROUP.DEPBAR``)
covers its group. ptxas before CUDA 13.3 may reuse such a register before the wait.
`overwritten_operands` follows every path of the program and reports such writes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

A_REGISTERS = 4
"""Registers per thread of operand A: 64 × 32 bytes in a warpgroup of 128 threads."""

_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?P<guard>@!?U?P\w+\s+)?(?P<op>[A-Z][\w.]*)(?P<rest>[^;]*);"
)
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_MATRIX = re.compile(r"(?:QGMMA|HGMMA|IGMMA)\.64x(\d+)x\d+")
_WITHOUT_RESULT = re.compile(
    r"^(ST|RED|BAR|MEMBAR|BRA|BRX|EXIT|NOP|WARP|U(?!2)|R2UR|R2P|BSSY|BSYNC|DEPBAR|CCTL|FENCE|CALL|"
    r"RET|ERRBAR|\w*SETP|PLOP3|S2UR|NANOSLEEP|YIELD|ELECT|ACQ|JMP|KILL|LDGDEPBAR)"
)


@dataclass(frozen=True)
class Instruction:
    """One line of SASS: text, mnemonic, predicate, operands.

    What follows from them is kept: a scan comes to an instruction once for each state.
    """

    text: str
    name: str
    guarded: bool
    operands: tuple[str, ...]

    @functools.cached_property
    def writes(self) -> frozenset[int]:
        """General registers that the instruction writes, all registers of wide results included."""
        if _WITHOUT_RESULT.match(self.name):
            return frozenset()
        first = next((o for o in self.operands if not re.fullmatch(r"!?U?P\w+", o)), "")
        found = re.match(r"R(\d+)\b", first)
        if not found:
            return frozenset()
        start = int(found[1])
        return frozenset(range(start, start + self._width()))

    def _width(self) -> int:
        if matrix := _MATRIX.match(self.name):
            return int(matrix[1]) // 2  # float32 accumulators of 64 × N in 128 threads
        parts = self.name.split(".")
        if parts[0] == "LDSM":
            return int(parts[-1]) if parts[-1] in ("2", "4") else 1
        if "128" in parts:
            return 4
        return 2 if "64" in parts or "WIDE" in parts else 1

    @functools.cached_property
    def register_operand(self) -> frozenset[int]:
        """Registers of operand A that this wgmma reads asynchronously; empty for others."""
        if not _MATRIX.match(self.name):
            return frozenset()
        found = re.match(r"R(\d+)\b", self.operands[1])
        start = int(found[1]) if found else 0
        return frozenset(range(start, start + A_REGISTERS)) if found else frozenset()

    @functools.cached_property
    def commits(self) -> bool:
        """Whether this wgmma closes a group."""
        return "gsb0" in self.operands

    @functools.cached_property
    def waits_for(self) -> int | None:
        """Number of groups that may be in flight after this wait; None if it is no wait."""
        if not self.name.startswith("WARPGROUP.DEPBAR"):
            return None
        return int(self.operands[-1], 16)


@dataclass
class Block:
    """Basic block: straight-line code, and the labels of its successors (None: the next block)."""

    instructions: list[Instruction] = field(default_factory=list)
    successors: set[int] = field(default_factory=set)


def parse(listing: str) -> list[Block]:
    """Basic blocks of a listing (``nvdisasm -c``)."""
    blocks: list[Block] = [Block()]
    labels: dict[str, int] = {}
    exits: dict[int, list[str]] = {}
    falls: set[int] = set()
    sync: dict[str, list[str]] = {}

    for line in listing.splitlines():
        if label := _LABEL.match(line):
            if blocks[-1].instructions:
                falls.add(len(blocks) - 1)
                blocks.append(Block())
            labels[label[1]] = len(blocks) - 1
            continue
        if not (found := _INSTRUCTION.match(line)):
            continue
        operands = tuple(
            o.strip().split(".")[0] if o.strip().startswith("R") else o.strip()
            for o in found["rest"].split(",")
        )
        one = Instruction(line.strip(), found["op"], bool(found["guard"]), operands)
        blocks[-1].instructions.append(one)
        index = len(blocks) - 1
        targets = _TARGET.findall(line)
        if one.name.startswith("BSSY"):
            sync.setdefault(operands[0], []).extend(targets)
        elif one.name.startswith(("BRA", "EXIT", "BRX", "RET", "BSYNC")):
            exits[index] = targets
            conditional = one.guarded or one.name.startswith("BSYNC") or len(operands) > 1
            if conditional:
                falls.add(index)
            if one.name.startswith("BSYNC"):
                exits[index] = sync.get(operands[0], [])
            blocks.append(Block())
    for index, block in enumerate(blocks):
        block.successors |= {labels[t] for t in exits.get(index, ()) if t in labels}
        if index in falls and index + 1 < len(blocks):
            block.successors.add(index + 1)
    return blocks


State = tuple[tuple[frozenset[int], ...], frozenset[int]]
"""Operand registers of the committed groups in flight, oldest first, and of the open group."""


def _run(block: Block, state: State) -> Iterator[tuple[Instruction, frozenset[int]] | State]:
    """Yield writes to registers in flight, then the state after the block."""
    closed, current = state
    busy = frozenset().union(*closed, current)
    for one in block.instructions:
        left = one.waits_for
        if left is not None and left < len(closed):
            closed = closed[len(closed) - left :]
            busy = frozenset().union(*closed, current)
        if hit := one.writes & busy:
            yield one, hit
        if one.register_operand:
            current |= one.register_operand
            busy |= current
        if one.commits:
            closed, current = (*closed, current), frozenset()
    yield closed, current


def overwritten_operands(listing: str, *, most_groups: int = 64) -> list[str]:
    """Instructions that write a register which an unfinished wgmma may still read as operand A.

    Every block is analysed with nothing in flight, and with each state in which a path reaches it.
    Warp partitions start by jumps through registers; the first case covers them without targets.
    """
    blocks = parse(listing)
    nothing: State = ((), frozenset())
    pending = [(index, nothing) for index in range(len(blocks))]
    seen = set(pending)
    found: dict[str, None] = {}
    while pending:
        index, state = pending.pop()
        for result in _run(blocks[index], state):
            if isinstance(result[0], Instruction):
                found[f"{result[0].text} overwrites {sorted(result[1])}"] = None
                continue
            for successor in blocks[index].successors:
                following = (successor, result)
                if following not in seen and len(result[0]) <= most_groups:
                    seen.add(following)
                    pending.append(following)
    return list(found)


def register_operands(listing: str) -> int:
    """Number of wgmma instructions with operand A in registers."""
    return sum(1 for block in parse(listing) for one in block.instructions if one.register_operand)


_BARRIER = re.compile(r"\bSYNCS\.EXCH\.64 URZ, \[UR\d+\+(0x[0-9a-f]+)\]")
_SHARED_DATA = re.compile(r"\bSTS[.\w]* [^;]*\+(0x[0-9a-f]+)\]")
_BARRIER_BYTES = 8


def reused_barriers(listing: str) -> list[int]:
    """Shared-memory addresses of mbarriers to which the kernel also stores other data.

    Memory of an mbarrier must hold nothing else until the mbarrier is invalidated.
    """
    barriers = {int(found, 16) for found in _BARRIER.findall(listing)}
    data = {int(found, 16) for found in _SHARED_DATA.findall(listing)}
    return sorted(
        place for place in barriers if any(place <= used < place + _BARRIER_BYTES for used in data)
    )
