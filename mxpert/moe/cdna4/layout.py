"""CDNA4_FRAGMENT: MXFP4 or MXFP8 weights in the order in which a wave reads its matrix fragments.

It serves the MFMA of gfx950 with the weights as operand A. A unit is 64 rows × 128 codes, 4096
bytes of codes (MXFP8: 8192) and 256 bytes of E8M0 scales, stored [E, rows / 64, K / 128, unit].
A 16x16x128 fragment is 16 rows × 128 codes: lane 16 b + r of a wave holds the MX block b of row r,
of MXFP8 codes the chunks of 16 bytes b and b + 4. Inside a unit (t fragment of 16 rows, b MX block
of 32 codes, r row of a fragment, c chunk):

    codes   [t][b][r][16 bytes], MXFP8 [t][c][r][16 bytes]: a lane's 16-byte loads are its fragments
    scales  [b][r][t] bytes: a lane's 4-byte load has its scales of all four fragments
"""

from __future__ import annotations

import torch

from ...errors import require_tensor
from ...formats.folding import FoldCertificate
from ...formats.gate_up import GateUpOrder
from ...formats.layouts import (
    UNIT_BLOCKS,
    UNIT_CODES,
    UNIT_ROWS,
    UNIT_SCALE_BYTES,
    WeightLayout,
    pad,
    require_plain,
    units,
)
from ...formats.spec import E8M0_BIAS, MX_BLOCK_SIZE, MXFP4, MXFP8_E4M3, MXFormat
from ...formats.tensor import MXTensor

FRAGMENT_ROWS = 16
"""Rows of a fragment of the 16-row MFMA."""
_TILES = UNIT_ROWS // FRAGMENT_ROWS
_BLOCKS = UNIT_BLOCKS


class _Cdna4Fragment(WeightLayout):
    """See the module; scales are the published ones, permuted."""

    name, value = "CDNA4_FRAGMENT", "cdna4_fragment"
    gate_up_order = GateUpOrder.INTERLEAVED_16  # the same place of adjacent fragments
    formats = (MXFP4.name, MXFP8_E4M3.name)
    holds = "any MXFP4 or MXFP8 weights"

    def check(self, t: MXTensor, op: str) -> None:
        for name, tensor, size in (
            ("qdata", t.qdata, UNIT_ROWS * _row_bytes(t.format)),
            ("scale", t.scale, UNIT_SCALE_BYTES),
        ):
            shape = (*units(t.shape, op, "t.shape"), size)
            require_tensor(tensor, op, name, dtype=torch.uint8, shape=shape, device=t.device)

    def pack(
        self,
        t: MXTensor,
        certificate: FoldCertificate | None = None,
        rows: torch.Tensor | None = None,
        *,
        out: MXTensor | None = None,
    ) -> MXTensor:
        """See `WeightLayout.pack`; N is padded to 64 rows and K to 128 codes, zeros of scale 1.

        Returns:
            MXTensor with qdata uint8 [E, N/64, K/128, 4096 or 8192], scale uint8 [E, N/64, K/128,
            256], and the logical shape of `t`.
        """
        op = "pack_cdna4"
        require_plain(t, op, MXFP8_E4M3 if t.format == MXFP8_E4M3 else MXFP4)
        found = units(t.shape, op, "t.shape")
        if out is None:
            codes = t.qdata.new_empty((*found, UNIT_ROWS * _row_bytes(t.format)))
            scale, shape = t.scale.new_empty((*found, UNIT_SCALE_BYTES)), tuple(t.shape)
            out = MXTensor(codes, scale, t.format, -1, self, logical_shape=shape)
        order = slice(None) if rows is None else rows
        for expert in range(found[0]):  # one at a time: copies stay small beside the weights
            out.qdata[expert] = _pack_fragments(t.qdata[expert][order], _row_bytes(t.format))
            out.scale[expert] = _pack_scales(t.scale[expert][order])
        return out

    def unpack(self, t: MXTensor, rows: torch.Tensor | None = None) -> MXTensor:
        self.require_own(t, "unpack_cdna4")
        experts, num_rows, depth = t.shape
        width = depth // t.format.codes_per_byte
        qdata = t.qdata.new_empty((experts, num_rows, width))
        scale = t.scale.new_empty((experts, num_rows, depth // MX_BLOCK_SIZE))
        order = slice(None) if rows is None else rows
        for expert in range(experts):
            qdata[expert, order] = _unpack_fragments(t.qdata[expert])[:num_rows, :width]
            blocks = _unpack_scales(t.scale[expert])
            scale[expert, order] = blocks[:num_rows, : depth // MX_BLOCK_SIZE]
        return MXTensor(qdata, scale, t.format)


CDNA4_FRAGMENT = _Cdna4Fragment()


def _row_bytes(format: MXFormat) -> int:
    """Bytes of codes of a row in a unit."""
    return UNIT_CODES // format.codes_per_byte


def _pack_fragments(qdata: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """uint8 codes [N, bytes of K] → uint8 [N/64, K/128, 64 * row_bytes]."""
    padded = pad(qdata, UNIT_ROWS, row_bytes)
    depth, chunks = padded.shape[1] // row_bytes, row_bytes // 16
    split = padded.view(-1, _TILES, FRAGMENT_ROWS, depth, chunks, 16)
    return split.permute(0, 3, 1, 4, 2, 5).flatten(2)


def _unpack_fragments(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `_pack_fragments`, with its padding."""
    chunks = packed.shape[2] // (UNIT_ROWS * 16)
    split = packed.view(*packed.shape[:2], _TILES, chunks, FRAGMENT_ROWS, 16)
    return split.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2)


def _pack_scales(scale: torch.Tensor) -> torch.Tensor:
    """uint8 scales [N, K/32] → uint8 [N/64, K/128, 256]."""
    padded = pad(scale, UNIT_ROWS, _BLOCKS, value=E8M0_BIAS)
    split = padded.view(-1, _TILES, FRAGMENT_ROWS, padded.shape[1] // _BLOCKS, _BLOCKS)
    return split.permute(0, 3, 4, 2, 1).flatten(2)


def _unpack_scales(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `_pack_scales`, with its padding."""
    split = packed.view(*packed.shape[:2], _BLOCKS, FRAGMENT_ROWS, _TILES)
    return split.permute(0, 4, 3, 1, 2).flatten(3).flatten(0, 2)
