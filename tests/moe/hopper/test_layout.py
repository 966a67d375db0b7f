"""HOPPER_FRAGMENT: round trips, and an independent decoder of its bits.

The bit layout is written down here a second time, from the documentation of its module, with
explicit indices; values come from the tables of the specification.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from mxpert.formats import FORMATS, MXTensor, dequantize_blocks, fold, fold_certificate, pack_codes
from mxpert.formats.tensor import Layout
from mxpert.moe.hopper.layout import HOPPER_FRAGMENT, HOPPER_FRAGMENT_FP8
from tests.formats import ocp
from tests.formats.ocp import assert_same_bits, assert_same_values

MXFP4, MXFP8 = FORMATS["mxfp4"], FORMATS["mxfp8_e4m3"]
SHAPES = [(1, 32, 32), (2, 64, 128), (1, 96, 160), (3, 160, 96), (2, 192, 352), (1, 2880, 2880)]
SPAN = 15


def folding_weights(
    shape: tuple[int, int, int],
    *,
    seed: int = 0,
    spread: int = SPAN,
    top: tuple[int, int] = (20, 240),
) -> MXTensor:
    """Random codes and scales that fold; a tenth of the blocks are zeros (of both signs) under any
    scale byte but NaN."""
    experts, rows, depth = shape
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator)

    blocks = (experts, rows, depth // 32)
    codes = integers(0, 16, *blocks, 32)
    scale = integers(*top, experts, rows, 1) - integers(0, spread, *blocks)
    empty = torch.rand(blocks, generator=generator) < 0.1
    codes[empty] &= 8
    scale[empty] = integers(0, 255, int(empty.sum()))
    return MXTensor(pack_codes(codes.flatten(-2).to(torch.uint8)), scale.to(torch.uint8), MXFP4)


def permutation(size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


# --- round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize("permuted", [False, True], ids=["in_order", "permuted"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_round_trip(shape: tuple[int, int, int], permuted: bool) -> None:
    t = folding_weights(shape)
    rows = permutation(shape[1]) if permuted else None
    packed = HOPPER_FRAGMENT.pack(t, rows=rows)
    units = (shape[0], -(-shape[1] // 64), -(-shape[2] // 128))
    assert packed.qdata.shape == (*units, 4096)
    assert packed.scale.shape == (*units, 256)
    assert packed.reference is not None
    assert packed.reference.shape == (shape[0], units[1] * 64)
    assert (packed.layout, packed.shape) == (Layout.HOPPER_FRAGMENT, t.shape)
    back = HOPPER_FRAGMENT.unpack(packed, rows)
    assert (back.layout, back.shape) == (Layout.ROW_MAJOR, t.shape)
    assert_same_bits(back.qdata, t.qdata, "codes")
    assert_same_bits(back.scale, t.scale, "scales")


def test_the_row_order_is_part_of_the_layout() -> None:
    t = folding_weights((1, 64, 128))
    back = HOPPER_FRAGMENT.unpack(HOPPER_FRAGMENT.pack(t, rows=permutation(64)))
    assert not torch.equal(back.qdata, t.qdata)


@pytest.mark.parametrize("shift", range(SPAN))
def test_every_shift_is_stored(shift: int) -> None:
    scale = torch.full((1, 64, 4), 140, dtype=torch.uint8)
    scale[..., 1:] -= shift
    t = MXTensor(torch.full((1, 64, 64), 0x9E, dtype=torch.uint8), scale, MXFP4)
    packed = HOPPER_FRAGMENT.pack(t)
    assert packed.scale.unique().tolist() == sorted({0, shift})
    assert_same_bits(HOPPER_FRAGMENT.unpack(packed).scale, scale, "scales")


def test_storage_outside_a_view_is_never_read() -> None:
    t = folding_weights((2, 96, 160))
    storage = torch.full((2, 100, 96), 0x77, dtype=torch.uint8)
    scales = torch.full((2, 100, 9), 255, dtype=torch.uint8)
    storage[:, :96, :80], scales[:, :96, :5] = t.qdata, t.scale
    view = MXTensor(storage[:, :96, :80], scales[:, :96, :5], MXFP4)
    a, b = HOPPER_FRAGMENT.pack(view), HOPPER_FRAGMENT.pack(t)
    assert torch.equal(a.qdata, b.qdata)
    assert torch.equal(a.scale, b.scale)


def test_padding_is_zero_codes_and_zero_shifts() -> None:
    """Padded rows and columns meet other data in a kernel: they must be finite, and zero."""
    t = folding_weights((2, 96, 160))
    values = decode_units(HOPPER_FRAGMENT.pack(t))
    assert values[:, 96:].abs().max() == 0
    assert values[:, :, 160:].abs().max() == 0


@pytest.mark.parametrize(
    "rows, depth",
    [(5760, 2880), (2880, 2880), (1024, 7168), (7168, 512), (4096, 7168), (7168, 2048)],
    ids=[
        "gpt_oss_gate_up",
        "gpt_oss_down",
        "kimi_tp4_gate_up",
        "kimi_tp4_down",
        "deepseek_gate_up",
        "deepseek_down",
    ],
)
def test_memory_overhead(rows: int, depth: int) -> None:
    t = MXTensor(
        torch.zeros(1, rows, depth // 2, dtype=torch.uint8),
        torch.full((1, rows, depth // 32), 127, dtype=torch.uint8),
        MXFP4,
    )
    assert t.nbytes == rows * depth * 17 // 32
    assert HOPPER_FRAGMENT.pack(t).nbytes <= 1.03 * t.nbytes


# --- refusals -----------------------------------------------------------------------------------


def with_scale(t: MXTensor, index: tuple[int, ...], byte: int) -> MXTensor:
    scale, qdata = t.scale.clone(), t.qdata.clone()
    scale[index] = byte
    qdata[*index[:-1], index[-1] * 16] = 0x11  # the block must count
    return MXTensor(qdata, scale, MXFP4)


@pytest.mark.parametrize("byte", [100, 136, 255], ids=["below", "above", "nan"])
def test_blocks_outside_the_binades_are_refused(byte: int) -> None:
    narrow = folding_weights((2, 64, 256), spread=5, top=(120, 121))
    t = with_scale(narrow, (1, 63, 7), byte)
    certificate = fold_certificate(t)
    assert not HOPPER_FRAGMENT.fits(certificate)
    for given in (None, certificate):
        with pytest.raises(ValueError, match=r"pack_hopper: t — .*keep Layout\.ROW_MAJOR"):
            HOPPER_FRAGMENT.pack(t, given)


@pytest.mark.parametrize("top, holds", [(6, False), (7, True)])
def test_row_factors_must_be_normal(top: int, holds: bool) -> None:
    """2^(7 − 133) = 2^−126 is float32's smallest normal number."""
    codes = torch.full((1, 32, 16), 0x11, dtype=torch.uint8)
    t = MXTensor(codes, torch.full((1, 32, 1), top, dtype=torch.uint8), MXFP4)
    certificate = fold_certificate(t)
    assert certificate.exact
    assert HOPPER_FRAGMENT.fits(certificate) is holds
    if not holds:
        with pytest.raises(ValueError, match="need every block within 15 binades"):
            HOPPER_FRAGMENT.pack(t)
    else:
        assert certificate.reference.unique().tolist() == [133 - 126]


