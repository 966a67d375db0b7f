"""HOPPER_GROUPS: round trips, an independent decoder of its bits, and what it refuses.

The bit layout is written down here a second time, from the documentation of its module, with
explicit indices.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mxpert import GateUpOrder, MoEWeights
from mxpert.formats import E8M0_NAN, MXFP8_E4M3, Layout, MXTensor, WeightTensor
from mxpert.formats.weight_tensor import WeightLike
from mxpert.moe.hopper.group_layout import HOPPER_GROUPS, group_weights
from tests.formats import ocp
from tests.moe.hopper.test_layout import permutation
from tests.moe.hopper.test_layout_decoder import Machine

FORMATS = ("int4_g32", "int4_g64", "int4_g128", "mxfp8_e4m3")
SHAPES = [(1, 64, 128), (2, 96, 384), (3, 160, 256)]
formats = pytest.mark.parametrize("name", FORMATS)


def weights(name: str, shape: tuple[int, int, int], seed: int = 0) -> WeightLike:
    """Random codes, every value among them, and random scales."""
    draw = torch.Generator().manual_seed(seed)
    experts, rows, depth = shape
    if name == "mxfp8_e4m3":
        codes = torch.randint(0, 0x7F, shape, generator=draw, dtype=torch.uint8)
        codes |= torch.randint(0, 2, shape, generator=draw, dtype=torch.uint8) << 7
        blocks = experts, rows, depth // 32
        scale = torch.randint(120, 134, blocks, generator=draw, dtype=torch.uint8)
        return MXTensor(codes, scale, MXFP8_E4M3)
    codes = torch.randint(0, 256, (experts, rows, depth // 2), generator=draw, dtype=torch.uint8)
    group = int(name.removeprefix("int4_g"))
    scale = torch.rand((experts, rows, depth // group), generator=draw) + 0.5
    return WeightTensor(codes, scale.bfloat16(), name)


@formats
@pytest.mark.parametrize("permuted", [False, True], ids=["in_order", "permuted"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_round_trip(name: str, shape: tuple[int, int, int], permuted: bool) -> None:
    t = weights(name, shape)
    rows = permutation(shape[1]) if permuted else None
    packed = HOPPER_GROUPS.pack(t, rows=rows)
    HOPPER_GROUPS.check(packed, "test")
    assert (packed.layout, packed.shape, type(packed)) == (HOPPER_GROUPS, t.shape, type(t))
    back = HOPPER_GROUPS.unpack(packed, rows)
    assert (back.layout, back.shape) == (Layout.ROW_MAJOR, t.shape)
    assert torch.equal(back.qdata, t.qdata)
    assert torch.equal(back.scale, t.scale)
    if permuted:
        assert not torch.equal(HOPPER_GROUPS.unpack(packed).qdata, t.qdata)


def stored(packed: WeightLike, expert: int, row: int, k: int) -> tuple[float, float]:
    """Value of the code and scale of one weight, read from its bits by the module's description."""
    known = group_weights(packed.format.name)
    assert known is not None
    unit, warp, lane_row, pair = row // 64, row % 64 // 16, row % 16 // 2, row % 2
    depth, step, half, lane, place = k // 128, k % 128 // 32, k % 32 // 16, k % 16 // 4, k % 4
    data = packed.qdata[expert, unit, depth]
    if known.is_integer:
        index = ((((pair * 4 + warp) * 8 + lane_row) * 4 + lane) * 4 + step) * 4 + place
        code = int(data[index]) >> 4 * half & 15
        value = float(-(code + 1) // 2 if code % 2 else code // 2)
    else:
        index = ((step // 2 * 2 + pair) * 4 + warp) * 8 + lane_row
        index = (((index * 4 + lane) * 2 + step % 2) * 2 + half) * 4 + place
        value = ocp.code_values("mxfp8_e4m3")[int(data[index])]
    scale = packed.scale[expert, unit, depth, k % 128 // known.group * 64 + row % 64]
    return value, 2.0 ** (int(scale) - 127) if scale.dtype == torch.uint8 else scale.item()


@formats
def test_every_weight_lies_where_the_module_says(name: str) -> None:
    t = weights(name, (2, 128, 256), seed=3)
    packed, values = HOPPER_GROUPS.pack(t), t.dequantize(torch.float64)
    draw = torch.Generator().manual_seed(1)
    for expert, row, k in zip(
        *(torch.randint(0, size, (600,), generator=draw).tolist() for size in t.shape), strict=True
    ):
        code, scale = stored(packed, expert, row, k)
        assert code * scale == values[expert, row, k], (expert, row, k)


def test_the_decoder_gives_every_integer_in_every_place() -> None:
    """The PTX on words of all codes: v is the e4m3 number v / 256."""
    module = pytest.importorskip("mxpert.moe.hopper.group_weights", reason="needs Gluon")
    draw = torch.Generator().manual_seed(0)
    value = torch.randint(-8, 8, (64, 4, 2, 4), generator=draw)
    value[:16] = torch.arange(-8, 8)[:, None, None, None]
    codes = torch.where(value < 0, -2 * value - 1, 2 * value)
    words = sum(codes[..., h, j] << 8 * j + 4 * h for h in range(2) for j in range(4))
    assert isinstance(words, torch.Tensor)
    assembly = module._zigzag_assembly()
    table = torch.tensor(ocp.code_values("mxfp8_e4m3"), dtype=torch.float64)

    def decoded(text: str) -> torch.Tensor:
        machine = Machine(**{f"${8 + step}": words[:, step] for step in range(4)})
        machine.run(text)
        outputs = torch.stack([machine.registers[f"${i}"] for i in range(8)], -1).unflatten(
            -1, (2, 4)
        )
        return torch.stack([table[outputs >> 8 * j & 255] for j in range(4)], -1).transpose(1, 2)

    assert torch.equal(decoded(assembly) * 256, value.double())
    for old, new in (("0x81", "0x80"), (", 4;", ", 3;"), ("0x01010101", "0x01010100")):
        assert not torch.equal(decoded(assembly.replace(old, new)) * 256, value.double()), new


@formats
def test_padding_is_zero(name: str) -> None:
    t = weights(name, (1, 96, 128 if name == "int4_g128" else 192))
    packed = HOPPER_GROUPS.pack(t)
    whole = HOPPER_GROUPS.unpack(
        replace(packed, logical_shape=(1, 128, -(-t.shape[2] // 128) * 128))
    )
    values = whole.dequantize()
    assert not values[:, 96:].any()
    assert not values[:, :, t.shape[2] :].any()


@formats
def test_prepared_weights_compute_the_same_and_come_back(name: str) -> None:
    given = MoEWeights(
        weights(name, (2, 256, 256)), weights(name, (2, 256, 128), 1), gate_up_order="concatenated"
    )
    held = given.prepare(device="cpu", layout="hopper_groups")
    assert (held.layout, held.gate_up_order) == (HOPPER_GROUPS, GateUpOrder.INTERLEAVED)
    for again in (held, MoEWeights.from_state_dict(held.state_dict())):
        back = again.unprepare()
        assert back.gate_up_order is GateUpOrder.CONCATENATED
        for mine, theirs in (
            (back.gate_up_proj, given.gate_up_proj),
            (back.down_proj, given.down_proj),
        ):
            assert torch.equal(mine.qdata, theirs.qdata)
            assert torch.equal(mine.scale, theirs.scale)


NOTHING = torch.zeros(1, 1, 1, dtype=torch.uint8)


def with_zero_points(t: WeightLike) -> WeightLike:
    assert isinstance(t, WeightTensor)
    return replace(t, zero_point=torch.full(t.scale.shape, 8, dtype=torch.uint8))


def with_scale(byte: int) -> MXTensor:
    t = weights("mxfp8_e4m3", (1, 128, 128))
    assert isinstance(t, MXTensor)
    t.scale[0, 5, 1] = byte
    return t


@pytest.mark.parametrize(
    "t",
    [
        with_zero_points(weights("int4_g64", (1, 128, 128))),
        with_scale(0),
        with_scale(E8M0_NAN),
        WeightTensor(NOTHING.expand(1, 128, 64), NOTHING.expand(1, 128, 8), "nvfp4"),
    ],
    ids=["zero points", "scale of 2^-127", "scale of NaN", "NVFP4"],
)
def test_what_it_cannot_hold_is_refused(t: WeightLike) -> None:
    assert not HOPPER_GROUPS.can_hold(t)
    with pytest.raises(ValueError, match=r"pack_groups: t — need INT4 without zero points"):
        HOPPER_GROUPS.pack(t)
    down = t._mapped(lambda part: part[..., : part.shape[-1] // 2])
    given = MoEWeights(t, down, gate_up_order="interleaved")
    with pytest.raises(ValueError, match=r"prepare: layout — need ROW_MAJOR for"):
        given.prepare(device="cpu", layout="hopper_groups")
