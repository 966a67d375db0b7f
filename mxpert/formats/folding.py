"""Exact fold of MXFP4 weights into e4m3: the block scale moves into the code's exponent.

An e2m1 value times 2^s is exactly an e4m3 number for the 15 exponents s = -8..6. So a row's blocks
fold without rounding as long as their scales lie within 15 binades: each becomes e4m3 codes, and
one power of two per row multiplies the accumulator. FP8 tensor cores then read MXFP4 weights with
no multiplication per weight and no error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import Checks, require_int
from .codec import decode, encode, exact_power_of_two, unpack_codes
from .spec import E2M1, E4M3, E8M0_BIAS, E8M0_NAN, MXFP4
from .tensor import Aggregate, Layout, MXTensor

FOLD_TOP = 6
"""Largest s with every e2m1 * 2^s an e4m3 number: 6 * 2^6 = 384 <= 448."""

FOLD_SPAN = 15
"""Number of such exponents: from 6 down to -8, where 0.5 * 2^-8 = 2^-9 is e4m3's smallest."""

_ROWS_PER_CHUNK = {"cpu": 1 << 14, "cuda": 1 << 17}
"""Rows certified at once, to bound memory: histograms of 256 bins take 16 or 128 MiB."""


@dataclass(frozen=True, eq=False, repr=False)
class FoldCertificate(Aggregate):
    """Whether and how the scales of a weight tensor [..., N, K] fold exactly.

    Args:
        reference: uint8 [..., N], the row's reference scale byte r. A block with scale byte b folds
            when ``0 <= r - b <= 14``; the row's output then carries the factor ``2^(r - 127 - 6)``.
        rows_outside: bool [..., N], rows with at least one block that does not fold.
        blocks_outside: int64 [...], such blocks per leading index (expert).
        num_blocks: number of blocks in the tensor.
        widest_span: the largest spread of a row in binades, largest minus smallest scale byte of
            the blocks with a non-zero code; up to 14 folds.

    Example:
        >>> from mxpert import quantize
        >>> certificate = fold_certificate(quantize(torch.ones(1, 64), "mxfp4"))
        >>> certificate.exact, certificate.num_blocks, certificate.widest_span
        (True, 2, 0)
    """

    reference: torch.Tensor
    rows_outside: torch.Tensor
    blocks_outside: torch.Tensor
    num_blocks: int
    widest_span: int

    def __post_init__(self) -> None:
        need = Checks("FoldCertificate")
        need.tensor(self.reference, "reference", dtype=torch.uint8)
        need.tensor(
            self.rows_outside,
            "rows_outside",
            dtype=torch.bool,
            shape=tuple(self.reference.shape),
            device=self.reference.device,
        )
        need.tensor(
            self.blocks_outside,
            "blocks_outside",
            dtype=torch.int64,
            shape=tuple(self.reference.shape[:-1]),
            device=self.reference.device,
        )
        require_int(self.num_blocks, need.op, "num_blocks")
        require_int(self.widest_span, need.op, "widest_span")

    def __repr__(self) -> str:
        return (
            f"FoldCertificate(rows={self.reference.numel()}, blocks={self.num_blocks}, "
            f"widest_span={self.widest_span})"
        )

    @property
    def total_outside(self) -> int:
        """Blocks that do not fold, over all leading indices."""
        return int(self.blocks_outside.sum())

    @property
    def exact(self) -> bool:
        """Whether every block folds, so that `fold` loses nothing."""
        return self.total_outside == 0