def test_wrong_layouts_and_formats() -> None:
    t = folding_weights((1, 64, 128))
    with pytest.raises(ValueError, match=r"unpack_hopper: t\.layout — .*HOPPER_FRAGMENT"):
        HOPPER_FRAGMENT.unpack(t)
    with pytest.raises(ValueError, match=r"t\.layout — .*ROW_MAJOR"):
        HOPPER_FRAGMENT.pack(HOPPER_FRAGMENT.pack(t))
    mxfp8 = MXTensor(
        torch.zeros(1, 64, 64, dtype=torch.uint8), torch.zeros(1, 64, 2, dtype=torch.uint8), MXFP8
    )
    with pytest.raises(ValueError, match=r"t\.format — need mxfp4"):
        HOPPER_FRAGMENT.pack(mxfp8)


# --- the bits, decoded independently ------------------------------------------------------------

E4M3_CODE = {value: code for code, value in enumerate(ocp.code_values("mxfp8_e4m3")[:0x7F])}
"""Code of each finite magnitude."""


def folded_code(code: int, shift: int) -> int:
    """The e4m3 code of e2m1 code × 2^(6 − shift), from the specification's tables."""
    magnitude = E4M3_CODE[ocp.code_values("mxfp4")[code & 7] * 2.0 ** (6 - shift)]
    return magnitude | (code & 8) << 4


def unit_places() -> Iterator[tuple[int, ...]]:
    """Row, column, address of the word, bit of the magnitude, of the sign, address of the shift."""
    for warp, g, r in itertools.product(range(4), range(8), range(2)):
        for block, q, half, j in itertools.product(range(4), range(4), range(2), range(4)):
            yield (
                16 * warp + 2 * g + r,
                32 * block + 8 * q + 4 * half + j,
                2048 * r + 512 * warp + 64 * g + 16 * block + 4 * q,
                16 * half + 4 * j,
                8 * j + (3 if half else 7),
                64 * warp + 8 * g + 2 * block + r,
            )


