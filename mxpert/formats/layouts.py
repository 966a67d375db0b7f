"""Prepared layouts of MXFP4 weights: the permutation, its inverse, and the constants kernels read.

HOPPER_FRAGMENT serves wgmma with the weights as register operand A. A unit is 64 rows × 128 codes,
4096 bytes of codes and 256 bytes of scale shifts, stored [E, rows / 64, K / 128, unit]. Inside it
(w warp, g and t lane // 4 and lane % 4, r row of a fragment's pair, q h j place in a 32-block):

    codes   [r][w][g][t][q] 32-bit words: a thread's 16-byte shared loads are its own fragments
    shifts  [w][g][t][r] bytes: reference[row] - scale, 0..14 below the row's reference exponent

Fragment rows g and g + 8 of a warp hold weight rows 2g and 2g + 1, so that a thread owns adjacent
outputs. K is permuted inside each 128 so that the 32 codes that a thread owns of one row share one
MX block; activations are stored with the same permutation (`permute_activations`). A word holds 8
codes: the magnitudes as eight 3-bit byte selectors, the signs where one shift brings them to the
byte's top bit.

CDNA4_FRAGMENT serves the MFMA of gfx950 with the weights as operand A. A unit is 64 rows × 128
codes too, 4096 bytes of codes and 256 bytes of E8M0 scales, stored [E, rows / 64, K / 128, unit].
A 16x16x128 fragment is 16 rows × 128 codes: lane 16 b + r of a wave holds the MX block b of row r.
Inside a unit (t fragment of 16 rows, b MX block of 32 codes, r row of a fragment):

    codes   [t][b][r][16 bytes]: a lane's 16-byte loads are its own fragments
    scales  [b][r][t] bytes: a lane's 4-byte load has its scales of all four fragments
"""

from __future__ import annotations

import functools

import torch

from ..errors import message, require, require_tensor
from .codec import pack_codes
from .folding import FOLD_TOP, FoldCertificate, fold_certificate
from .spec import E8M0_BIAS, MX_BLOCK_SIZE, MXFP4
from .tensor import Layout, MXTensor

UNIT_ROWS = 64
UNIT_CODES = 128
UNIT_CODE_BYTES = UNIT_ROWS * UNIT_CODES // 2
UNIT_SHIFT_BYTES = UNIT_ROWS * UNIT_CODES // MX_BLOCK_SIZE
UNIT_SCALE_BYTES = UNIT_SHIFT_BYTES
FRAGMENT_ROWS = 16
"""Rows of a fragment of gfx950's 16-row MFMA."""
_TILES = UNIT_ROWS // FRAGMENT_ROWS

_GPU_CODES = 1 << 27
"""Codes that are packed together on a GPU; temporaries take 4 bytes of each."""

_WARPS, _LANE_ROWS, _PAIR, _BLOCKS, _WORDS, _HALVES, _BYTES = 4, 8, 2, 4, 4, 2, 4


def hopper_can_hold(certificate: FoldCertificate) -> bool:
    """Return whether HOPPER_FRAGMENT is exact for these weights.

    It is where every block folds and every row factor 2^(reference - 133) is a normal float32.
    """
    return certificate.exact and bool((certificate.reference > FOLD_TOP).all())


