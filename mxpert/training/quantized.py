"""Operands of training GEMMs that were quantised before the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..core.geometry import rebuilder
from ..core.schema import rebuild_mx
from ..formats.spec import ScaleSpan
from ..formats.tensor import MXTensor, Operand

Quantized = MXTensor | tuple[MXTensor, MXTensor]
"""An MXFP8 MXTensor of axis -1, or both copies of `quantize_dual`."""
Copies = tuple[MXTensor, MXTensor | None]
"""The row-wise copy, and the column-wise one where it was given."""


@dataclass(frozen=True)
class Given:
    """Operands that are taken as they are; None where the call quantises."""

    x: Copies | None = None
    weight: Copies | None = None

    @staticmethod
    def geometry(dense: torch.Tensor | Quantized | None, copies: Copies | None) -> Operand:
        """What has the sizes and the device of an operand: its first copy, or the tensor."""
        return cast("Operand", dense if copies is None else copies[0])


NONE_GIVEN = Given()


def copies_of(value: object) -> Copies | None:
    """The copies of a quantised operand; None for anything else."""
    if isinstance(value, MXTensor):
        return value, None
    if isinstance(value, tuple) and [isinstance(each, MXTensor) for each in value] == [True] * 2:
        return value
    return None


CopyParts = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Codes, scales and count of wide blocks of a copy; or a plain tensor; or nothing."""
CopyKind = tuple[str, ScaleSpan] | Callable[[Sequence[torch.Tensor]], Any] | None  # an MXTensor
"""Format and span of a copy, or a function that makes it; None for a plain tensor."""


def parts_of_copy(copy: Operand | None) -> CopyParts:
    """The tensors that backward keeps of an operand."""
    if isinstance(copy, MXTensor):
        return copy.qdata, copy.scale, copy.wide_blocks
    return copy, None, None


def kind_of_copy(copy: Operand | None) -> CopyKind:
    """What backward keeps of an operand beside its tensors."""
    if not isinstance(copy, MXTensor):
        return None
    rebuild = None if torch.compiler.is_compiling() else rebuilder(copy)
    return (copy.format.name, copy.scale_span) if rebuild is None else rebuild


def copy_from(parts: Sequence[Any], kind: CopyKind) -> MXTensor:
    """The copy that `parts_of_copy` and `kind_of_copy` describe."""
    assert kind is not None  # for the type checker
    if isinstance(kind, tuple):
        return rebuild_mx(parts[0], parts[1], kind[0], span=kind[1], wide=parts[2])
    copy: MXTensor = kind(parts)
    return copy
