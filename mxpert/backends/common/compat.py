"""Parts of Triton that differ between the supported releases (3.6 to 3.9).

They have their newest names and abilities here.
"""

from __future__ import annotations

from typing import Any, dataclass_transform, get_type_hints

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate, base_value

# Look for the new names first: Triton 3.9 keeps the old ones as functions that raise.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Start a TMA copy to shared memory: (descriptor, coordinates, barrier, destination)."""

async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""Start a TMA copy from shared memory: (descriptor, coordinates, source)."""

_memory = gl.shared_memory_descriptor
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret
"""View shared memory as another type, shape and layout: (memory, type, shape, layout)."""

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Synchronise the threads of this warp partition."""


@dataclass_transform()
def aggregate(cls: type) -> Any:
    """Make a class of annotated fields a structure of values that jitted functions pass by name.

    This is Triton's decorator with the constructor of release 3.9: one argument a field, by
    position or keyword. A field annotated `gl.tensor` also accepts a constant. Structures are
    immutable: build a new one, and assign it to a name that loops may carry.
    """
    fields = get_type_hints(cls)

    def construct(self: Any, *args: Any, _semantic: Any = None, **kwargs: Any) -> None:
        given = dict(zip(fields, args, strict=False)) | kwargs
        if given.keys() != fields.keys() or len(args) + len(kwargs) != len(fields):
            raise TypeError(f"{cls.__name__} has the fields {list(fields)}, got {list(given)}")
        for name, kind in fields.items():
            value = given[name]
            if not isinstance(value, base_value):
                value = gl.constexpr(value)
            if kind is gl.tensor:
                value = _semantic.to_tensor(value)
            setattr(self, name, value)

    construct.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__annotations__ = fields  # releases before 3.9 do not resolve annotations given as text
    cls.__init__ = construct
    return _aggregate(cls)
