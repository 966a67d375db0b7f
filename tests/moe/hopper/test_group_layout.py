"""HOPPER_GROUPS: round trips, an independent decoder of its bits, and what it refuses.

The bit layout is written down here a second time, from the documentation of its module, with
explicit indices.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mxpert import GateUpOrder, MoEWeights, quantize_weights
from mxpert.core.target import on_device
from mxpert.formats import E8M0_NAN, MXFP8_E4M3, Layout, MXTensor, WeightTensor
from mxpert.formats.weight_tensor import WEIGHT_FORMATS, WeightLike
from mxpert.moe.hopper.group_layout import (
    FLOAT16_EXPONENT,
    HOPPER_GROUPS,
    HOPPER_GROUPS_FLOAT16,
    GroupWeights,
    described,
)
from support.hopper_launches import H200
from support.weight_formats import WITH_GROUPS
from tests.formats import ocp
from tests.moe.hopper.test_layout import permutation
from tests.moe.hopper.test_layout_decoder import Machine, halves, word_of

SHAPES = [(1, 64, 128), (2, 96, 384), (3, 160, 256)]
formats = pytest.mark.parametrize("name", WITH_GROUPS)


def weights(name: str, shape: tuple[int, int, int], seed: int = 0) -> WeightLike:
    """Random codes, scales, zero points and factors of rows; scales of INT4 with them are fp16."""
    name, _, zeros = name.partition("-")
    draw = torch.Generator().manual_seed(seed)
    experts, rows, depth = shape

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=draw, dtype=torch.uint8)

    if name == "mxfp8_e4m3":
        codes = integers(0, 0x7F, *shape) | integers(0, 2, *shape) << 7
        return MXTensor(codes, integers(120, 134, experts, rows, depth // 32), MXFP8_E4M3)
    codes = integers(0, 256, experts, rows, depth // 2)
    blocks = experts, rows, depth // WEIGHT_FORMATS[name].group_size
    if name == "nvfp4":
        factors = torch.rand((experts, rows), generator=draw) + 0.5
        return WeightTensor(codes, integers(0, 0x7F, *blocks), name, row_scale=factors)
    scale = torch.rand(blocks, generator=draw) + 0.5
    if zeros:
        return WeightTensor(codes, scale.half(), name, integers(0, 17, *blocks))
    return WeightTensor(codes, scale.bfloat16(), name)


def same(one: WeightLike, other: WeightLike) -> None:
    """Raise unless both have the same parts, dtypes and bits."""
    for part in ("qdata", "scale", "zero_point", "row_scale"):
        a, b = getattr(one, part, None), getattr(other, part, None)
        assert (a is None) == (b is None), part
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b)), part


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
    same(back, t)
    if permuted:
        assert not torch.equal(HOPPER_GROUPS.unpack(packed).qdata, t.qdata)


def stored(packed: WeightLike, expert: int, row: int, k: int) -> float:
    """Value of one weight, read from its bits by the module's description."""
    known = described(packed)
    assert known is not None
    unit, warp, lane_row, pair = row // 64, row % 64 // 16, row % 16 // 2, row % 2
    depth, step, half, lane, place = k // 128, k % 128 // 32, k % 32 // 16, k % 16 // 4, k % 4
    data = packed.qdata[expert, unit, depth]
    scale = packed.scale[expert, unit, depth, k % 128 // known.group * 64 + row % 64]
    if known.codes == "e4m3":
        index = ((step // 2 * 2 + pair) * 4 + warp) * 8 + lane_row
        index = (((index * 4 + lane) * 2 + step % 2) * 2 + half) * 4 + place
        return ocp.code_values("mxfp8_e4m3")[int(data[index])] * 2.0 ** (int(scale) - 127)
    index = ((((pair * 4 + warp) * 8 + lane_row) * 4 + lane) * 4 + step) * 4 + place
    code = int(data[index]) >> 4 * half & 15
    if known.codes == "int4":
        return float(-(code + 1) // 2 if code % 2 else code // 2) * scale.item()
    if known.codes == "int4_zero":
        word = int(scale)
        bits = torch.tensor(word & ~0x1FFF, dtype=torch.int32)
        return (code - (word & 0xFF)) * bits.view(torch.float32).item()
    assert isinstance(packed, WeightTensor)
    assert packed.row_scale is not None
    value = ocp.code_values("mxfp4")[code] * ocp.code_values("mxfp8_e4m3")[int(scale)]
    return value * packed.row_scale[expert, row].item() / 64


@formats
def test_every_weight_lies_where_the_module_says(name: str) -> None:
    t = weights(name, (2, 128, 256), seed=3)
    packed, values = HOPPER_GROUPS.pack(t), t.dequantize(torch.float64)
    draw = torch.Generator().manual_seed(1)
    for expert, row, k in zip(
        *(torch.randint(0, size, (600,), generator=draw).tolist() for size in t.shape), strict=True
    ):
        assert stored(packed, expert, row, k) == values[expert, row, k], (expert, row, k)


MISTAKES = {
    "int4": (("0x81", "0x80"), (", 4;", ", 3;"), ("0x01010101", "0x01010100")),
    "int4_zero": (("0x4B", "0x4A"), ("0xBA98", "0xBA99"), ("not.b32 s, s", "and.b32 s, s, s")),
    "e2m1": (("0x1C1C1C1C", "0x0C1C1C1C"), (", 2;", ", 1;"), ("0xEA", "0xAE")),
}


@pytest.mark.parametrize("codes", MISTAKES)
def test_the_decoder_gives_every_code_in_every_place(codes: str) -> None:
    """The PTX on words of all codes, against values by the specification, and planted mistakes."""
    module = pytest.importorskip("mxpert.device.hopper_ptx", reason="needs Triton with Gluon")
    exponent = GroupWeights(codes, 128).exponent
    draw = torch.Generator().manual_seed(0)
    code = torch.randint(0, 16, (17 * 16, 4, 2, 4), generator=draw)
    code[:, 1, 0, 2] = torch.arange(17 * 16) % 16
    zero = torch.arange(17 * 16) // 16
    words = sum(code[..., h, j] << 8 * j + 4 * h for h in range(2) for j in range(4))
    assert isinstance(words, torch.Tensor)
    table = torch.tensor(ocp.code_values("mxfp8_e4m3"), dtype=torch.float64)
    if codes == "e2m1":
        wanted = torch.tensor(ocp.code_values("mxfp4"), dtype=torch.float64)[code]
    elif codes == "int4":
        wanted = torch.where(code % 2 == 1, -(code + 1) // 2, code // 2).double()
    else:
        wanted = (code - zero[:, None, None, None]).double()

    def decoded(text: str) -> torch.Tensor:
        registers = {f"${8 + step}": words[:, step] for step in range(4)}
        machine = Machine(**registers, **{"$12": zero})
        machine.run(text)
        found = torch.stack([machine.registers[f"${i}"] for i in range(8)], -1)
        found = found.unflatten(-1, (2, 4)).transpose(1, 2)  # step, half
        return torch.stack([table[found >> 8 * j & 255] for j in range(4)], -1) * 2.0**exponent

    assembly = module.nibble_assembly(codes, 4)
    assert torch.equal(decoded(assembly), wanted)
    for old, new in MISTAKES[codes]:
        assert old in assembly
        assert not torch.equal(decoded(assembly.replace(old, new)), wanted), new


@formats
def test_padding_is_zero(name: str) -> None:
    t = weights(name, (1, 96, 128 if name.startswith("int4_g128") else 192))
    depth, packed = t.shape[2], HOPPER_GROUPS.pack(t)
    padded = (1, 128, -(-depth // 128) * 128)
    values = HOPPER_GROUPS.unpack(replace(packed, logical_shape=padded)).dequantize()
    assert not values[:, 96:].any()
    assert not values[:, :, depth:].any()


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
        same(back.gate_up_proj, given.gate_up_proj)
        same(back.down_proj, given.down_proj)


def with_zero_points(value: int, dtype: torch.dtype = torch.bfloat16) -> WeightLike:
    t = weights("int4_g64", (1, 128, 128))
    assert isinstance(t, WeightTensor)
    zeros = torch.full(t.scale.shape, value, dtype=torch.uint8)
    return replace(t, scale=t.scale.to(dtype), zero_point=zeros)


def with_scale(byte: int) -> MXTensor:
    t = weights("mxfp8_e4m3", (1, 128, 128))
    assert isinstance(t, MXTensor)
    t.scale[0, 5, 1] = byte
    return t


@pytest.mark.parametrize(
    "t",
    [with_scale(0), with_scale(E8M0_NAN), with_zero_points(17), with_zero_points(8, torch.float32)],
    ids=["scale of 2^-127", "scale of NaN", "zero point of 17", "zero points with float32 scales"],
)
def test_what_it_cannot_hold_is_refused(t: WeightLike) -> None:
    assert not HOPPER_GROUPS.can_hold(t)
    with pytest.raises(
        ValueError, match=r"pack_groups: t — need INT4, NVFP4 or MXFP8, with E8M0 scales of 2\^-126"
    ):
        HOPPER_GROUPS.pack(t)
    down = t._mapped(lambda part: part[..., : part.shape[-1] // 2])
    given = MoEWeights(t, down, gate_up_order="interleaved")
    with pytest.raises(ValueError, match=r"prepare: layout — need ROW_MAJOR for"):
        given.prepare(device="cpu", layout="hopper_groups")


def test_mxfp4_is_refused() -> None:
    given = quantize_weights(
        torch.ones(1, 64, 32), torch.ones(1, 32, 32), gate_up_order="interleaved"
    )
    with pytest.raises(ValueError, match=r"pack_groups: t — need .*, got mxfp4"):
        given.prepare(device="cpu", layout="hopper_groups")


# ---- HOPPER_GROUPS_FLOAT16.


def integers_with(scale: torch.Tensor) -> WeightTensor:
    """INT4 [1, rows, 32 * groups] with these scales [rows, groups]."""
    rows, groups = scale.shape
    codes = torch.randint(0, 256, (1, rows, groups * 16), dtype=torch.uint8)
    return WeightTensor(codes, scale[None].bfloat16(), "int4_g32")


def pair_of(scale: torch.Tensor) -> torch.Tensor:
    """A word of two equal float16 numbers."""
    return word_of(scale[:, None].expand(-1, 2))


def float16_products(
    codes: str, low: torch.Tensor, high: torch.Tensor, mistake: tuple[str, str] = ("", "")
) -> torch.Tensor:
    """What the PTX makes of every code in every place of a word: float64 [scales, 16, 8].

    low, high: words with the scale of the low and of the high nibbles, [scales].
    """
    module = pytest.importorskip("mxpert.device.hopper_ptx", reason="needs Triton with Gluon")
    text, found = module._float16_assembly(codes), []
    assert mistake[0] in text
    for code in range(16):
        # Places: low nibbles of four bytes, then the high ones.
        word = sum((code + place) % 16 << 8 * (place % 4) + place // 4 * 4 for place in range(8))
        machine = Machine(**{"$4": torch.full_like(low, word), "$5": low, "$9": high})
        machine.run(text.replace(*mistake))
        found.append(halves(torch.stack([machine.registers[f"${i}"] for i in range(4)], -1)))
    by_first = torch.stack(found, 1).flatten(2)  # [scales, code - place, place]
    return torch.stack([by_first[..., place].roll(place, 1) for place in range(8)], -1)


def integer_products(scale: torch.Tensor, mistake: tuple[str, str] = ("", "")) -> torch.Tensor:
    """Of INT4 values -8 to 7 and scales that are multiplied by 2^15: [scales, 16, 8]."""
    held = pair_of(scale * 2**15)
    found = float16_products("int4", held, held, mistake) * 2.0**-FLOAT16_EXPONENT
    return found[:, [*range(15, 0, -2), *range(0, 16, 2)]]  # codes 15 and 0 are -8 and 0


INTEGERS = torch.arange(-8, 8, dtype=torch.float64)[:, None].expand(-1, 8)


def bfloat16_scales() -> torch.Tensor:
    """All that are not negative, as float64."""
    return torch.arange(0, 1 << 15, dtype=torch.int16).view(torch.bfloat16).double()


def test_float16_holds_every_integer_times_every_scale() -> None:
    """The PTX with scales times 2^15, and planted mistakes."""
    scale = bfloat16_scales()
    scale = scale[(scale < 2) & ((scale >= 2.0**-24) | (scale == 0))]
    assert torch.equal((scale * 2**15).half().double(), scale * 2**15)
    wanted = scale[:, None, None] * INTEGERS
    assert torch.equal(integer_products(scale), wanted)
    for mistake in (*MISTAKES["int4"], ("pair, high", "pair, low"), ("pair, $9", "bytes, $9")):
        assert not torch.equal(integer_products(scale[::64], mistake), wanted[::64]), mistake


def test_float16_holds_every_nvfp4_code_times_every_scale() -> None:
    """The PTX with other scales of low and of high nibbles, and planted mistakes."""
    module = pytest.importorskip("mxpert.device.hopper_ptx", reason="needs Triton with Gluon")
    code = torch.tensor(ocp.code_values("mxfp4"), dtype=torch.float64)[:, None]
    scale = torch.tensor(ocp.code_values("mxfp8_e4m3"), dtype=torch.float64)
    finite = scale.isfinite()
    byte = torch.arange(256)
    machine = Machine(**{"$4": sum((byte + place) % 256 << 8 * place for place in range(4))})
    machine.run(module._FLOAT16_PAIRS_OF_E4M3.value)
    for place in range(4):
        pairs = machine.registers[f"${place}"].roll(place)
        assert torch.equal(halves(pairs)[finite], scale[finite, None].expand(-1, 2)), place
        assert halves(pairs)[~finite].isnan().all(), place
    scale = scale[finite]
    other = scale.flip(0)
    wanted = torch.cat(
        [(each[:, None, None] * code).expand(-1, -1, 4) for each in (scale, other)], 2
    )
    pairs = pair_of(scale), pair_of(other)
    assert torch.equal(float16_products("e2m1", *pairs) * 2.0**6, wanted)
    for mistake in (*MISTAKES["e2m1"], ("$9", "$5"), ("pair, high", "pair, low")):
        assert not torch.equal(float16_products("e2m1", *pairs, mistake) * 2.0**6, wanted), mistake


def test_what_float16_rounds_is_at_most_2_to_the_minus_31() -> None:
    scale = bfloat16_scales()
    scale = scale[scale < 2.0**-24]
    error = integer_products(scale) - scale[:, None, None] * INTEGERS
    assert (error.abs() <= 2.0**-31).all()


@pytest.mark.parametrize(
    "scale, is_held",
    [
        ([1.0, 0.5], True),
        ([1.9921875, 0.0], True),
        ([2.0**-24, 2.0**-24], True),
        ([2.0**-25, 2.0**-24], False),
        ([2.0**-25, 2.0**-10], True),
        ([-0.5, 2.0**-30], True),
        ([2.0, 1.0], False),
        ([-2.0, 1.0], False),
        ([float("nan"), 1.0], False),
        ([float("inf"), 1.0], False),
    ],
)
def test_which_scales_float16_holds(scale: list[float], is_held: bool) -> None:
    """One row of four decides, and the layout for any weights takes the others."""
    held = integers_with(torch.tensor([[1.0, 1.0]] * 3 + [scale]))
    assert HOPPER_GROUPS_FLOAT16.can_hold(held) is is_held
    assert HOPPER_GROUPS.can_hold(held)
    if not is_held:
        with pytest.raises(ValueError, match="keep HOPPER_GROUPS"):
            HOPPER_GROUPS_FLOAT16.pack(held)


def test_float16_holds_no_other_weights() -> None:
    held = integers_with(torch.ones(4, 2))
    zeros = torch.zeros(held.scale.shape, dtype=torch.uint8)
    for other in (
        replace(held, zero_point=zeros),
        replace(held, scale=held.scale.float()),
        replace(held, scale=held.scale.half()),
        weights("nvfp4", SHAPES[0]),
        weights("mxfp8_e4m3", SHAPES[0]),
    ):
        assert not HOPPER_GROUPS_FLOAT16.can_hold(other)


@pytest.mark.parametrize("name", ["int4_g32", "int4_g64", "int4_g128"])
def test_prepare_takes_float16_where_it_holds(name: str) -> None:
    dense = tuple(each.bfloat16() for each in (torch.randn(2, 256, 256), torch.randn(2, 256, 128)))
    made = quantize_weights(*dense, gate_up_order="concatenated", weight_format=name)
    with on_device(H200):
        prepared = made.prepare(device="cpu")
        assert prepared.layout is HOPPER_GROUPS_FLOAT16
        large = replace(made.gate_up_proj, scale=made.gate_up_proj.scale * 64)
        assert replace(made, gate_up_proj=large).prepare(device="cpu").layout is HOPPER_GROUPS
    back = prepared.unprepare()
    for part in ("gate_up_proj", "down_proj"):
        mine, theirs = getattr(back, part), getattr(made, part)
        assert torch.equal(mine.qdata, theirs.qdata)
        assert torch.equal(mine.scale, theirs.scale)
    plain = made.prepare(device="cpu", layout=HOPPER_GROUPS)
    assert torch.equal(plain.gate_up_proj.qdata, prepared.gate_up_proj.qdata)
    assert torch.equal(plain.gate_up_proj.scale, prepared.gate_up_proj.scale)
