"""CDNA4_FRAGMENT: round trips, padding, and an independent decoder of its bytes."""

from __future__ import annotations

import pytest
import torch

from mxpert.formats import FORMATS, MXTensor
from mxpert.formats.tensor import Layout
from mxpert.moe.cdna4.layout import CDNA4_FRAGMENT
from tests.formats.ocp import assert_same_bits

MXFP4 = FORMATS["mxfp4"]
SHAPES = [(1, 32, 32), (2, 64, 128), (1, 96, 160), (3, 160, 96), (2, 192, 352), (1, 2880, 2880)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))


def random_weights(shape: tuple[int, int, int], name: str = "mxfp4") -> MXTensor:
    """Any codes with any scale bytes, NaN among them."""
    (experts, rows, depth), format = shape, FORMATS[name]
    generator = torch.Generator().manual_seed(depth)
    width = depth // format.codes_per_byte
    codes = torch.randint(0, 256, (experts, rows, width), generator=generator)
    scale = torch.randint(0, 256, (experts, rows, depth // 32), generator=generator)
    return MXTensor(codes.to(torch.uint8), scale.to(torch.uint8), format)


def permutation(size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3"])
@pytest.mark.parametrize("permuted", [False, True], ids=["in_order", "permuted"])
@shapes
def test_round_trip(shape: tuple[int, int, int], permuted: bool, name: str) -> None:
    t = random_weights(shape, name)
    rows = permutation(shape[1]) if permuted else None
    packed = CDNA4_FRAGMENT.pack(t, rows=rows)
    units = (shape[0], -(-shape[1] // 64), -(-shape[2] // 128))
    assert packed.qdata.shape == (*units, 8192 // t.format.codes_per_byte)
    assert packed.scale.shape == (*units, 256)
    assert (packed.layout, packed.shape) == (Layout.CDNA4_FRAGMENT, t.shape)
    back = CDNA4_FRAGMENT.unpack(packed, rows)
    assert (back.layout, back.shape, back.format) == (Layout.ROW_MAJOR, t.shape, t.format)
    assert_same_bits(back.qdata, t.qdata, "codes")
    assert_same_bits(back.scale, t.scale, "scales")


@shapes
def test_each_lane_holds_one_block_of_a_row(shape: tuple[int, int, int]) -> None:
    """The place of every MX block, from the documentation of its module."""
    t = random_weights(shape)
    packed = CDNA4_FRAGMENT.pack(t)
    expert, row, block = (
        index.flatten()
        for index in torch.meshgrid(*map(torch.arange, t.scale.shape), indexing="ij")
    )
    unit = packed.qdata[expert, row // 64, block // 4]  # [blocks, 4096]
    fragment, lane = row % 64 // 16, block % 4 * 16 + row % 16
    first = fragment * 1024 + lane * 16
    found = unit.gather(1, first[:, None] + torch.arange(16))
    assert_same_bits(found, t.qdata.reshape(-1, 16), "codes")
    scales = packed.scale[expert, row // 64, block // 4]  # [blocks, 256]
    found = scales.gather(1, (lane * 4 + fragment)[:, None])
    assert_same_bits(found[:, 0], t.scale.flatten(), "scales")


@shapes
def test_each_lane_holds_two_chunks_of_an_mxfp8_row(shape: tuple[int, int, int]) -> None:
    """The place of every 16 codes: chunks b and b + 4 belong to lane 16 b + r."""
    t = random_weights(shape, "mxfp8_e4m3")
    packed = CDNA4_FRAGMENT.pack(t)
    sizes = (*shape[:2], shape[2] // 16)
    expert, row, chunk = (
        index.flatten() for index in torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    )
    unit = packed.qdata[expert, row // 64, chunk // 8]  # [chunks, 8192]
    fragment, half, lane = row % 64 // 16, chunk % 8 // 4, chunk % 4 * 16 + row % 16
    first = (fragment * 2 + half) * 1024 + lane * 16
    found = unit.gather(1, first[:, None] + torch.arange(16))
    assert_same_bits(found, t.qdata.reshape(-1, 16), "codes")


def test_padding_is_zero_codes_of_scale_one() -> None:
    shape = (2, 96, 160)
    packed = CDNA4_FRAGMENT.pack(random_weights(shape))
    whole = MXTensor(
        packed.qdata, packed.scale, MXFP4, -1, Layout.CDNA4_FRAGMENT, logical_shape=(2, 128, 256)
    )
    padded = CDNA4_FRAGMENT.unpack(whole)
    for part in (padded.qdata[:, 96:], padded.qdata[:, :, 80:]):
        assert part.count_nonzero() == 0
    for part in (padded.scale[:, 96:], padded.scale[:, :, 5:]):
        assert part.unique().tolist() == [127]


@pytest.mark.parametrize(
    "rows, depth",
    [(5760, 2880), (2880, 2880), (1024, 7168), (7168, 512), (4096, 7168), (7168, 2048)],
    ids=["gpt_oss_gate_up", "gpt_oss_down", "kimi_up", "kimi_down", "deepseek_up", "deepseek_down"],
)
def test_memory_overhead(rows: int, depth: int) -> None:
    t = random_weights((1, rows, depth))
    assert CDNA4_FRAGMENT.pack(t).nbytes <= 1.023 * t.nbytes


def test_views_are_packed_by_their_values() -> None:
    t = random_weights((2, 96, 160))
    codes, scale = torch.zeros(2, 100, 96).byte(), torch.zeros(2, 100, 9).byte()
    codes[:, :96, :80], scale[:, :96, :5] = t.qdata, t.scale
    view = CDNA4_FRAGMENT.pack(MXTensor(codes[:, :96, :80], scale[:, :96, :5], MXFP4))
    assert torch.equal(view.qdata, CDNA4_FRAGMENT.pack(t).qdata)
    assert torch.equal(view.scale, CDNA4_FRAGMENT.pack(t).scale)


def test_refusals() -> None:
    t = random_weights((1, 64, 128))
    with pytest.raises(ValueError, match=r"unpack_cdna4: t\.layout — need Layout\.CDNA4_FRAGMENT"):
        CDNA4_FRAGMENT.unpack(t)
    with pytest.raises(ValueError, match=r"pack_cdna4: t\.layout — need Layout\.ROW_MAJOR"):
        CDNA4_FRAGMENT.pack(CDNA4_FRAGMENT.pack(t))
    with pytest.raises(ValueError, match=r"pack_cdna4: t\.shape — need \[E, N, K\]"):
        CDNA4_FRAGMENT.pack(MXTensor(t.qdata[0], t.scale[0], MXFP4))
    mxfp8 = MXTensor(
        torch.zeros(1, 64, 128).byte(), torch.zeros(1, 64, 4).byte(), FORMATS["mxfp8_e5m2"]
    )
    with pytest.raises(ValueError, match=r"pack_cdna4: t\.format — need"):
        CDNA4_FRAGMENT.pack(mxfp8)