def fold_certificate(t: MXTensor) -> FoldCertificate:
    """Choose each row's reference exponent and count the blocks outside its 15 binades.

    ``reference = argmax_r #{blocks b of the row: 0 <= r - scale[b] <= 14}``, hence the fewest
    blocks outside. Of several best references the largest that is a scale of the row is taken:
    where all blocks fold, that is the row's largest scale. Blocks with all codes zero fold under
    every reference and do not count; a row of such blocks has reference 127. A block with scale
    byte 255 (NaN) never folds, whatever its codes.

    Args:
        t: MXFP4 weights [..., N, K], quantised along K (axis -1), ROW_MAJOR.

    Returns:
        FoldCertificate; its tensors are on `t`'s device. Reads counts back to the host: call it
        once, at load time.

    Raises:
        TypeError: `t` is no MXTensor.
        ValueError: another format, axis or layout, or fewer than two dimensions.

    Example:
        >>> from mxpert.formats import quantize_blocks
        >>> weight = torch.ones(2, 64)
        >>> weight[1, 32:] = 2.0**-15
        >>> certificate = fold_certificate(quantize_blocks(weight, "mxfp4"))
        >>> certificate.exact, certificate.widest_span, certificate.rows_outside.tolist()
        (False, 15, [False, True])
    """
    _require_weights(t, "fold_certificate")
    count = _ROWS_PER_CHUNK.get(t.device.type, _ROWS_PER_CHUNK["cpu"])
    chunks = zip(
        t.qdata.flatten(0, -2).split(count), t.scale.flatten(0, -2).split(count), strict=True
    )
    parts = [_certify_rows(codes, scale.to(torch.int16)) for codes, scale in chunks]
    reference, outside, span = (
        torch.cat(part).view(t.scale.shape[:-1]) for part in zip(*parts, strict=True)
    )
    return FoldCertificate(
        reference=reference,
        rows_outside=outside > 0,
        blocks_outside=outside.sum(-1),
        num_blocks=t.scale.numel(),
        widest_span=int(span.max()) if span.numel() else 0,
    )