def check_hopper(t: MXTensor, op: str) -> None:
    """Check that codes, shifts and references of a HOPPER_FRAGMENT tensor fit its logical shape."""
    require(
        t.logical_shape is not None and len(t.logical_shape) == 3,
        op,
        "logical_shape",
        need="[E, N, K]",
        got=t.logical_shape,
    )
    experts, num_rows, depth = t.shape
    units = (experts, -(-num_rows // UNIT_ROWS), -(-depth // UNIT_CODES))
    for name, tensor, shape in (
        ("qdata", t.qdata, (*units, UNIT_CODE_BYTES)),
        ("scale", t.scale, (*units, UNIT_SHIFT_BYTES)),
        ("reference", t.reference, (experts, units[1] * UNIT_ROWS)),
    ):
        require_tensor(tensor, op, name, dtype=torch.uint8, shape=shape, device=t.device)


def pack_hopper(
    t: MXTensor,
    certificate: FoldCertificate | None = None,
    rows: torch.Tensor | None = None,
    *,
    out: MXTensor | None = None,
) -> MXTensor:
    """Bring MXFP4 weights [E, N, K] into the HOPPER_FRAGMENT layout; `unpack_hopper` inverts it.

    Args:
        t: MXFP4, ROW_MAJOR, axis -1. N is padded to 64 rows and K to 128 codes, with zeros.
        certificate: the fold certificate of `t`; None computes it.
        rows: int64 [N], the order in which rows are stored; None keeps theirs.
        out: a packed tensor of the same sizes that takes the result; None allocates.

    Returns:
        MXTensor with qdata uint8 [E, N/64, K/128, 4096], scale uint8 [E, N/64, K/128, 256]
        (shifts), reference uint8 [E, N padded], and the logical shape of `t`.

    Raises:
        ValueError: a block lies outside its row's 15 binades, or another format, axis or layout.
            `out` is then as it was.
    """
    certificate = fold_certificate(t) if certificate is None else certificate
    require(
        hopper_can_hold(certificate),
        "pack_hopper",
        "t",
        need="every block within 15 binades of its row, rows above 2^-121",
        got=f"{certificate.total_outside} of {certificate.num_blocks} blocks outside",
        remedy="keep Layout.ROW_MAJOR",
    )
    num_rows = t.shape[1]
    if out is None:
        out = _empty_hopper(t)
    assert out.reference is not None  # for the type checker
    tables = _sign_tables(t.device)
    order = slice(None) if rows is None else rows
    for part in _expert_parts(t):  # a few at a time: temporaries stay small beside the weights
        reference = certificate.reference[part][:, order]
        shifts = reference.unsqueeze(-1) - t.scale[part][:, order]  # modulo 256
        out.reference[part, :num_rows] = reference
        out.reference[part, num_rows:] = E8M0_BIAS
        out.qdata[part] = _pack_codes(
            _pad(t.qdata[part][:, order], UNIT_ROWS, UNIT_CODES // 2), tables
        )
        out.scale[part] = _pack_shifts(_pad(shifts, UNIT_ROWS, UNIT_CODES // MX_BLOCK_SIZE))
    return out


def _empty_hopper(t: MXTensor) -> MXTensor:
    """A packed tensor for [E, N, K] without values."""
    experts, num_rows, depth = t.shape
    units = experts, -(-num_rows // UNIT_ROWS), -(-depth // UNIT_CODES)
    return MXTensor(
        t.qdata.new_empty((*units, UNIT_CODE_BYTES)),
        t.qdata.new_empty((*units, UNIT_SHIFT_BYTES)),
        t.format,
        -1,
        Layout.HOPPER_FRAGMENT,
        t.qdata.new_empty((experts, units[1] * UNIT_ROWS)),
        (experts, num_rows, depth),
    )


def _expert_parts(t: MXTensor) -> list[slice]:
    """Slices of experts that are packed together: one on a CPU, launches of some size on a GPU."""
    experts, num_rows, depth = t.shape
    step = 1 if t.device.type == "cpu" else max(1, _GPU_CODES // max(1, num_rows * depth))
    return [slice(first, min(first + step, experts)) for first in range(0, experts, step)]


def unpack_hopper(t: MXTensor, rows: torch.Tensor | None = None) -> MXTensor:
    """Return the ROW_MAJOR tensor that `pack_hopper(…, rows=rows)` packed, bit for bit."""
    if t.layout is not Layout.HOPPER_FRAGMENT or t.reference is None:
        raise ValueError(message("unpack_hopper", "t.layout", Layout.HOPPER_FRAGMENT, t.layout))
    experts, num_rows, depth = t.shape
    qdata = torch.empty(experts, num_rows, depth // 2, dtype=torch.uint8, device=t.device)
    scale = torch.empty(
        experts, num_rows, depth // MX_BLOCK_SIZE, dtype=torch.uint8, device=t.device
    )
    order = slice(None) if rows is None else rows
    for expert in range(experts):
        codes = _unpack_codes(t.qdata[expert])[:num_rows, :depth]
        shifts = _unpack_shifts(t.scale[expert])[:num_rows, : depth // MX_BLOCK_SIZE]
        qdata[expert, order] = pack_codes(codes)
        scale[expert, order] = t.reference[expert, :num_rows].unsqueeze(-1) - shifts
    return MXTensor(qdata, scale, t.format)


def check_cdna4(t: MXTensor, op: str) -> None:
    """Check that codes and scales of a CDNA4_FRAGMENT tensor fit its logical shape."""
    for name, tensor, size in (
        ("qdata", t.qdata, UNIT_CODE_BYTES),
        ("scale", t.scale, UNIT_SCALE_BYTES),
    ):
        shape = (*_units(t, op), size)
        require_tensor(tensor, op, name, dtype=torch.uint8, shape=shape, device=t.device)


def pack_cdna4(
    t: MXTensor, rows: torch.Tensor | None = None, *, out: MXTensor | None = None
) -> MXTensor:
    """Bring MXFP4 weights [E, N, K] into the CDNA4_FRAGMENT layout; `unpack_cdna4` inverts it.

    Args:
        t: MXFP4, ROW_MAJOR, axis -1. N is padded to 64 rows and K to 128 codes, with zeros of
            scale 1.
        rows: int64 [N], the order in which rows are stored; None keeps theirs.
        out: a packed tensor of the same sizes that takes the result; None allocates.

    Returns:
        MXTensor with qdata uint8 [E, N/64, K/128, 4096], scale uint8 [E, N/64, K/128, 256], and the
        logical shape of `t`.

    Raises:
        ValueError: another format, axis or layout.
    """
    op = "pack_cdna4"
    for name, value, need in (
        ("layout", t.layout, Layout.ROW_MAJOR),
        ("format", t.format, MXFP4),
        ("axis", t.axis, -1),
    ):
        require(value == need, op, f"t.{name}", need=need, got=value)
    units = _units(t, op)
    if out is None:
        codes = t.qdata.new_empty((*units, UNIT_CODE_BYTES))
        scale, shape = t.scale.new_empty((*units, UNIT_SCALE_BYTES)), tuple(t.shape)
        out = MXTensor(codes, scale, t.format, -1, Layout.CDNA4_FRAGMENT, logical_shape=shape)
    order = slice(None) if rows is None else rows
    for expert in range(units[0]):  # one at a time: copies stay small beside the weights
        out.qdata[expert] = _pack_fragments(t.qdata[expert][order])
        out.scale[expert] = _pack_scales(t.scale[expert][order])
    return out


def unpack_cdna4(t: MXTensor, rows: torch.Tensor | None = None) -> MXTensor:
    """Return the ROW_MAJOR tensor that `pack_cdna4(…, rows=rows)` packed, bit for bit."""
    if t.layout is not Layout.CDNA4_FRAGMENT:
        raise ValueError(message("unpack_cdna4", "t.layout", Layout.CDNA4_FRAGMENT, t.layout))
    experts, num_rows, depth = t.shape
    qdata = t.qdata.new_empty((experts, num_rows, depth // 2))
    scale = t.scale.new_empty((experts, num_rows, depth // MX_BLOCK_SIZE))
    order = slice(None) if rows is None else rows
    for expert in range(experts):
        qdata[expert, order] = _unpack_fragments(t.qdata[expert])[:num_rows, : depth // 2]
        blocks = _unpack_scales(t.scale[expert])
        scale[expert, order] = blocks[:num_rows, : depth // MX_BLOCK_SIZE]
    return MXTensor(qdata, scale, t.format)


def _units(t: MXTensor, op: str) -> tuple[int, int, int]:
    """Experts, units of 64 rows and units of 128 codes of weights [E, N, K]."""
    need, got = "[E, N, K]", list(t.shape)
    require(len(got) == 3, op, "t.shape", need=need, got=got)
    return got[0], -(-got[1] // UNIT_ROWS), -(-got[2] // UNIT_CODES)


def _pack_fragments(qdata: torch.Tensor) -> torch.Tensor:
    """uint8 codes [N, K/2] → uint8 [N/64, K/128, 4096]."""
    padded = _pad(qdata, UNIT_ROWS, UNIT_CODES // 2)
    split = padded.view(-1, _TILES, FRAGMENT_ROWS, padded.shape[1] * 2 // UNIT_CODES, _BLOCKS, 16)
    return split.permute(0, 3, 1, 4, 2, 5).flatten(2)


def _unpack_fragments(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `_pack_fragments`, with its padding."""
    split = packed.view(*packed.shape[:2], _TILES, _BLOCKS, FRAGMENT_ROWS, 16)
    return split.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2)


def _pack_scales(scale: torch.Tensor) -> torch.Tensor:
    """uint8 scales [N, K/32] → uint8 [N/64, K/128, 256]."""
    padded = _pad(scale, UNIT_ROWS, _BLOCKS, value=E8M0_BIAS)
    split = padded.view(-1, _TILES, FRAGMENT_ROWS, padded.shape[1] // _BLOCKS, _BLOCKS)
    return split.permute(0, 3, 4, 2, 1).flatten(2)


def _unpack_scales(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `_pack_scales`, with its padding."""
    split = packed.view(*packed.shape[:2], _BLOCKS, FRAGMENT_ROWS, _TILES)
    return split.permute(0, 4, 3, 1, 2).flatten(3).flatten(0, 2)


def row_factor(reference: torch.Tensor) -> torch.Tensor:
    """float32 factor that an accumulator over folded codes carries: ``2^(reference - 127 - 6)``."""
    return torch.exp2(reference.to(torch.float32) - (E8M0_BIAS + FOLD_TOP))


def permute_activations(x: torch.Tensor) -> torch.Tensor:
    """Reorder the last dimension (a multiple of 128) as the weights' K is stored."""
    split = x.unflatten(-1, (-1, _BLOCKS, _WORDS, _HALVES, _BYTES))
    result: torch.Tensor = split.transpose(-4, -3).transpose(-3, -2).flatten(-5)
    return result


def _pad(values: torch.Tensor, rows: int, columns: int, value: int = 0) -> torch.Tensor:
    *_, height, width = values.shape
    return torch.nn.functional.pad(values, (0, -width % columns, 0, -height % rows), value=value)


@functools.lru_cache
def _sign_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Words, int32 [65536], of each low and each high half of 8 packed codes.

    The magnitudes stay. The sign of code j goes to bit 8j + 7, that of code 4 + j to bit 8j + 3:
    one shift brings either to the top bit of its byte.
    """
    half = torch.arange(1 << 16, dtype=torch.int64)
    low, high = half & 0x7777, (half & 0x7777) << 16
    for code in range(4):
        sign = half >> (4 * code + 3) & 1
        low, high = low | sign << (8 * code + 7), high | sign << (8 * code + 3)
    tables = (torch.where(word >= 1 << 31, word - (1 << 32), word) for word in (low, high))
    first, second = (table.to(device, torch.int32) for table in tables)
    return first, second


def _pack_codes(qdata: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """uint8 packed codes [E, N, K/2] → uint8 [E, N/64, K/128, 4096]; tables: of `_sign_tables`."""
    experts, num_rows, width = qdata.shape
    halves = qdata.contiguous().view(torch.uint16).view(-1, 2).to(torch.int32)
    low, high = (
        table.index_select(0, halves[:, place].contiguous()) for place, table in enumerate(tables)
    )
    words = low.bitwise_or_(high).view(
        experts,
        num_rows // UNIT_ROWS,
        _WARPS,
        _LANE_ROWS,
        _PAIR,
        width * 2 // UNIT_CODES,
        _BLOCKS * _WORDS,
    )  # e n w g r k tq
    packed = words.permute(0, 1, 5, 4, 2, 3, 6).contiguous().view(torch.uint8)
    return packed.view(experts, num_rows // UNIT_ROWS, width * 2 // UNIT_CODES, UNIT_CODE_BYTES)


def _unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `_pack_codes`."""
    row_units, depth_units = packed.shape[:2]
    words = packed.view(row_units, depth_units, _PAIR, _WARPS, _LANE_ROWS, _BLOCKS, _WORDS, _BYTES)
    words = words.permute(0, 3, 4, 2, 1, 5, 6, 7)  # n w g r k t q byte
    nibbles = torch.stack((words & 7, words >> 4 & 7), -1).flatten(-2)  # 8 magnitudes in order
    magnitude = nibbles.unflatten(-1, (_HALVES, _BYTES))
    sign = torch.stack((words >> 7 & 1, words >> 3 & 1), -2)
    result: torch.Tensor = (magnitude | sign << 3).reshape(
        row_units * UNIT_ROWS, depth_units * UNIT_CODES
    )
    return result


def _pack_shifts(shifts: torch.Tensor) -> torch.Tensor:
    """uint8 shifts [E, N, K/32] → uint8 [E, N/64, K/128, 256]."""
    experts, num_rows, blocks = shifts.shape
    units = experts, num_rows // UNIT_ROWS, blocks // _BLOCKS
    split = shifts.view(experts, units[1], _WARPS, _LANE_ROWS, _PAIR, units[2], _BLOCKS)
    return split.permute(0, 1, 5, 2, 3, 6, 4).reshape(*units, UNIT_SHIFT_BYTES)


def _unpack_shifts(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `_pack_shifts`."""
    row_units, depth_units = packed.shape[:2]
    split = packed.view(row_units, depth_units, _WARPS, _LANE_ROWS, _BLOCKS, _PAIR)
    return split.permute(0, 2, 3, 5, 1, 4).reshape(row_units * UNIT_ROWS, depth_units * _BLOCKS)
