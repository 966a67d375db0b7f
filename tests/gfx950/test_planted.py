"""Bugs planted into a copy of the native decode kernel: each is caught, and named.

The Gluon source is copied with one line changed, or an instruction is dropped from the compiled
kernel. Then it is executed on the arguments of a launch of the original.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import mxpert
from gfx950emu import CodeObject, Fault, LdsRaceFault, OutOfBoundsFault, run
from mxpert.core.launch import LaunchRecord, record_launches
from mxpert.moe.cdna4 import decode, mainloop
from mxpert.testing.ahead_of_time import compile_kernel
from mxpert.testing.gfx950 import emulate
from mxpert.testing.numerics import assert_exact
from mxpert.testing.problems import MoEShape
from support.exact import exact_moe_problem
from support.gfx950_mutants import changed, copied, mutants
from support.gfx950_suite import SCHEDULES
from support.layers import run_layer


class Bug(NamedTuple):
    """One line of the main loop, and what stands in its place.

    Args:
        old: as it is in `mainloop.py`, once. new: with the bug.
        error: what the executor, or the comparison with the right result, raises.
    """

    old: str
    new: str
    error: type[Exception]


BUGS = {
    "swapped scales": Bug(
        "as_x_scale_operand(words, step, WAVES)",
        "as_x_scale_operand(words, step ^ 1, WAVES)",
        AssertionError,
    ),
    "out-of-bounds tail": Bug(
        "outside = (chunk >= self.num_blocks * PER_BLOCK)",
        "outside = (chunk < 0)",
        OutOfBoundsFault,
    ),
}

SYNCHRONISATION = "        _async_copy.wait_group(0)\n        barrier()\n"
"""Wait and barrier between the copy of activations and their use. The compiler puts back what is
missing in the source, so these are dropped from the listing."""
DROPPED = {"missing wait": ("dropped wait", 0), "wrong barrier": ("dropped barrier", 1)}
"""Bug → kind of mutant, and which line of `SYNCHRONISATION` its instruction comes from."""


@pytest.fixture(scope="module")
def original() -> LaunchRecord:
    """Stage 1 of a layer with 16 tokens, whose depth ends inside of its second copy."""
    shape = MoEShape(1312, 96, 1, 1, mxpert.SiLU(), has_bias=True)
    inputs = exact_moe_problem(shape, 16, seed=3)
    tile = mxpert.configs.Cdna4GemmConfig("decode", block_m=16, block_n=256)
    config = mxpert.configs.MoEConfig(16, tile, tile)
    with emulate(), record_launches() as records, mxpert.override(backend="cdna4", config=config):
        run_layer(inputs, weights=inputs.weights.prepare(device="cpu"), activation_format="mxfp8")
    first, _ = (
        record for record in records if record.launch.kernel is decode._moe_gemm_decode_cdna4_kernel
    )
    return first


@pytest.fixture
def modules() -> Iterator[dict[str, Any]]:
    """Modules made by a test, by name; they are forgotten after it."""
    made: dict[str, Any] = {}
    yield made
    for name in made:
        del sys.modules[name]


def copy_of(name: str, source: str, folder: Path, modules: dict[str, Any]) -> Any:
    """Import a copy of a module of the backend; relative imports work as in the original."""
    path, full = folder / f"{name}.py", f"mxpert.moe.cdna4.{name}"
    path.write_text(source, "utf-8")
    spec = importlib.util.spec_from_file_location(full, path)
    assert spec is not None
    assert spec.loader is not None
    modules[full] = sys.modules[full] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(modules[full])
    return modules[full]


def kernel_with(bug: Bug | None, folder: Path, modules: dict[str, Any]) -> Any:
    """The decode kernel of copies of its two files."""
    loop = Path(mainloop.__file__).read_text("utf-8")
    if bug is not None:
        assert loop.count(bug.old) == 1
        loop = loop.replace(bug.old, bug.new)
    copy_of("copied_mainloop", loop, folder, modules)
    source = Path(decode.__file__).read_text("utf-8")
    source = source.replace("from .mainloop import", "from .copied_mainloop import")
    return copy_of("copied_decode", source, folder, modules)._moe_gemm_decode_cdna4_kernel


def result_of(kernel: Any, original: LaunchRecord, schedule: str) -> list[torch.Tensor]:
    """Run a kernel on the original's arguments, with outputs that hold other bytes before."""
    arguments = copied(original.launch.arguments(original.tensors))
    outputs = [
        arguments[name] for name in ("out_ptr", "out_scale_ptr") if arguments[name] is not None
    ]
    for each in outputs:
        each.view(torch.uint8).fill_(0xA5)
    compiled = compile_kernel(kernel, arguments)
    run(compiled, original.launch.grid, arguments, schedule=schedule, seed=1)
    return outputs


def check(kernel: Any, original: LaunchRecord, schedule: str) -> None:
    """Compare a kernel's outputs with the original's, bit for bit."""
    expected = result_of(original.launch.kernel, original, "lowest")
    for found, wanted in zip(result_of(kernel, original, schedule), expected, strict=True):
        assert_exact(found, wanted, "stage 1")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_faithful_copy_is_exact(original, schedule, tmp_path, modules) -> None:
    check(kernel_with(None, tmp_path, modules), original, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name, schedule, original, tmp_path, modules) -> None:
    """A fault names the kernel, the instruction and a line of the copied source."""
    kernel = kernel_with(BUGS[name], tmp_path, modules)
    with pytest.raises(BUGS[name].error) as caught:
        check(kernel, original, schedule)
    if issubclass(BUGS[name].error, Fault):
        place = caught.value.place
        assert place.kernel == "_moe_gemm_decode_cdna4_kernel"
        assert place.line.startswith("copied_mainloop.py:"), place


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", DROPPED)
def test_a_dropped_instruction_is_caught(name, schedule, original) -> None:
    """The fault names the access that races, not the place of the missing instruction."""
    source = Path(mainloop.__file__).read_text("utf-8")
    assert source.count(SYNCHRONISATION) == 1
    kind, following = DROPPED[name]
    line = source[: source.index(SYNCHRONISATION)].count("\n") + 1 + following
    arguments = copied(original.launch.arguments(original.tensors))
    code = CodeObject.of(compile_kernel(original.launch.kernel, arguments))
    instructions = code.executable.program.instructions
    (bug,) = (
        mutant
        for mutant in mutants(code.executable)
        if mutant.kind == kind
        and instructions[mutant.index].line.startswith(f"mainloop.py:{line}:")
    )
    with pytest.raises(LdsRaceFault) as caught:
        run(changed(code, bug), original.launch.grid, arguments, schedule=schedule, seed=1)
    place = caught.value.place
    assert place.kernel == "_moe_gemm_decode_cdna4_kernel"
    assert place.line
    assert place.text.startswith(("ds_", "buffer_load")), place
