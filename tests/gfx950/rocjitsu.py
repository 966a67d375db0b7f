"""Bit-for-bit comparison with rocjitsu, AMD's emulator of gfx950, which we did not write.

``python tests/gfx950/rocjitsu.py dump FOLDER`` executes kernels with mxpert's executor and writes
code objects, kernel arguments, inputs and outputs. Then, where rocjitsu and ROCm are installed,

    rocjitsu --config configs/gfx950_cdna4_kmd.json -- \
        python3 tests/gfx950/rocjitsu.py execute FOLDER

starts the same code objects through the HIP runtime and compares every byte of every tensor. It
needs Python alone. `.github/workflows/rocjitsu.yml` does both.

The second half was written after rocjitsu's documents (ROCm/rocm-systems, emulation/rocjitsu,
README.md and docs/race-detector.md) and has not been run yet. A sum inside of one MFMA is exact and
rounded once here; if rocjitsu rounds it otherwise, results of problems that are not exactly
representable differ, so the dumped problems are exact ones.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

KERNELS = ("_quantize_", "_moe_gate_up_kernel", "_moe_down_kernel", "_moe_gemm_", "_grouped_gemm")
"""How the names of the dumped kernels begin."""

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
BUFFER_POINTER, BUFFER_SIZE, END = 1, 2, 3
"""HIP_LAUNCH_PARAM_ constants of `hipModuleLaunchKernel`."""


def dump(folder: Path) -> None:
    """Execute a few kernels and write what the comparison needs."""
    import mxpert
    from mxpert.testing.problems import MoEShape
    from support.exact import exact_moe_problem
    from support.gfx950_mutants import capture
    from support.layers import run_layer

    inputs = exact_moe_problem(MoEShape(160, 96, 2, 1, mxpert.SiLU(), has_bias=True), 16)
    with capture() as launches:
        for backend in ("triton", "cdna4"):
            portable = backend == "triton"
            for a_format in ("bf16", "mxfp8", "mxfp4"):
                with mxpert.override(backend=backend):
                    run_layer(
                        inputs,
                        weights=None if portable else inputs.weights.prepare(device="cpu"),
                        activation_format=a_format,
                    )
    chosen = [launch for launch in launches if launch.name.startswith(KERNELS)]
    for number, launch in enumerate(chosen):
        write(launch, folder / f"{number:02d}{launch.name}")
    print(f"{len(chosen)} launches in {folder}")


def write(launch: Any, folder: Path) -> None:
    """Write one launch: kernel.hsaco, launch.json, and bytes of tensors before and after it."""
    import torch

    from gfx950emu import run
    from support.gfx950_mutants import copied

    folder.mkdir(parents=True)
    (folder / "kernel.hsaco").write_bytes(launch.binary)
    before, after = copied(launch.arguments), copied(launch.arguments)
    run(launch.code, launch.grid, after)
    storages: list[int] = []
    arguments: list[dict[str, Any]] = []
    program = launch.code.executable.program
    for place, name in zip(program.arguments, launch.code.parameters, strict=False):
        value = before[name]
        entry: dict[str, Any] = {"offset": place.offset, "size": place.size}
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in storages:
                for stage, tensor in (("before", value), ("after", after[name])):
                    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                    whole.numpy().tofile(folder / f"{stage}{len(storages)}.bin")
                storages.append(storage.data_ptr())
            entry["tensor"] = storages.index(storage.data_ptr())
            entry["start"] = value.data_ptr() - storage.data_ptr()
        elif isinstance(value, float):
            entry["float"] = value
        else:
            entry["integer"] = int(value or 0)
        arguments.append(entry)
    facts = {
        "kernel": launch.name,
        "grid": [*launch.grid, 1, 1][:3],
        "threads": 64 * program.num_waves,
        "lds": launch.code.lds,
        "tensors": len(storages),
        "arguments": arguments,
        "kernarg_size": max(place.offset + place.size for place in program.arguments),
    }
    (folder / "launch.json").write_text(json.dumps(facts, indent=1), "utf-8")


class Hip:
    """The HIP runtime; every failing call raises."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libamdhip64.so")

    def __call__(self, function: str, *arguments: Any) -> None:
        status = getattr(self.library, function)(*arguments)
        if status != 0:
            raise RuntimeError(f"{function}: HIP error {status}")


