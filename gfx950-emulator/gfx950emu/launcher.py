"""Executes one launch of a compiled kernel on CPU tensors."""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .errors import message, require
from .hazards import UntrackedReadError
from .machine import Executable, Machine, Schedule, load
from .memory import Bytes, GlobalMemory
from .program import Program
from .trace import WaveTrace

_OP = "gfx950.run"
_POINTER = 8
_PACKET = 64
"""Bytes of the dispatch packet, which kernels read the grid's size from."""


@dataclass(frozen=True)
class CodeObject:
    """A kernel compiled for gfx950.

    Args:
        executable: its instructions. lds: bytes of LDS a workgroup that are given at launch.
        parameters: names of the arguments that are passed, in order; () if they are not known.

    Example:
        >>> from gfx950emu import example
        >>> CodeObject.of(example("copy")).parameters
        ('out', 'x')
    """

    executable: Executable
    lds: int = 0
    parameters: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, compiled: Any, *, lds: int = 0, parameters: Sequence[str] = (), listing: str = ""
    ) -> CodeObject:
        """Read what a compiler returned.

        Args:
            compiled: the bytes of a code object (an ELF file, "hsaco"), or what ``triton.compile``
                returned: any object with ``asm["hsaco"]`` and ``metadata.shared``; its
                ``src.signature`` names the arguments.
            lds: for bytes, bytes of LDS a workgroup that are given at launch.
            parameters: for bytes, names of the arguments in order; by default the metadata's.
            listing: for bytes, the amdgcn text; faults then name source lines.

        Raises:
            TypeError: `compiled` is neither. ValueError: it is not for gfx950.
        """
        if isinstance(compiled, CodeObject):
            return compiled
        if isinstance(compiled, bytes):
            executable = load(compiled, listing)
            noted = tuple(each.name for each in executable.program.arguments)
            return cls(executable, lds, tuple(parameters) or (noted if all(noted) else ()))
        asm = getattr(compiled, "asm", None)
        if asm is None or "hsaco" not in asm:
            got = type(compiled).__name__
            need = "the bytes of a code object, or a kernel that triton.compile made for gfx950"
            raise TypeError(message(_OP, "compiled", need, got))
        signature = getattr(getattr(compiled, "src", None), "signature", {})
        return cls.of(
            asm["hsaco"],
            lds=compiled.metadata.shared,
            parameters=[name for name, kind in signature.items() if kind != "constexpr"],
            listing=asm.get("amdgcn", ""),
        )


@dataclass(frozen=True)
class Reachable:
    """Memory that a kernel reaches by pointers that it loads from memory.

    The kernel sees it at its real address, ``tensor.data_ptr()``, and no other memory that is no
    argument. All checks of arguments hold for it.

    Args:
        name: in faults, different from those of all arguments.
        tensor: contiguous, on the CPU.
        shared: whether other processes use it while the kernel runs, as devices do with memory of
            their peers. Then each access goes straight to the tensor, and `ReleaseFault` and
            `AcquireFault` watch over flags.

    Example:
        >>> import torch
        >>> words = torch.zeros(4, dtype=torch.int64)
        >>> reachable = Reachable("words", words)
        >>> reachable.address == words.data_ptr(), reachable.bytes.size
        (True, 32)
    """

    name: str
    tensor: torch.Tensor
    shared: bool = False

    def __post_init__(self) -> None:
        got = f"strides {self.tensor.stride()} on {self.tensor.device}"
        is_plain = self.tensor.device.type == "cpu" and self.tensor.is_contiguous()
        require(is_plain, _OP, self.name, need="a contiguous CPU tensor", got=got)

    @property
    def address(self) -> int:
        """Where kernels see it."""
        return self.tensor.data_ptr()

    @property
    def bytes(self) -> Bytes:
        """Its content."""
        content: Bytes = self.tensor.detach().reshape(-1).view(torch.uint8).numpy()
        return content


