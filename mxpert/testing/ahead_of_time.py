"""Ahead-of-time compilation of Triton and Gluon kernels for targets that this machine lacks.

Needs no GPU: the Triton wheel holds the compilers of every target. One kernel takes about a second;
results are kept for the life of the process (and in Triton's own cache). Kernels must be compiled
outside the interpreter (``TRITON_INTERPRET`` unset).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from ..core.kernel_keys import hash_callees_first
from ..core.launch import LAUNCH_OPTIONS
from ..errors import message, require

TARGETS: Mapping[str, GPUTarget] = MappingProxyType(
    {
        "sm_80": GPUTarget("cuda", 80, 32),
        "sm_86": GPUTarget("cuda", 86, 32),
        "sm_89": GPUTarget("cuda", 89, 32),
        "sm_90": GPUTarget("cuda", 90, 32),
        "sm_100": GPUTarget("cuda", 100, 32),
        "sm_103": GPUTarget("cuda", 103, 32),
        "sm_120": GPUTarget("cuda", 120, 32),
        "gfx950": GPUTarget("hip", "gfx950", 64),
    }
)


@dataclass(frozen=True)
class Specialization:
    """How Triton's launcher sees one call: everything that its choice of a binary depends on.

    Args:
        signature: Triton type by argument, "constexpr" for what is compiled in.
        constexprs: value by place; None and integers equal to 1 are compiled in, too.
        attributes: what is promised of other arguments by place, such as "tt.divisibility" or, on
            AMD for tensors below 2 GiB, "tt.pointer_range".
        options: num_warps and all other compile options of the target.
        bound: all arguments by name, with defaults.
    """

    signature: Mapping[str, str]
    constexprs: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], list[list[Any]]]
    options: object
    bound: Mapping[str, Any]

    @functools.cached_property
    def key(self) -> str:
        """Equal for two calls exactly if they run the same binary."""
        return repr((self.signature, self.constexprs, self.attributes, vars(self.options)))


def specialize(fn: JITFunction, arguments: Mapping[str, Any], target: str) -> Specialization:
    """What the launcher of a target derives from a call, computed by Triton's own functions.

    Args:
        fn: a ``@triton.jit`` or ``@gluon.jit`` function.
        arguments: arguments and launch options by keyword, as ``fn[grid](**arguments)`` takes them.
            Tensors may lie on the meta device, whose storage counts as aligned.
        target: key of `TARGETS`.

    Raises:
        TypeError: `fn` is not jitted, or is interpreted; an argument is missing.
        ValueError: unknown target, argument or option.
    """
    op = "specialize"
    if not isinstance(fn, JITFunction):
        raise TypeError(
            message(
                op,
                "fn",
                "a @triton.jit or @gluon.jit function",
                type(fn).__name__,
                "unset TRITON_INTERPRET before Triton is imported",
            )
        )
    require(target in TARGETS, op, "target", need=f"one of {list(TARGETS)}", got=repr(target))
    hash_callees_first(fn)
    rules = tuple((p.do_not_specialize, p.do_not_specialize_on_alignment) for p in fn.params)
    backend, bind = _binder(fn, target, rules)
    given = {**LAUNCH_OPTIONS, **arguments}
    bound, parts, options = bind(**given)
    try:
        options, signature, constexprs, attributes = fn._pack_args(
            backend, given, bound, parts, options
        )
    except KeyError as error:
        raise ValueError(
            message(
                op,
                "arguments",
                f"names out of {fn.arg_names} or an option of {target}",
                sorted(given),
            )
        ) from error
    return Specialization(signature, constexprs, attributes, options, bound)


@functools.cache
def _binder(fn: JITFunction, target: str, rules: tuple[tuple[bool, bool], ...]) -> tuple[Any, Any]:
    """The compiler of a target, and Triton's function that binds the arguments of a call.

    rules: of each parameter, whether its value and its alignment are left out of the binary's key;
    the function depends on them.
    """
    backend = make_backend(TARGETS[target])
    return backend, create_function_from_signature(fn.signature, fn.params, backend)


def compile_call(fn: JITFunction, call: Specialization, target: str) -> CompiledKernel:
    """Compile the binary that a call would run on a target; Triton's ``CompiledKernel``."""
    key = (fn, target, call.key)
    if key not in _compiled:
        source = (GluonASTSource if isinstance(fn, GluonJITFunction) else ASTSource)(
            fn, dict(call.signature), dict(call.constexprs), dict(call.attributes)
        )
        with _alone(f"{fn.__module__}.{fn.__name__} {target} {call.key}"):
            _compiled[key] = triton.compile(
                source, target=TARGETS[target], options=vars(call.options)
            )
    return _compiled[key]


@contextlib.contextmanager
def _alone(binary: str) -> Iterator[None]:
    """Let other processes wait that need the same binary: they find it in Triton's cache then.

    Ranks, and workers of a test suite, ask for a binary at the same time. Triton itself reports a
    cache that cannot be written.
    """
    path = Path(knobs.cache.dir, f"mxpert-{zlib.crc32(binary.encode()) % _LOCKS}.lock")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield


def compile_kernel(
    fn: JITFunction, arguments: Mapping[str, Any], *, target: str = "gfx950"
) -> CompiledKernel:
    """Compile the binary that ``fn[grid](**arguments)`` would run on a target.

    Arguments and errors are those of `specialize`. Returns Triton's ``CompiledKernel``; the same
    binary is the same object.

    Example:
        >>> import torch
        >>> from mxpert.testing._read_kernel import _read_stream_kernel
        >>> words = torch.empty(4096, dtype=torch.int32, device="meta")
        >>> arguments = {"sums_ptr": words, "data_ptr": words, "num_elements": 4096, "BLOCK": 1024}
        >>> "v_add_u32" in compile_kernel(_read_stream_kernel, arguments).asm["amdgcn"]
        True
    """
    return compile_call(fn, specialize(fn, arguments, target), target)


_compiled: dict[tuple[JITFunction, str, str], CompiledKernel] = {}
_LOCKS = 256
"""Lock files, so that different binaries seldom wait for each other."""
