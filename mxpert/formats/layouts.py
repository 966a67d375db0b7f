"""Prepared layouts of weights: what a backend states of the storage order of its weights.

The layout of a backend holds the permutation, its inverse and the constants that its kernels read,
in one place. Weights are stored in units of 64 rows × 128 codes, [E, rows / 64, K / 128, unit].
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch

from ..errors import message, require
from .folding import FoldCertificate
from .gate_up import GateUpOrder
from .spec import MX_BLOCK_SIZE, MXFP4, MXFormat
from .tensor import Layout, MXTensor

UNIT_ROWS = 64
UNIT_CODES = 128
UNIT_CODE_BYTES = UNIT_ROWS * UNIT_CODES // 2
UNIT_SCALE_BYTES = UNIT_ROWS * UNIT_CODES // MX_BLOCK_SIZE
UNIT_BLOCKS = UNIT_CODES // MX_BLOCK_SIZE
"""MX blocks of a row in a unit."""


class WeightLayout(Layout):
    """A layout of weights [E, N, K] that the kernels of a backend read.

    Any: a tensor of weights, an MXTensor or a WeightTensor, as `formats` says.
    """

    gate_up_order: ClassVar[GateUpOrder]
    """Order of gate and up rows. A thread of the GEMM then owns both rows of its features."""
    holds: ClassVar[str] = "any MXFP4 weights"
    """Which weights it can hold, for errors."""
    formats: ClassVar[tuple[str, ...]] = (MXFP4.name,)
    """Names of the formats that it can hold."""
    with_fp8: ClassVar[WeightLayout | None] = None
    """The layout that keeps an e4m3 copy of the weights beside this one's codes, if any does."""

    def fits(self, certificate: FoldCertificate) -> bool:
        """Return whether the layout is exact for these weights."""
        return True

    def can_hold(self, t: Any) -> bool:
        """Whether the layout is exact for weights of `formats` that have no certificate."""
        return True

    @abstractmethod
    def check(self, t: Any, op: str) -> None:
        """Raise an error unless the stored tensors fit the logical shape of a packed tensor."""

    @abstractmethod
    def pack(
        self,
        t: Any,
        certificate: FoldCertificate | None = None,
        rows: torch.Tensor | None = None,
        *,
        out: Any | None = None,
    ) -> Any:
        """Bring weights [E, N, K] into this layout; `unpack` inverts it.

        Args:
            t: of one of `formats`, ROW_MAJOR, axis -1.
            certificate: the fold certificate of `t`; None computes it where it is needed.
            rows: int64 [N], the order in which rows are stored; None keeps theirs.
            out: a packed tensor of the same sizes that takes the result; None allocates.

        Raises:
            ValueError: weights that do not fit, or another format, axis or layout. `out` is then as
                it was.
        """

    @abstractmethod
    def unpack(self, t: Any, rows: torch.Tensor | None = None) -> Any:
        """Return the ROW_MAJOR tensor that ``pack(…, rows=rows)`` packed, bit for bit."""

    def require_own(self, t: Any, op: str) -> None:
        """Raise a ValueError unless `t` is in this layout."""
        if t.layout is not self:
            raise ValueError(message(op, "t.layout", self, t.layout))


def require_plain(t: MXTensor, op: str, format: MXFormat = MXFP4) -> None:
    """Raise a ValueError unless `t` is ROW_MAJOR in `format`, quantised along its last axis."""
    for name, value, need in (
        ("layout", t.layout, Layout.ROW_MAJOR),
        ("format", t.format, format),
        ("axis", t.axis, -1),
    ):
        require(value == need, op, f"t.{name}", need=need, got=value)


def units(shape: tuple[int, ...], op: str, name: str) -> tuple[int, int, int]:
    """Experts, units of 64 rows and units of 128 codes of weights [E, N, K]."""
    require(len(shape) == 3, op, name, need="[E, N, K]", got=list(shape))
    return shape[0], -(-shape[1] // UNIT_ROWS), -(-shape[2] // UNIT_CODES)


def pad(values: torch.Tensor, rows: int, columns: int, value: int = 0) -> torch.Tensor:
    """Pad the last two dimensions to multiples of `rows` and `columns`."""
    *_, height, width = values.shape
    return torch.nn.functional.pad(values, (0, -width % columns, 0, -height % rows), value=value)
