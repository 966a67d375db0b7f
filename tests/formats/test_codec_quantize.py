"""Block quantisation against torchao, an exact oracle of the OCP rules, and transformers."""

from __future__ import annotations

import math
import re

import pytest
import torch

from mxpert.formats import (
    E8M0_NAN,
    FORMATS,
    MXTensor,
    ScaleRule,
    block_scale,
    dequantize_blocks,
    fold,
    fold_certificate,
    quantize_blocks,
    unpack_codes,
)
from tests.formats import ocp
from tests.formats.ocp import assert_represents, assert_same_bits, assert_same_values

NAMES = sorted(FORMATS)
RULES = list(ScaleRule)
ROWS, BLOCKS = 512, 4


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=generator) * 2.0 - 1


def _data(kind: str) -> torch.Tensor:
    """Float64 test data [512, 128] whose values are float32 numbers."""
    generator = torch.Generator().manual_seed(7)
    shape = (ROWS, BLOCKS * 32)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    row = torch.arange(ROWS, dtype=torch.float64)[:, None]
    if kind == "heavy_tailed":
        x = x * torch.randn(shape, generator=generator, dtype=torch.float64).abs() ** 4
    elif kind == "all_magnitudes":  # one binade after another, from 2^-128 to 2^127
        x = x.clamp(-1.9, 1.9) * torch.exp2(row // 2 - 128)
    elif kind == "huge":
        x = x.clamp(-1.999, 1.999) * 2.0**127
    elif kind == "subnormal":
        x = x * torch.exp2(-150 + row // 16)
    elif kind == "exact_ties":  # every tie of every format times powers of two, and their maxima
        halves = torch.randint(0, 128, shape, generator=generator).double() / 16
        x = halves * torch.exp2(row // 8 - 32) * _signs(shape, generator)
    elif kind == "powers_of_two":  # every maximum sits on or one float32 beside a boundary
        steps = torch.randint(-1, 2, (ROWS, BLOCKS, 1), generator=generator) * 2.0**-23
        boundary = torch.tensor([1.0, 1.5, 1.75, 1.875, 1.9375])
        pick = boundary[torch.randint(0, 5, (ROWS, BLOCKS, 1), generator=generator)]
        top = (pick + steps) * torch.exp2(row // 4 - 64).unsqueeze(-1)
        share = torch.rand((ROWS, BLOCKS, 32), generator=generator, dtype=torch.float64)
        share[..., 5] = 1
        x = (top * share).reshape(shape) * _signs(shape, generator)
    elif kind == "zero_blocks":
        x = (
            x
            * (torch.rand((ROWS, BLOCKS, 1), generator=generator) < 0.5)
            .repeat_interleave(32, -1)
            .reshape(shape)
            * _signs(shape, generator)
        )
    return x.float().double()


KINDS = [
    "normal",
    "heavy_tailed",
    "all_magnitudes",
    "huge",
    "subnormal",
    "exact_ties",
    "powers_of_two",
    "zero_blocks",
]


def _codes(t: MXTensor) -> torch.Tensor:
    return unpack_codes(t.qdata, t.axis) if t.format.codes_per_byte == 2 else t.qdata


def _exact_oracle(x: torch.Tensor, name: str, rule: ScaleRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale bytes and codes by definition, in exact float64 arithmetic."""
    blocks = x.double().unflatten(-1, (-1, 32))
    bytes_ = [ocp.scale_byte(a, name, rule) for a in blocks.abs().amax(-1).flatten().tolist()]
    scale = torch.tensor(bytes_).reshape(blocks.shape[:-1])
    scaled = blocks * torch.tensor(
        [math.ldexp(1.0, 127 - b) for b in range(255)], dtype=torch.float64
    )[scale].unsqueeze(-1)
    return scale.to(torch.uint8), ocp.nearest_codes(scaled.flatten(-2), name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.value)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_definition(name: str, rule: ScaleRule, kind: str) -> None:
    x = _data(kind).float()
    scale, codes = _exact_oracle(x, name, rule)
    t = quantize_blocks(x, name, rule=rule)
    assert_same_bits(t.scale, scale, "scales")
    assert_same_bits(_codes(t), codes, "codes")


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64], ids=["bfloat16", "float16", "float64"]
)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.value)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_definition_in_other_dtypes(
    name: str, rule: ScaleRule, dtype: torch.dtype
) -> None:
    if dtype is torch.float64:  # magnitudes that float32 lacks, and bits that it would round
        generator = torch.Generator().manual_seed(3)
        x = torch.randn((ROWS, 64), generator=generator, dtype=dtype)
        x = x * torch.exp2(torch.arange(ROWS, dtype=dtype)[:, None] * 4 - 1022)
    else:
        x = torch.cat([_data(kind) for kind in ("normal", "heavy_tailed", "exact_ties")]).to(dtype)
        x = x[x.isfinite().all(-1)]
    scale, codes = _exact_oracle(x, name, rule)
    t = quantize_blocks(x, name, rule=rule)
    assert_same_bits(t.scale, scale, "scales")
    assert_same_bits(_codes(t), codes, "codes")


# --- torchao ------------------------------------------------------------------------------------


def _torchao(x: torch.Tensor, name: str, rule: ScaleRule) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, qdata) as torchao casts them."""
    mx_tensor = pytest.importorskip(
        "torchao.prototype.mx_formats.mx_tensor", reason="torchao is the oracle of this test"
    )
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    assert {m.name for m in ScaleCalculationMode} == {r.name for r in RULES}
    element = {
        "mxfp4": torch.float4_e2m1fn_x2,
        "mxfp8_e4m3": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
    }[name]
    scale, data = mx_tensor.to_mx(x.clone(), element, 32, ScaleCalculationMode[rule.name])
    return scale.view(torch.uint8), data.view(torch.uint8)


def _log2_rounds_down(x: torch.Tensor, name: str) -> torch.Tensor:
    """Blocks where ceil of a float32 log2 misses: amax / max within 2^-16 above a power of two."""
    ratio = x.double().unflatten(-1, (-1, 32)).abs().amax(-1) / FORMATS[name].element.max_value
    mantissa = 2 * torch.frexp(ratio).mantissa
    return (mantissa > 1) & (mantissa < 1 + 2.0**-16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.value)
@pytest.mark.parametrize("name", NAMES)
def test_equals_torchao(name: str, rule: ScaleRule, kind: str, dtype: torch.dtype) -> None:
    """Bit for bit, but for three differences of torchao 0.18, each pinned here.

    1. An all-zero block gets scale byte 0 there, 127 here; the codes, hence the values, are equal.
    2. Scale byte 0 means 2^-127, but torchao divides such a block by 2^-126 (RCEIL: by 1), so that
       its codes do not mean the input. Ours are checked against the exact oracle instead.
    3. RCEIL there takes a float32 log2, which returns the power of two itself just above one: the
       scale is then one binade short and the block's maximum saturates.
    """
    x = _data(kind).to(dtype)
    x = x[x.isfinite().all(-1)]
    theirs_scale, theirs_qdata = _torchao(x, name, rule)
    ours = quantize_blocks(x, name, rule=rule)
    bytes_per_block = 32 // ours.format.codes_per_byte

    zero = (x == 0).unflatten(-1, (-1, 32)).all(-1)
    assert bool((theirs_scale[zero] == 0).all() & (ours.scale[zero] == 127).all())
    theirs_scale = theirs_scale.masked_fill(zero, 127)
    bottom = theirs_scale == 0

    short = ours.scale != theirs_scale
    assert bool((short <= _log2_rounds_down(x, name)).all())
    assert rule is ScaleRule.RCEIL or not short.any()
    assert torch.equal(ours.scale[short], theirs_scale[short] + 1)

    compared = ~short & ~bottom
    assert kind == "subnormal" or float(compared.double().mean()) > 0.75
    unflatten = (-1, bytes_per_block)
    assert_same_bits(
        ours.qdata.unflatten(-1, unflatten)[compared],
        theirs_qdata.unflatten(-1, unflatten)[compared],
        "codes",
    )
    exact_scale, exact_codes = _exact_oracle(x, name, rule)
    assert_same_bits(ours.scale, exact_scale, "scales of the definition")
    assert_same_bits(_codes(ours), exact_codes, "codes of the definition")


def test_the_pinned_differences_to_torchao_exist() -> None:
    """Without these the exceptions of `test_equals_torchao` would be idle."""
    x = _data("powers_of_two").float()
    short = quantize_blocks(x, "mxfp4").scale != _torchao(x, "mxfp4", ScaleRule.RCEIL)[0]
    assert short.any()
    tiny = torch.full((1, 32), 2.0**-126)
    theirs_scale, theirs_codes = _torchao(tiny, "mxfp8_e4m3", ScaleRule.RCEIL)
    assert theirs_scale.item() == 0
    assert not theirs_codes.any()  # the block is lost
    assert_represents(quantize_blocks(tiny, "mxfp8_e4m3"), tiny)
    infinite = torch.full((1, 32), math.inf)
    assert _torchao(infinite, "mxfp8_e4m3", ScaleRule.RCEIL)[0].item() == 254


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.value)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_nan_and_infinity_poison_their_block_alone(
    name: str, rule: ScaleRule, dtype: torch.dtype
) -> None:
    """Every bit of the other blocks stays."""
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    clean = quantize_blocks(x, name, rule=rule)
    x[0, 33], x[1, 64], x[1, 65], x[1, 0] = math.nan, math.nan, math.inf, -math.inf
    x[2, 5], x[2, 6], x[2, 95] = math.inf, torch.finfo(dtype).max, -math.inf
    ours = quantize_blocks(x, name, rule=rule)
    poisoned = (~x.isfinite()).unflatten(-1, (3, 32)).any(-1)
    assert_same_bits(ours.scale[~poisoned], clean.scale[~poisoned], "scales")
    assert_same_bits(
        _codes(ours).unflatten(-1, (3, 32))[~poisoned],
        _codes(clean).unflatten(-1, (3, 32))[~poisoned],
        "codes",
    )
    assert bool((ours.scale[poisoned] == E8M0_NAN).all())
    assert torch.equal(dequantize_blocks(ours).isnan(), poisoned.repeat_interleave(32, -1))
    nan_code = 7 if name == "mxfp4" else 0x7F
    assert bool((_codes(ours).unflatten(-1, (3, 32))[poisoned] == nan_code).all())


# --- scale rules --------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.value)
@pytest.mark.parametrize("name", NAMES)
def test_scale_beside_every_boundary_of_every_binade(name: str, rule: ScaleRule) -> None:
    boundaries = torch.tensor([1.0, 1.5, 1.75, 1.875, 1.9375, 1.96875]).repeat(254, 1)
    amax = (boundaries * torch.exp2(torch.arange(-126.0, 128.0).double())[:, None]).float()
    amax = torch.cat(
        [
            torch.nextafter(amax, torch.zeros(())),
            amax,
            torch.nextafter(amax, torch.full((), 1e38) * 10),
        ]
    )
    amax = amax[amax.isfinite()]
    expected = torch.tensor([ocp.scale_byte(a, name, rule) for a in amax.double().tolist()])
    assert_same_bits(block_scale(amax, name, rule), expected.to(torch.uint8), "float32")
    assert_same_bits(block_scale(amax.double(), name, rule), expected.to(torch.uint8), "float64")
    assert_same_bits(block_scale(-amax, name, rule), expected.to(torch.uint8), "negative")


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.value)
@pytest.mark.parametrize("name", NAMES)
def test_scale_of_special_maxima(name: str, rule: ScaleRule) -> None:
    special = torch.tensor([0.0, math.nan, math.inf, -math.inf, 2.0**-149])
    assert block_scale(special, name, rule).tolist() == [127, 255, 255, 255, 0]
    wide = torch.tensor([1e300, math.inf, 1e-300], dtype=torch.float64)
    assert block_scale(wide, name, rule).tolist() == [254, 255, 0]


# --- shapes, axes, strides ----------------------------------------------------------------------


@pytest.mark.parametrize("axis", [-3, -2, -1, 0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_any_axis_equals_moving_it_last(name: str, axis: int) -> None:
    x = torch.randn(64, 32, 96, generator=torch.Generator().manual_seed(4))
    t = quantize_blocks(x, name, axis=axis)
    last = quantize_blocks(x.movedim(axis, -1), name)
    assert t.axis == (axis if axis < 0 else axis - 3)
    assert t.shape == x.shape
    assert t.qdata.is_contiguous()
    assert t.scale.is_contiguous()
    assert_same_bits(t.qdata, last.qdata.movedim(-1, axis), "codes")
    assert_same_bits(t.scale, last.scale.movedim(-1, axis), "scales")
    assert_same_values(dequantize_blocks(t), dequantize_blocks(last).movedim(-1, axis).contiguous())


@pytest.mark.parametrize("name", NAMES)
def test_strided_and_expanded_inputs(name: str) -> None:
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(5))
    before = x.clone()
    for view in (x.t(), x[::2, :32], x[:1].expand(5, -1), x.requires_grad_()[3]):
        t, dense = quantize_blocks(view, name, axis=-1), quantize_blocks(view.contiguous(), name)
        assert_same_bits(t.qdata, dense.qdata, "codes")
        assert_same_bits(t.scale, dense.scale, "scales")
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (2, 0, 64)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_empty_tensors(name: str, shape: tuple[int, ...]) -> None:
    t = quantize_blocks(torch.empty(shape), name)
    assert t.shape == torch.Size(shape)
    assert dequantize_blocks(t).shape == torch.Size(shape)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_depends_on_data_on_the_host(name: str) -> None:
    """Meta tensors have no data: a hidden read-back would raise."""
    t = quantize_blocks(torch.empty(4, 64, device="meta"), name)
    assert dequantize_blocks(t).shape == (4, 64)


# --- the gpt-oss checkpoint layout --------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt_oss_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """`blocks` [E, N, K/32, 16] with every byte, `scales` [E, N, K/32] with bytes 0..254."""
    generator = torch.Generator().manual_seed(6)
    scales = torch.arange(255, dtype=torch.int32).repeat(4).reshape(2, 34, 15).to(torch.uint8)
    blocks = torch.randint(0, 256, (2, 34, 15, 16), generator=generator).to(torch.uint8)
    blocks.view(-1)[:256] = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return blocks, scales


def _transformers(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mxfp4 = pytest.importorskip(
        "transformers.integrations.mxfp4", reason="transformers is the oracle of this test"
    )
    return mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_equals_transformers_mxfp4(gpt_oss_weights, dtype: torch.dtype) -> None:
    blocks, scales = gpt_oss_weights
    t = MXTensor(blocks.flatten(-2), scales, FORMATS["mxfp4"])
    theirs = _transformers(blocks, scales, dtype)  # [E, K, N]
    assert_same_values(dequantize_blocks(t, dtype), theirs.transpose(1, 2).contiguous())


# --- planted errors: what the comparators above must catch ---------------------------------------


def _swap_nibbles(t: MXTensor) -> MXTensor:
    return MXTensor((t.qdata << 4) | (t.qdata >> 4), t.scale, t.format)


def _shift_scales(t: MXTensor) -> MXTensor:
    return MXTensor(t.qdata, t.scale.roll(1, -1), t.format)


def _next_code(t: MXTensor) -> MXTensor:
    qdata = t.qdata.clone()
    qdata[-1, -1] ^= 1
    return MXTensor(qdata, t.scale, t.format)


@pytest.mark.parametrize(
    "plant",
    [_swap_nibbles, _shift_scales, _next_code],
    ids=["swapped_nibbles", "scale_off_by_one_block", "one_code_off_by_one"],
)
def test_planted_errors_are_caught(plant) -> None:
    x = _data("normal").float() * torch.exp2(torch.arange(4.0)).repeat_interleave(32)
    good = quantize_blocks(x, "mxfp4")
    values = dequantize_blocks(good)
    assert_represents(good, values)
    bad = plant(good)
    with pytest.raises(AssertionError, match="values differ"):
        assert_represents(bad, values)
    with pytest.raises(AssertionError, match="differ, first at"):
        assert_same_bits(
            torch.cat([bad.qdata, bad.scale], -1),
            torch.cat([good.qdata, good.scale], -1),
            "planted",
        )


@pytest.mark.parametrize(
    "plant", [_swap_nibbles, _shift_scales], ids=["swapped_nibbles", "scale_off_by_one_block"]
)
def test_planted_errors_differ_from_transformers(gpt_oss_weights, plant) -> None:
    blocks, scales = gpt_oss_weights
    bad = plant(MXTensor(blocks.flatten(-2), scales, FORMATS["mxfp4"]))
    theirs = _transformers(blocks, scales, torch.float32).transpose(1, 2).contiguous()
    with pytest.raises(AssertionError, match="values differ"):
        assert_represents(bad, theirs)


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: quantize_blocks([1.0], "mxfp4"), TypeError, "x — need a torch.Tensor, got list"),
        (
            lambda: quantize_blocks(torch.ones(32).int(), "mxfp4"),
            TypeError,
            "x.dtype — need float32 or bfloat16 or float16 or float64, got int32",
        ),
        (
            lambda: quantize_blocks(torch.ones(32), "mxfp4", rule="up"),
            ValueError,
            "rule — need a ScaleRule ('floor', 'rceil', 'ceil' or 'even'), got 'up'",
        ),
        (lambda: quantize_blocks(torch.ones(32), "mxfp6"), ValueError, "got 'mxfp6'"),
        (
            lambda: quantize_blocks(torch.ones(2, 50), "mxfp4"),
            ValueError,
            "x.shape[-1] — need a multiple of 32, got 50; pad the axis with 14 zeros",
        ),
        (
            lambda: quantize_blocks(torch.ones(33, 32), "mxfp8", axis=0),
            ValueError,
            "x.shape[-2] — need a multiple of 32, got 33; pad the axis with 31 zeros",
        ),
        (
            lambda: quantize_blocks(torch.ones(32), "mxfp4", axis=1),
            ValueError,
            "axis — need an axis of a 1-dimensional tensor, got 1",
        ),
        (
            lambda: quantize_blocks(torch.tensor(1.0), "mxfp4"),
            ValueError,
            "axis — need an axis of a 0-dimensional tensor, got -1",
        ),
        (lambda: dequantize_blocks(torch.ones(32)), TypeError, "t — need an MXTensor, got Tensor"),
        (
            lambda: dequantize_blocks(quantize_blocks(torch.ones(32), "mxfp4"), torch.int32),
            TypeError,
            "dtype — need float32, bfloat16, float16 or float64, got torch.int32",
        ),
    ],
    ids=[
        "no_tensor",
        "integers",
        "rule_as_text",
        "unknown_format",
        "ragged",
        "ragged_axis_0",
        "axis_too_large",
        "no_dimensions",
        "no_mxtensor",
        "integer_output",
    ],
)
def test_bad_input_is_named(call, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call()


@pytest.mark.parametrize(
    "call",
    [dequantize_blocks, fold_certificate, fold],
    ids=["dequantize_blocks", "fold_certificate", "fold"],
)
def test_a_backend_layout_is_refused(call) -> None:
    t = quantize_blocks(torch.ones(2, 32), "mxfp4")
    object.__setattr__(t, "layout", "swizzled")
    with pytest.raises(ValueError, match=r"t\.layout — need Layout\.ROW_MAJOR, got swizzled"):
        call(t)