def fold(
    t: MXTensor, certificate: FoldCertificate | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold MXFP4 weights into e4m3 codes and one reference exponent per row, exactly.

    ``codes[n, k] = e4m3(e2m1[n, k] * 2^(6 - (reference[n] - scale[n, k // 32])))``; the weight is
    ``decode(codes) * 2^(reference - 127 - 6)``.

    Args:
        t: MXFP4 weights [..., N, K], axis -1, ROW_MAJOR.
        certificate: of the same weights, where the caller has it already.

    Returns:
        (codes, reference): uint8 e4m3 codes [..., N, K], and uint8 [..., N]; see `unfold`.

    Raises:
        TypeError: `t` is no MXTensor.
        ValueError: some block does not fold (the certificate is not exact), the certificate has
            other rows than `t`, or `t` is not MXFP4 along the last axis.

    Example:
        >>> from mxpert.formats import quantize_blocks
        >>> codes, reference = fold(quantize_blocks(torch.full((1, 32), -1.5), "mxfp4"))
        >>> reference.tolist(), unfold(codes, reference)[0, :2].tolist()
        ([125], [-1.5, -1.5])
    """
    need = Checks("fold")
    _require_weights(t, "fold")
    certificate = fold_certificate(t) if certificate is None else certificate
    if not isinstance(certificate, FoldCertificate):
        raise need.type_error(
            "certificate",
            "a FoldCertificate or None",
            type(certificate).__name__,
            "make it with fold_certificate(t)",
        )
    reference = certificate.reference
    need(
        reference.shape == t.scale.shape[:-1],
        "certificate.reference",
        list(t.scale.shape[:-1]),
        list(reference.shape),
        "make it with fold_certificate(t)",
    )
    need(
        certificate.exact,
        "t",
        "every block within 15 binades of its row",
        f"{certificate.total_outside} of {certificate.num_blocks} blocks outside",
        "use the bf16 path for these weights",
    )
    shift = reference.unsqueeze(-1).to(torch.int32) - t.scale.to(torch.int32)
    # Blocks of zeros may lie anywhere; their codes stay (signed) zeros under every factor.
    factor = exact_power_of_two(FOLD_TOP - shift.clamp(0, FOLD_SPAN - 1), torch.float32)
    values = decode(unpack_codes(t.qdata), E2M1)
    blocks = values.unflatten(-1, (t.scale.shape[-1], t.format.block_size))
    return encode((blocks * factor.unsqueeze(-1)).flatten(-2), E4M3), reference


def unfold(
    codes: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the weights of a fold: ``decode(codes) * 2^(reference - 127 - 6)``.

    Args:
        codes: uint8 e4m3 codes [..., N, K].
        reference: uint8 [..., N].
        dtype: float32 (values from 2^128 on become infinite) or float64 (always exact).

    Returns:
        Weights [..., N, K] of `dtype`: those of `dequantize_blocks` on the tensor that was folded.

    Raises:
        TypeError: wrong dtypes.
        ValueError: `reference` is not one byte per row of `codes`.

    Example:
        >>> codes = torch.tensor([[0x38]], dtype=torch.uint8)   # 1.0
        >>> unfold(codes, torch.tensor([133], dtype=torch.uint8)).tolist()
        [[1.0]]
    """
    need = Checks("unfold")
    need.tensor(codes, "codes", dtype=torch.uint8)
    need(codes.dim() > 1, "codes.shape", "[..., N, K]", list(codes.shape))
    need.tensor(
        reference, "reference", dtype=torch.uint8, shape=codes.shape[:-1], device=codes.device
    )
    need.dtype(dtype, (torch.float32, torch.float64))
    exponent = reference.to(torch.int32) - E8M0_BIAS - FOLD_TOP
    factor = exact_power_of_two(exponent, dtype)
    return decode(codes, E4M3, dtype) * factor.unsqueeze(-1)


def _certify_rows(
    codes: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reference (uint8), blocks outside and span of each row.

    Args:
        codes: packed e2m1 [rows, K/2].
        scale: int16 [rows, K/32].
    """
    nan = scale == E8M0_NAN
    counted = ~_zero_blocks(codes, scale.shape[-1]) & ~nan
    largest = scale.masked_fill(~counted, -1).amax(-1) if scale.shape[-1] else scale.sum(-1) - 1
    smallest = scale.masked_fill(~counted, 256).amin(-1) if scale.shape[-1] else largest
    span = torch.where(largest >= 0, largest - smallest, 0)
    reference = torch.where(largest >= 0, largest, E8M0_BIAS)
    wide = span >= FOLD_SPAN
    if bool(wide.any()):
        reference[wide] = _best_reference(scale[wide], counted[wide])
    shift = reference.unsqueeze(-1) - scale
    outside = nan | (counted & ((shift < 0) | (shift >= FOLD_SPAN)))
    return reference.to(torch.uint8), outside.sum(-1), span


def _zero_blocks(codes: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Blocks [rows, K/32] whose 32 codes are all zeros of either sign."""
    if num_blocks == 0:
        return codes.bool()
    if not codes.is_contiguous() or codes.storage_offset() % 8:
        codes = codes.clone(memory_format=torch.contiguous_format)
    words = codes.view(torch.int64).unflatten(-1, (num_blocks, 2))
    result: torch.Tensor = (words[..., 0] | words[..., 1]) & 0x7777_7777_7777_7777 == 0
    return result


def _best_reference(scale: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """References [rows] with the most counted blocks in ``reference - 14 .. reference``.

    Only scales of the row compete: lowering any other reference to the next scale below it loses
    no block.
    """
    histogram = torch.zeros(len(scale), 256, dtype=torch.int32, device=scale.device)
    histogram.scatter_add_(1, scale.to(torch.int64), counted.to(torch.int32))
    below = histogram.cumsum(1)
    inside = below.clone()
    inside[:, FOLD_SPAN:] -= below[:, :-FOLD_SPAN]
    inside.masked_fill_(histogram == 0, 0)
    best = 255 - inside.flip(1).argmax(1)  # flipped: the largest of equals comes first
    return best.to(scale.dtype)


def _require_weights(t: object, op: str) -> None:
    need = Checks(op)
    if not isinstance(t, MXTensor):
        raise need.type_error("t", "an MXTensor", type(t).__name__, "quantise it first")
    need(t.format == MXFP4, "t.format", "mxfp4", t.format.name, "only e2m1 codes fold into e4m3")
    need(t.axis == -1, "t.axis", -1, t.axis, "quantise weights [..., N, K] along K")
    need(
        t.layout is Layout.ROW_MAJOR,
        "t.layout",
        Layout.ROW_MAJOR,
        t.layout,
        "certify before preparing the weights",
    )
    need(t.qdata.dim() > 1, "t.shape", "[..., N, K]", list(t.shape))