@dataclass(frozen=True)
class Report:
    """What one launch executed.

    Args:
        kernel: its name. grid: workgroups along x, y and z.
        instructions: wave-instructions, of all waves together.
        counts: of them by mnemonic. executed: by index of the instruction.
        seconds: of this computer, not of the device. lds: bytes a workgroup.
        registers: vector and accumulator registers a lane. checks: whether checks were on.
        traces: what each wave executed, if asked for. program: its instructions.
        regions: name of each allocation → its offsets in global memory, as in the traces.

    Example:
        >>> import torch
        >>> from gfx950emu import example, run
        >>> x = torch.arange(64)
        >>> report = run(example("copy"), (1,), {"out": torch.zeros(64), "x": x.float()})
        >>> report.grid, report.lds, report.instructions == sum(report.counts.values())
        ((1, 1, 1), 0, True)
    """

    kernel: str
    grid: tuple[int, int, int]
    instructions: int
    counts: Mapping[str, int] = field(repr=False)
    executed: Sequence[int] = field(repr=False)
    seconds: float
    lds: int
    registers: int
    checks: bool
    traces: Sequence[WaveTrace] = field(repr=False)
    program: Program = field(repr=False)
    regions: Mapping[str, range] = field(repr=False)


def run(
    compiled: Any,
    grid: Sequence[int],
    arguments: Sequence[Any] | Mapping[str, Any],
    *,
    reachable: Sequence[Reachable] = (),
    schedule: Schedule = "lowest",
    seed: int = 0,
    checks: bool = True,
    trace: bool = False,
) -> Report:
    """Execute a kernel that was compiled for gfx950 on CPU tensors, instruction by instruction.

    Tensors are changed in place. The result has the bits that the instruction set defines; sums
    inside of a matrix instruction are exact and rounded once.

    Args:
        compiled: the bytes of a code object, what ``triton.compile`` returned for
            ``GPUTarget("hip", "gfx950", 64)`` (Triton or Gluon), or a `CodeObject`.
        grid: one to three numbers of workgroups.
        arguments: CPU tensors and numbers, by name or in the order of the kernel's parameters.
            Values that were compiled in may be among the named ones.
        reachable: further memory, whose addresses the kernel finds in memory; see `Reachable`.
        schedule: "lowest" executes waves side by side; "random" takes workgroups in random order
            and lets a random wave of them continue each time. Correct kernels give the same bits.
        seed: of the schedule, and of the garbage in registers and LDS at the start.
        checks: look for races, missing waits, bytes that workgroups share, misaligned addresses and
            dependent instructions that stand too close. Takes about as long as executing.
        trace: record what each wave executed; see `WaveTrace`.

    Returns:
        A `Report`.

    Raises:
        Fault: the kernel does something undefined; the class says what.
        TypeError, ValueError: the arguments do not fit the kernel.
        NotImplementedError: an instruction is not known.

    Example:
        >>> import torch
        >>> from gfx950emu import example
        >>> arguments = {"out": torch.zeros(64), "x": torch.ones(64)}
        >>> report = run(example("copy"), (1,), arguments)
        >>> arguments["out"].sum().item(), report.counts["s_waitcnt"]
        (64.0, 2)
    """
    code = CodeObject.of(compiled)
    sizes, values = _grid(grid), _in_order(code, arguments)
    if checks and (fault := code.executable.fault) is not None:
        raise type(fault)(fault.place, fault.what)
    while True:
        memory, kernarg, packet = _memory(code.executable.program, sizes, values, reachable)
        machine = Machine(
            code.executable,
            memory,
            code.lds,
            checks=checks,
            schedule=schedule,
            seed=seed,
            trace=trace,
        )
        start = time.perf_counter()
        try:
            machine.launch(sizes, kernarg, packet)
        except UntrackedReadError as found:
            code.executable.written.add(found.region.name)
            continue
        seconds = time.perf_counter() - start
        memory.store()
        return _report(machine, sizes, seconds, checks)


def _report(machine: Machine, grid: tuple[int, int, int], seconds: float, checks: bool) -> Report:
    counts: collections.Counter[str] = collections.Counter()
    for instruction, number in zip(machine.program.instructions, machine.executed, strict=True):
        if number:
            counts[instruction.name] += number
    return Report(
        kernel=machine.program.name,
        grid=grid,
        instructions=counts.total(),
        counts=counts,
        executed=machine.executed,
        seconds=seconds,
        lds=machine.lds_size,
        registers=machine.program.metadata.get("vgpr_count", 0),
        checks=checks,
        traces=machine.traces,
        program=machine.program,
        regions={each.name: range(each.start, each.end) for each in machine.memory.regions},
    )


