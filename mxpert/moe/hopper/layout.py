"""HOPPER_FRAGMENT: MXFP4 weights in the order in which a warpgroup reads its matrix fragments.

It serves wgmma with the weights as register operand A. A unit is 64 rows × 128 codes,
4096 bytes of codes and 256 bytes of scale shifts, stored [E, rows / 64, K / 128, unit]. Inside it
(w warp, g and t lane // 4 and lane % 4, r row of a fragment's pair, q h j place in a 32-block):

    codes   [r][w][g][t][q] 32-bit words: a thread's 16-byte shared loads are its own fragments
    shifts  [w][g][t][r] bytes: reference[row] - scale, 0..14 below the row's reference exponent

Fragment rows g and g + 8 of a warp hold weight rows 2g and 2g + 1, so that a thread owns adjacent
outputs. K is permuted inside each 128 so that the 32 codes that a thread owns of one row share one
MX block; activations are stored with the same permutation (`encode.store_step`). A word holds 8
codes: the magnitudes as eight 3-bit byte selectors, the signs where one shift brings them to the
byte's top bit.

HOPPER_FRAGMENT_FP8 keeps an e4m3 copy of the weights beside them: each unit once more, as 64 × 128
bytes. They are the values that the kernels decode, times the row's reference; rows and depth have
the order of wgmma's operand A (w r g and q h t j), so that shared memory holds it as it is stored.
"""

from __future__ import annotations

import functools

import torch

from ...errors import require, require_tensor
from ...formats.codec import decode, encode, exact_power_of_two, pack_codes
from ...formats.folding import FOLD_SPAN, FOLD_TOP, FoldCertificate, fold_certificate
from ...formats.gate_up import GateUpOrder
from ...formats.layouts import (
    UNIT_BLOCKS,
    UNIT_CODE_BYTES,
    UNIT_CODES,
    UNIT_ROWS,
    UNIT_SCALE_BYTES,
    WeightLayout,
    pad,
    units,
)
from ...formats.spec import E2M1, E4M3, E8M0_BIAS, MX_BLOCK_SIZE
from ...formats.tensor import MXTensor

_WARPS, _LANE_ROWS, _PAIR, _BLOCKS, _WORDS, _HALVES, _BYTES = 4, 8, 2, UNIT_BLOCKS, 4, 2, 4

UNIT_FP8_BYTES = UNIT_ROWS * UNIT_CODES


