"""Kernels in CUDA C++: compiled when they are first launched, with NVRTC through cuda.core.

Most kernels are written in Triton and Gluon. These are for what those cannot express. A `Launch`
takes them like Triton's, their binaries lie in Triton's cache, and Triton's C launcher starts them.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver

from ..errors import message
from .binary import binary_of
from .cuda_compiler import COMPILER, missing_compiler

_OPTIONS = ("num_warps", "shared", "launch_cooperative_grid", "launch_pdl", "enable_fp_fusion")
"""Launch options; other arguments that are no parameters of the kernel are macros."""
_SCRATCH = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
_SCRATCH |= dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1)


@dataclass(frozen=True)
class CompiledCudaKernel:
    """A compiled kernel, as far as Triton's class of that name is used.

    Args:
        name: of the function. cubin: its machine code. log: what the compiler says of it.
        metadata: number of warps, bytes of shared memory, kind of launch.
        signature: Triton's types of the parameters.
    """

    name: str
    cubin: bytes
    log: str
    metadata: SimpleNamespace
    signature: Mapping[str, str]

    @property
    def packed_metadata(self) -> tuple[int, int, int]:
        """What the C launcher reads: warps, CTAs of a cluster, bytes of shared memory."""
        return self.metadata.num_warps, self.metadata.num_ctas, self.metadata.shared

    @functools.cached_property
    def run(self) -> Any:
        """Triton's launcher of the signature."""
        from triton.backends.nvidia.driver import CudaLauncher  # not every Triton has it

        source = SimpleNamespace(constants={}, signature=dict(self.signature))
        return CudaLauncher(source, self.metadata)

    @functools.cached_property
    def function(self) -> Any:
        """The handle of the function on the current device, where the code is loaded first."""
        device = driver.active.get_current_device()
        loaded = driver.active.utils.load_binary(
            self.name, self.cubin, self.metadata.shared, device
        )
        return loaded[1]


class CudaKernel:
    """A kernel in CUDA C++.

    Arguments of a launch that are neither parameters nor launch options are macros of the source.
    After its parameters the function takes two pointers, Triton's scratch memory.

    Args:
        paths: files of the source, one after the other.
        name: the function's, declared extern "C".
        architecture: of the machine code, as NVRTC names it.
        parameters: Triton's types of the parameters, such as "*u8", "i32" or "fp32".
    """

    pre_run_hooks: tuple[Callable[..., object], ...] = ()

    def __init__(
        self, paths: Sequence[Path], name: str, architecture: str, parameters: Mapping[str, str]
    ) -> None:
        self.paths, self.__name__, self.architecture = tuple(paths), name, architecture
        self.types = dict(parameters)
        self.arg_names = list(parameters)
        self.params = [
            SimpleNamespace(name=each, is_constexpr=False, do_not_specialize=True)
            for each in parameters
        ]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.signature = inspect.Signature([inspect.Parameter(each, kind) for each in parameters])
        self._compiled: dict[tuple[Any, ...], CompiledCudaKernel] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., CompiledCudaKernel]:
        """What launches the kernel with this grid."""
        return functools.partial(self.run, grid=grid, warmup=False)

    @property
    def binaries(self) -> set[bytes]:
        """The machine code that this process has compiled or loaded."""
        return {each.cubin for each in self._compiled.values()}

    def run(
        self, *_: object, grid: Any, warmup: bool, **arguments: Any
    ) -> CompiledCudaKernel:  # Any: arguments of the kernel; a grid as Triton's kernels take it
        """Launch the kernel on the current device's stream; with `warmup` only compile it."""
        compiled = self.compile(arguments)
        if not warmup:
            found = binary_of(compiled, [])
            if found is None:
                raise RuntimeError(
                    message(self.__name__, "Triton", "a C launcher that is known", "another")
                )
            stream = driver.active.get_current_stream(driver.active.get_current_device())
            sizes = (*grid, 1, 1)[:3]
            values = [arguments[name] for name in self.types]
            found.launcher(*sizes, stream, *found.fixed, *values)
        return compiled

    def macros(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The macros among the arguments of a launch: with others it has another binary."""
        return {
            name: value
            for name, value in arguments.items()
            if name not in self.types and name not in _OPTIONS
        }

    def compile(self, arguments: Mapping[str, Any]) -> CompiledCudaKernel:
        """The kernel for the macros and launch options among `arguments`, for the current device.

        Raises:
            RuntimeError: what compiles it is not installed. Errors of NVRTC are cuda.core's own.
        """
        macros = self.macros(arguments)
        options = {name: arguments.get(name, False) for name in _OPTIONS}
        device = driver.active.get_current_device()
        key = (device, *macros.items(), *options.values())
        found = self._compiled.get(key)
        if found is None:
            metadata = SimpleNamespace(num_ctas=1, tensordesc_meta=None, **options, **_SCRATCH)
            code, log = self._machine_code(macros, contract=options["enable_fp_fusion"])
            found = CompiledCudaKernel(self.__name__, code, log, metadata, self.types)
            self._compiled[key] = found
        return found

    def _machine_code(self, macros: Mapping[str, Any], *, contract: bool) -> tuple[bytes, str]:
        """Machine code and the compiler's log, from Triton's cache if they are there."""
        reason = missing_compiler()
        if reason is not None:
            raise RuntimeError(message(self.__name__, "compiler", reason, "none"))
        from cuda.bindings import nvrtc
        from cuda.core import Program, ProgramOptions

        source = "".join(path.read_text(encoding="utf-8") for path in self.paths)
        made_by = version(COMPILER), nvrtc.nvrtcVersion()[1:]
        parts = (source, self.architecture, tuple(macros.items()), contract, made_by)
        cache = get_cache_manager(hashlib.sha256(repr(parts).encode()).hexdigest())
        names = f"{self.__name__}.cubin", f"{self.__name__}.log"
        kept, kept_log = map(cache.get_file, names)
        if kept is not None and kept_log is not None:
            return Path(kept).read_bytes(), Path(kept_log).read_text(encoding="utf-8")
        options = ProgramOptions(
            arch=self.architecture,
            std="c++17",
            define_macro=[(name, str(value)) for name, value in macros.items()] or None,
            fma=contract,
            ptxas_options=["--verbose"],
        )
        said = io.StringIO()
        code = Program(source, "c++", options).compile("cubin", logs=said).code
        log = said.getvalue()
        cache.put(code, names[0])
        cache.put(log, names[1], binary=False)
        return code, log