def execute(folder: Path) -> int:
    """Run all launches of a folder on the HIP device; return the number of those that differ."""
    hip, wrong = Hip(), 0
    launches = sorted(path.parent for path in folder.glob("*/launch.json"))
    for launch in launches:
        different = execute_one(hip, launch)
        wrong += bool(different)
        print(f"{launch.name}: {different or 'same bits'}", flush=True)
    print(f"{len(launches) - wrong} of {len(launches)} launches have the same bits")
    return wrong or int(not launches)


def execute_one(hip: Hip, folder: Path) -> str:
    """Run one launch; return the first difference, "" if there is none."""
    facts = json.loads((folder / "launch.json").read_text("utf-8"))
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    hip("hipModuleLoadData", ctypes.byref(module), (folder / "kernel.hsaco").read_bytes())
    hip("hipModuleGetFunction", ctypes.byref(function), module, facts["kernel"].encode())
    buffers = []
    for number in range(facts["tensors"]):
        content, address = (folder / f"before{number}.bin").read_bytes(), ctypes.c_void_p()
        size = ctypes.c_size_t(len(content))
        hip("hipMalloc", ctypes.byref(address), ctypes.c_size_t(max(len(content), 1)))
        hip("hipMemcpy", address, content, size, HOST_TO_DEVICE)
        buffers.append((address, size))
    segment = kernel_arguments(facts, [address.value or 0 for address, _ in buffers])
    size = ctypes.c_size_t(len(segment))
    extra = (ctypes.c_void_p * 5)(
        BUFFER_POINTER,
        ctypes.cast(segment, ctypes.c_void_p),
        BUFFER_SIZE,
        ctypes.cast(ctypes.pointer(size), ctypes.c_void_p),
        END,
    )
    shape = (*facts["grid"], facts["threads"], 1, 1, facts["lds"])
    hip("hipModuleLaunchKernel", function, *map(ctypes.c_uint, shape), None, None, extra)
    hip("hipDeviceSynchronize")
    different = ""
    for number, (address, length) in enumerate(buffers):
        found = ctypes.create_string_buffer(length.value)
        hip("hipMemcpy", found, address, length, DEVICE_TO_HOST)
        expected = (folder / f"after{number}.bin").read_bytes()
        bad = [place for place, byte in enumerate(found.raw) if byte != expected[place]]
        if bad and not different:
            different = f"tensor {number}: {len(bad)} bytes differ, the first at {bad[0]}"
        hip("hipFree", address)
    hip("hipModuleUnload", module)
    return different


def kernel_arguments(facts: dict[str, Any], addresses: list[int]) -> Any:
    """The explicit part of the kernel argument segment; the runtime adds the hidden one."""
    segment = ctypes.create_string_buffer(facts["kernarg_size"])
    for each in facts["arguments"]:
        if "tensor" in each:
            content = (addresses[each["tensor"]] + each["start"]).to_bytes(8, "little")
        elif "float" in each:
            kind = ctypes.c_float if each["size"] == 4 else ctypes.c_double
            content = bytes(kind(each["float"]))
        else:
            value = each["integer"]
            content = value.to_bytes(each["size"], "little", signed=value < 0)
        ctypes.memmove(ctypes.byref(segment, each["offset"]), content, each["size"])
    return segment


if __name__ == "__main__":
    command, place = sys.argv[1], Path(sys.argv[2])
    sys.exit(dump(place) if command == "dump" else execute(place))