class _HopperFragment(WeightLayout):
    """See the module; a row of weights has one reference exponent, and each block a shift."""

    name, value = "HOPPER_FRAGMENT", "hopper_fragment"
    is_folded = True
    gate_up_order = GateUpOrder.INTERLEAVED  # adjacent accumulators
    holds = "rows within 15 binades and above 2^-121"

    def fits(self, certificate: FoldCertificate) -> bool:
        """Whether every block folds and every row factor 2^(reference - 133) is normal."""
        return certificate.exact and bool((certificate.reference > FOLD_TOP).all())

    def check(self, t: MXTensor, op: str) -> None:
        experts, row_units, depth_units = units(t.logical_shape or (), op, "logical_shape")
        for name, tensor, shape in (
            ("qdata", t.qdata, (experts, row_units, depth_units, UNIT_CODE_BYTES)),
            ("scale", t.scale, (experts, row_units, depth_units, UNIT_SCALE_BYTES)),
            ("reference", t.reference, (experts, row_units * UNIT_ROWS)),
        ):
            require_tensor(tensor, op, name, dtype=torch.uint8, shape=shape, device=t.device)

    def pack(
        self,
        t: MXTensor,
        certificate: FoldCertificate | None = None,
        rows: torch.Tensor | None = None,
        *,
        out: MXTensor | None = None,
    ) -> MXTensor:
        """See `WeightLayout.pack`; N is padded to 64 rows and K to 128 codes, with zeros.

        Returns:
            MXTensor with qdata uint8 [E, N/64, K/128, 4096], scale uint8 [E, N/64, K/128, 256]
            (shifts), reference uint8 [E, N padded], and the logical shape of `t`.
        """
        certificate = fold_certificate(t) if certificate is None else certificate
        require(
            self.fits(certificate),
            "pack_hopper",
            "t",
            need="every block within 15 binades of its row, rows above 2^-121",
            got=f"{certificate.total_outside} of {certificate.num_blocks} blocks outside",
            remedy="keep Layout.ROW_MAJOR",
        )
        num_rows = t.shape[1]
        if out is None:
            out = self._empty(t)
        assert out.reference is not None  # for the type checker
        order = slice(None) if rows is None else rows
        out.reference[:, :num_rows] = certificate.reference[:, order]
        out.reference[:, num_rows:] = E8M0_BIAS
        if t.device.type == "cuda":
            from .pack import pack_units  # Triton: where a GPU is

            pack_units(t, rows, out)
            return out
        tables = _sign_tables(t.device)
        for expert in range(t.shape[0]):  # temporaries stay small beside the weights
            part = slice(expert, expert + 1)
            codes = pad(t.qdata[part][:, order], UNIT_ROWS, UNIT_CODES // 2)
            shifts = out.reference[part, :num_rows].unsqueeze(-1) - t.scale[part][:, order]
            out.qdata[part] = _pack_codes(codes, tables)
            out.scale[part] = _pack_shifts(pad(shifts, UNIT_ROWS, UNIT_BLOCKS))  # modulo 256
        return out

    def _empty(self, t: MXTensor) -> MXTensor:
        """A packed tensor for [E, N, K] without values."""
        found = units(t.shape, "pack_hopper", "t.shape")
        sizes = UNIT_CODE_BYTES, UNIT_SCALE_BYTES, UNIT_FP8_BYTES if self.has_fp8_codes else 0
        codes, shifts, fp8 = (t.qdata.new_empty((*found, n)) for n in sizes)
        reference = t.qdata.new_empty((found[0], found[1] * UNIT_ROWS))
        own = fp8 if self.has_fp8_codes else None
        shape = tuple(t.shape)
        return MXTensor(codes, shifts, t.format, -1, self, reference, shape, fp8_codes=own)

    def unpack(self, t: MXTensor, rows: torch.Tensor | None = None) -> MXTensor:
        self.require_own(t, "unpack_hopper")
        assert t.reference is not None  # checked by MXTensor
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


class _HopperFragmentFp8(_HopperFragment):
    """HOPPER_FRAGMENT, and an e4m3 copy of the weights; see the module."""

    name, value = "HOPPER_FRAGMENT_FP8", "hopper_fragment_fp8"
    has_fp8_codes = True

    def check(self, t: MXTensor, op: str) -> None:
        super().check(t, op)
        shape = (*t.qdata.shape[:3], UNIT_FP8_BYTES)
        require_tensor(
            t.fp8_codes,
            op,
            "fp8_codes",
            dtype=torch.uint8,
            shape=shape,
            device=t.device,
            contiguous=True,
        )

    def pack(
        self,
        t: MXTensor,
        certificate: FoldCertificate | None = None,
        rows: torch.Tensor | None = None,
        *,
        out: MXTensor | None = None,
    ) -> MXTensor:
        """As `HOPPER_FRAGMENT.pack`, with fp8_codes uint8 [E, N/64, K/128, 8192]."""
        packed = super().pack(t, certificate, rows, out=out)
        assert packed.fp8_codes is not None  # for the type checker
        decode_units(packed, packed.fp8_codes)
        return packed


HOPPER_FRAGMENT = _HopperFragment()
HOPPER_FRAGMENT_FP8 = _HopperFragmentFp8()
_HopperFragment.with_fp8 = HOPPER_FRAGMENT_FP8


def decode_units(packed: MXTensor, out: torch.Tensor) -> None:
    """Write the e4m3 values of packed weights to `out`, uint8 [E, N/64, K/128, 8192]."""
    if packed.device.type == "cuda":
        from .pack import decode_units as decode_on_gpu  # Triton: where a GPU is

        decode_on_gpu(packed, out)
        return
    table = _fp8_table(packed.device)
    for expert in range(packed.shape[0]):  # temporaries stay small beside the weights
        codes = _unpack_codes(packed.qdata[expert]).long()
        shifts = _unpack_shifts(packed.scale[expert]).long().repeat_interleave(MX_BLOCK_SIZE, 1)
        out[expert] = _fp8_units(table[shifts * 16 + codes])


@functools.lru_cache
def _fp8_table(device: torch.device) -> torch.Tensor:
    """e4m3 bytes of e2m1 codes times 2^(6 - shift), uint8 [256 * 16], first by shift.

    Blocks of zeros may have any shift; others have none of FOLD_SPAN or more.
    """
    codes = torch.arange(16, dtype=torch.uint8)
    factors = exact_power_of_two(
        FOLD_TOP - torch.arange(256).clamp(max=FOLD_SPAN - 1), torch.float32
    )
    values = encode(decode(codes, E2M1) * factors.unsqueeze(-1), E4M3)
    return values.flatten().to(device)


def _fp8_units(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 bytes [N, K] → [N/64, K/128, 8192]."""
    row_units, depth_units = codes.shape[0] // UNIT_ROWS, codes.shape[1] // UNIT_CODES
    split = codes.view(
        row_units, _WARPS, _LANE_ROWS, _PAIR, depth_units, _BLOCKS, _WORDS, _HALVES, _BYTES
    )  # n w g r u t q h j
    units = split.permute(0, 4, 1, 3, 2, 6, 7, 5, 8)  # n u w r g q h t j
    return units.reshape(row_units, depth_units, UNIT_FP8_BYTES)


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
    return split.permute(0, 1, 5, 2, 3, 6, 4).reshape(*units, UNIT_SCALE_BYTES)


def _unpack_shifts(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `_pack_shifts`."""
    row_units, depth_units = packed.shape[:2]
    split = packed.view(row_units, depth_units, _WARPS, _LANE_ROWS, _BLOCKS, _PAIR)
    return split.permute(0, 2, 3, 5, 1, 4).reshape(row_units * UNIT_ROWS, depth_units * _BLOCKS)