def _grid(grid: Sequence[int]) -> tuple[int, int, int]:
    sizes = tuple(grid)
    require(
        1 <= len(sizes) <= 3 and all(isinstance(size, int) and size >= 0 for size in sizes),
        _OP,
        "grid",
        need="one to three numbers of workgroups",
        got=sizes,
    )
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _in_order(
    code: CodeObject, arguments: Sequence[Any] | Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Names and values of the kernel's arguments, in its order."""
    explicit = code.executable.program.arguments
    if isinstance(arguments, Mapping):
        require(
            bool(code.parameters) or not explicit,
            _OP,
            "arguments",
            need="a sequence, as the code object names no parameters",
            got="names",
        )
        missing = [name for name in code.parameters if name not in arguments]
        require(not missing, _OP, "arguments", need=list(code.parameters), got=f"no {missing}")
        values = [(name, arguments[name]) for name in code.parameters]
    else:
        names = code.parameters or tuple(f"argument {n}" for n in range(len(arguments)))
        require(
            len(names) == len(arguments),
            _OP,
            "arguments",
            need=f"{len(names)} values for {list(names)}",
            got=f"{len(arguments)} values",
        )
        values = list(zip(names, arguments, strict=True))
    # Triton appends pointers to scratch in global memory, which kernels that ask for none ignore.
    extra = len(explicit) - len(values)
    require(
        0 <= extra <= 2,
        _OP,
        "arguments",
        need=f"{len(explicit)} values, up to two of them appended by Triton",
        got=f"{len(values)} values",
    )
    return values


def _memory(
    program: Program,
    grid: tuple[int, int, int],
    values: Sequence[tuple[str, Any]],
    reachable: Sequence[Reachable],
) -> tuple[GlobalMemory, int, int]:
    """Global memory with all tensors; addresses of kernel arguments and dispatch packet."""
    memory = GlobalMemory()
    for each in reachable:
        memory.add(each.name, each.bytes, address=each.address, shared=each.shared)
    addresses: dict[int, int] = {}
    segment = bytearray(program.kernarg_size)
    threads = 64 * program.num_waves
    for place, (name, value) in zip(program.arguments, values, strict=False):
        if isinstance(value, torch.Tensor):
            value = _address(memory, addresses, name, value)
        segment[place.offset : place.offset + place.size] = _encode(value, place.size, name)
    for axis, size in zip("xyz", grid, strict=True):
        hidden = {
            f"hidden_block_count_{axis}": size,
            f"hidden_group_size_{axis}": threads if axis == "x" else 1,
        }
        for kind, number in hidden.items():
            if kind in program.hidden:
                at = program.hidden[kind]
                segment[at.offset : at.offset + at.size] = _encode(number, at.size, kind)
    packet = memory.add("the dispatch packet", _packet(grid, threads))
    kernarg = memory.add("the kernel arguments", _read_only(bytes(segment)))
    memory.load()
    return memory, kernarg, packet


def _address(
    memory: GlobalMemory, addresses: dict[int, int], name: str, tensor: torch.Tensor
) -> int:
    """Virtual address of a tensor; tensors of one storage share its mapping."""
    require(
        tensor.device.type == "cpu",
        _OP,
        name,
        need="a CPU tensor",
        got=f"a tensor on {tensor.device}",
        remedy="move it with .cpu()",
    )
    if memory.is_placed(tensor.data_ptr()):
        return tensor.data_ptr()
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    if start not in addresses:
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        addresses[start] = memory.add(name, flat.numpy(), alignment=start)
    return addresses[start] + tensor.data_ptr() - start


def _encode(value: Any, size: int, name: str) -> bytes:
    """The bytes of one kernel argument."""
    if value is None:
        return bytes(size)
    if isinstance(value, float):
        kinds = {2: np.float16, 4: np.float32, 8: np.float64}
        return np.array(value, kinds[size]).tobytes()
    if isinstance(value, int):
        return int(value).to_bytes(size, "little", signed=value < 0)
    raise TypeError(message(_OP, name, "a CPU tensor or a number", type(value).__name__))


def _packet(grid: tuple[int, int, int], threads: int) -> Bytes:
    """The dispatch packet (HSA, hsa_kernel_dispatch_packet_t) as far as kernels read it."""
    packet = np.zeros(_PACKET, np.uint8)
    packet[4:10].view(np.uint16)[:] = threads, 1, 1
    packet[12:24].view(np.uint32)[:] = grid[0] * threads, grid[1], grid[2]
    return _read_only(packet.tobytes())


def _read_only(content: bytes) -> Bytes:
    return np.frombuffer(content, np.uint8)
