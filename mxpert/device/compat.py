"""Parts of Triton that differ between the supported releases (3.6 to 3.9).

They have their newest names and abilities here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, dataclass_transform, get_type_hints

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate, _unwrap_if_constexpr, base_value

from ..core.toolchain import copies_register_operands

if TYPE_CHECKING:
    from triton.experimental.gluon.language._semantic import GluonSemantic


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

COPIES_REGISTER_OPERANDS = gl.constexpr(copies_register_operands())
"""Whether two wgmma products of one operand in registers need twice its registers."""

FOLDS_TRANSPOSING_READS = gl.constexpr(hasattr(gl, "barrier"))
"""Whether transposing reads of a tile in LDS share addresses (AMD): release 3.6 keeps a register
for the address of each read; later ones copy bytes where a tile is joined from parts instead."""


def buffer_load(
    ptr: gl.tensor,
    offsets: gl.tensor,
    mask: gl.tensor | None = None,
    cache: str | gl.constexpr | None = None,
    _semantic: GluonSemantic = None,
) -> gl.tensor:
    """Load from a scalar base address (AMD); masked elements are 0.

    Release 3.6 does not take a cache modifier that is a constexpr.
    """
    cache = _unwrap_if_constexpr(cache)
    return gl.amd.cdna4.buffer_load(ptr, offsets, mask, cache=cache, _semantic=_semantic)


def batched_mfma_scaled(
    a: gl.tensor,
    a_scale: gl.tensor,
    a_format: str | gl.constexpr,
    b: gl.tensor,
    b_scale: gl.tensor,
    b_format: str | gl.constexpr,
    acc: gl.tensor,
    _semantic: GluonSemantic = None,
) -> gl.tensor:
    """``acc + (a * a_scale) @ (b * b_scale)`` for each matrix of a batch, by scaled MFMA (AMD).

    Release 3.6 compiles it too, but its `mfma_scaled` does not take scales of three dimensions.
    """
    formats = [_unwrap_if_constexpr(each) for each in (a_format, b_format)]
    kinds = [_semantic._str_to_fp_type(each) for each in formats]
    a, b = (_semantic._bitcast_to_fp_type(*each) for each in zip((a, b), formats, strict=True))
    handle = _semantic.builder.create_dot_scaled(
        a.handle,
        a_scale.handle,
        kinds[0],
        b.handle,
        b_scale.handle,
        kinds[1],
        False,
        True,
        True,
        acc.handle,
    )
    return gl.tensor(handle, acc.type)


buffer_load.__triton_builtin__ = True  # type: ignore[attr-defined]
batched_mfma_scaled.__triton_builtin__ = True  # type: ignore[attr-defined]


@dataclass_transform()
def aggregate(cls: type) -> type:
    """Make a class of annotated fields a structure of values that jitted functions pass by name.

    This is Triton's decorator with the constructor of release 3.9: one argument a field, by
    position or keyword. A field annotated `gl.tensor` also accepts a constant. Structures are
    immutable: build a new one, and assign it to a name that loops may carry.
    """
    fields = get_type_hints(cls)

    def construct(
        self: object, *args: object, _semantic: GluonSemantic = None, **kwargs: object
    ) -> None:
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
    decorated: type = _aggregate(cls)
    return decorated