def decode_units(packed: MXTensor) -> torch.Tensor:
    """float64 [E, N padded, K padded] of a packed tensor, one place of a unit at a time."""
    experts, row_units, depth_units, _ = packed.qdata.shape
    words = packed.qdata.long().unflatten(-1, (-1, 4))
    words = words[..., 0] | words[..., 1] << 8 | words[..., 2] << 16 | words[..., 3] << 24
    values = torch.empty(experts, row_units, 64, depth_units, 128, dtype=torch.float64)
    e4m3 = torch.tensor(ocp.code_values("mxfp8_e4m3"), dtype=torch.float64)
    # Blocks of zeros may have any shift.
    table = torch.tensor(
        [
            [folded_code(code, shift) if shift < SPAN else (code & 8) << 4 for code in range(16)]
            for shift in range(256)
        ]
    )
    for row, column, word, magnitude, sign, shift in unit_places():
        bits = words[..., word // 4]
        code = bits >> magnitude & 7 | (bits >> sign & 1) << 3
        values[:, :, row, :, column] = e4m3[table[packed.scale[..., shift].long(), code]]
    assert packed.reference is not None
    factor = torch.exp2(packed.reference.double() - 133)
    return values.flatten(3).flatten(1, 2) * factor[..., None]


@pytest.mark.parametrize(
    "shape", [(2, 64, 128), (1, 96, 160), (2, 160, 352)], ids=lambda s: "x".join(map(str, s))
)
def test_the_documented_bits_give_the_weights(shape: tuple[int, int, int]) -> None:
    t = folding_weights(shape, seed=3)
    rows = permutation(shape[1])
    values = decode_units(HOPPER_FRAGMENT.pack(t, rows=rows))[:, : shape[1], : shape[2]]
    assert_same_values(values, dequantize_blocks(t, torch.float64)[:, rows])


def test_every_bit_of_a_word_counts() -> None:
    """One bit flipped, another one for each expert: one other weight, one other code."""
    t = MXTensor(
        torch.full((32, 64, 64), 0x33, dtype=torch.uint8),
        torch.full((32, 64, 4), 127, dtype=torch.uint8),
        MXFP4,
    )
    packed = HOPPER_FRAGMENT.pack(t)
    expected = decode_units(packed)
    for bit in range(32):
        packed.qdata[bit, 0, 0, 4 * 77 + bit // 8] ^= 1 << bit % 8
    wrong = (decode_units(packed) != expected).sum((1, 2))
    assert wrong.tolist() == [1] * 32
    assert (HOPPER_FRAGMENT.unpack(packed).qdata != t.qdata).sum((1, 2)).tolist() == [1] * 32


PLANTED: dict[str, Callable[[MXTensor], None]] = {
    "halves_swapped": lambda p: p.qdata.copy_(
        p.qdata.unflatten(-1, (-1, 2, 2)).flip(-2).flatten(-3)
    ),
    "fragment_rows_swapped": lambda p: p.qdata.copy_(p.qdata.roll(2048, -1)),
    "warps_swapped": lambda p: p.qdata.copy_(p.qdata.roll(512, -1)),
    "shift_of_the_other_row": lambda p: p.scale.copy_(
        p.scale.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    ),
    "shift_of_the_next_block": lambda p: p.scale.copy_(p.scale.roll(2, -1)),
    "reference_off_by_one": lambda p: p.reference.add_(1),
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_planted_errors_are_caught(plant: Callable[[MXTensor], None]) -> None:
    t = folding_weights((1, 64, 128), seed=5)
    packed = HOPPER_FRAGMENT.pack(t)
    plant(packed)
    with pytest.raises(AssertionError):
        assert_same_values(decode_units(packed), dequantize_blocks(t, torch.float64))


# --- the FP8 copy -------------------------------------------------------------------------------

FP8_SHAPES = [(2, 64, 128), (1, 96, 160), (2, 160, 352)]
fp8_shapes = pytest.mark.parametrize("shape", FP8_SHAPES, ids=lambda s: "x".join(map(str, s)))


def fp8_values(packed: MXTensor) -> torch.Tensor:
    """float64 [E, N padded, K padded] of an FP8 copy, by the documented place of each byte."""
    assert packed.fp8_codes is not None
    assert packed.reference is not None
    experts, row_units, depth_units, _ = packed.fp8_codes.shape
    e4m3 = torch.tensor(ocp.code_values("mxfp8_e4m3"), dtype=torch.float64)
    values = torch.empty(experts, row_units, 64, depth_units, 128, dtype=torch.float64)
    for row, column, *_ in unit_places():
        warp, g, r = row // 16, row // 2 % 8, row % 2
        block, q, half, j = column // 32, column // 8 % 4, column // 4 % 2, column % 4
        place = 128 * (16 * warp + 8 * r + g) + 32 * q + 16 * half + 4 * block + j
        values[:, :, row, :, column] = e4m3[packed.fp8_codes[..., place].long()]
    return values.flatten(3).flatten(1, 2) * torch.exp2(packed.reference.double() - 133)[..., None]


@fp8_shapes
def test_the_fp8_copy_has_the_values_of_the_weights(shape: tuple[int, int, int]) -> None:
    """Exactly, wherever the weights fold; what pads them is zero."""
    t = folding_weights(shape, seed=4)
    rows = permutation(shape[1])
    values = fp8_values(HOPPER_FRAGMENT_FP8.pack(t, rows=rows))
    expected = dequantize_blocks(t, torch.float64)[:, rows]
    assert_same_values(values[:, : shape[1], : shape[2]], expected)
    assert not values[:, shape[1] :].any()
    assert not values[:, :, shape[2] :].any()


@pytest.mark.parametrize("shift", range(SPAN))
def test_every_code_and_shift_has_the_e4m3_number_of_the_fold(shift: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 4, 64).repeat(1, 16, 1)
    scale = torch.full((1, 64, 4), 140, dtype=torch.uint8)
    scale[..., 1:] -= shift
    packed = HOPPER_FRAGMENT_FP8.pack(MXTensor(codes, scale, MXFP4))
    folded, _ = fold(MXTensor(codes, scale, MXFP4))
    assert packed.fp8_codes is not None
    counts = (
        torch.bincount(each.flatten().int(), minlength=256) for each in (packed.fp8_codes, folded)
    )
    assert torch.equal(*counts)
    assert_same_values(
        fp8_values(packed), dequantize_blocks(MXTensor(codes, scale, MXFP4)).double()
    )


@fp8_shapes
def test_the_fp8_copy_lies_beside_the_same_codes(shape: tuple[int, int, int]) -> None:
    t, rows = folding_weights(shape), permutation(shape[1])
    packed, plain = HOPPER_FRAGMENT_FP8.pack(t, rows=rows), HOPPER_FRAGMENT.pack(t, rows=rows)
    for name in ("qdata", "scale", "reference"):
        assert_same_bits(getattr(packed, name), getattr(plain, name), name)
    assert packed.nbytes == plain.nbytes + packed.fp8_codes.numel()
    assert packed.fp8_codes.shape == (*plain.qdata.shape[:3], 8192)
    back = HOPPER_FRAGMENT_FP8.unpack(packed, rows)
    assert_same_bits(back.qdata, t.qdata, "codes")
    assert_same_bits(back.scale, t.scale, "scales")


def test_packing_into_a_tensor_renews_its_fp8_copy() -> None:
    first, second = (folding_weights((2, 96, 160), seed=seed) for seed in (1, 2))
    held, wanted = HOPPER_FRAGMENT_FP8.pack(first), HOPPER_FRAGMENT_FP8.pack(second)
    assert HOPPER_FRAGMENT_FP8.pack(second, out=held) is held
    assert torch.equal(held.fp8_codes, wanted.fp8_codes)


def test_weights_that_do_not_fold_have_no_fp8_copy() -> None:
    narrow = folding_weights((2, 64, 256), spread=5, top=(120, 121))
    with pytest.raises(ValueError, match=r"pack_hopper: t — .*keep Layout\.ROW_MAJOR"):
        HOPPER_FRAGMENT_FP8.pack(with_scale(narrow, (1, 63, 7), 100))


FP8_PLANTED: dict[str, Callable[[MXTensor], None]] = {
    "fragment_rows_swapped": lambda p: p.fp8_codes.copy_(p.fp8_codes.roll(8 * 128, -1)),
    "rows_of_the_weights": lambda p: p.fp8_codes.copy_(p.fp8_codes.roll(128, -1)),
    "blocks_swapped": lambda p: p.fp8_codes.copy_(p.fp8_codes.roll(4, -1)),
    "signs": lambda p: p.fp8_codes.bitwise_and_(0x7F),
    "another_exponent": lambda p: p.fp8_codes.add_(8),
}


@pytest.mark.parametrize("plant", FP8_PLANTED.values(), ids=FP8_PLANTED)
def test_planted_errors_of_the_fp8_copy_are_caught(plant: Callable[[MXTensor], None]) -> None:
    t = folding_weights((1, 64, 128), seed=5)
    packed = HOPPER_FRAGMENT_FP8.pack(t)
    plant(packed)
    with pytest.raises(AssertionError):
        assert_same_values(fp8_values(packed), dequantize_blocks(t, torch.float64))
