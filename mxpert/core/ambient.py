"""What surrounds a call and must not reach into it: autocast, precisions, torch.func."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from ..errors import UnsupportedError, message

_HIGHEST = "highest"
_NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


class Context(FunctionCtx):
    """What `forward` and `backward` of an autograd function get, for the type checker.

    torch's own type lacks what torch sets. `forward` keeps attributes of any name, which are Any.
    """

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    if TYPE_CHECKING:

        def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...


def isolated(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Return a context that neither autocast nor the precision of float32 matmuls reaches.

    The precision is a setting of the whole process: while one thread is inside, all compute with
    the highest.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16), isolated("cpu"):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float32
    """
    if torch.is_autocast_enabled(device_type):
        if torch.compiler.is_compiling():  # traced: its matmuls follow the process's precision
            return torch.autocast(device_type, enabled=False)
        return _without_autocast(device_type)
    if torch.compiler.is_compiling() or _precision.is_highest():
        return _NOTHING
    return _precision.highest()


@contextlib.contextmanager
def _without_autocast(device_type: str) -> Iterator[None]:
    with torch.autocast(device_type, enabled=False), _precision.highest():
        yield


class _Precision:
    """The precision of float32 matmuls: the highest while a thread is inside of `highest`."""

    def __init__(self) -> None:
        self._lock, self._inside, self._outside = threading.Lock(), 0, _HIGHEST

    def is_highest(self) -> bool:
        """Whether it is the highest, and not only until another thread leaves."""
        return self._inside == 0 and torch._C._get_float32_matmul_precision() == _HIGHEST

    @contextlib.contextmanager
    def highest(self) -> Iterator[None]:
        """A context with the highest precision."""
        with self._lock:
            if self._inside == 0:
                self._outside = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision(_HIGHEST)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    torch.set_float32_matmul_precision(self._outside)


_precision = _Precision()


def forward_mode() -> bool:
    """Return whether forward-mode differentiation is on."""
    return forward_ad._current_level >= 0


def refuse_transforms(op: str, values: Iterable[object]) -> None:
    """Raise for tensors that torch.func or forward-mode differentiation follows.

    No op has rules for them: `grad` and `jvp` would silently give zeros.

    Raises:
        UnsupportedError: a tensor among `values` belongs to `grad`, `vjp`, `jvp` or `vmap`.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is None and not forward_mode():
        return
    for value in values:
        if isinstance(value, torch.Tensor) and _is_followed(value):
            raise UnsupportedError(
                message(
                    op,
                    "torch.func",
                    "a call outside of grad, vjp, jvp and vmap",
                    "a tensor of one of them",
                    "detach it; torch.autograd differentiates the functions of mxpert.training",
                )
            )


def _is_followed(tensor: torch.Tensor) -> bool:
    """Whether a transform needs a rule for this tensor; constants inside of it are wrapped too."""
    functorch = torch._C._functorch
    if functorch.is_batchedtensor(tensor):
        return True
    if functorch.is_gradtrackingtensor(tensor) and tensor.requires_grad:
        return True
    return forward_mode() and forward_ad.unpack_dual(tensor).tangent is not None
