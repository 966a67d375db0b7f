"""Scales that reach further than a block: against an independent loop, and rebasing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import mxpert
from mxpert.formats import (
    MXTensor,
    ScaleRule,
    ScaleSpan,
    count_wide_blocks,
    dequantize_blocks,
    quantize_blocks,
    quantize_spans,
)
from mxpert.formats.codec import block_scale, encode
from mxpert.formats.spec import get_format

FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2")
FIXED = (ScaleSpan.BLOCK, ScaleSpan.SPAN128, ScaleSpan.ROW)
STARTS = (0, 32, 32, 256, 320)
WIDTH = 384


def wide(*size: int, seed: int = 0) -> torch.Tensor:
    """Normal values whose blocks differ by up to 2^±10, with zeros, blocks of zeros, NaN, Inf."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn(*size[:-1], size[-1] // 32, 32, generator=generator)
    x = blocks * torch.exp2(torch.randint(-10, 11, (*blocks.shape[:-1], 1), generator=generator))
    x = x.flatten(-2)
    x[..., ::13] = 0
    x[0], x[1, :64] = 0, 0
    x[2, 8], x[3, size[-1] // 2 + 6] = math.nan, math.inf
    return x


def spans_of(length: int, span: ScaleSpan, starts: tuple[int, ...] | None) -> list[slice]:
    """Every span as positions, from the definition."""
    edges = sorted({0, length, *(starts or ())})
    step = {ScaleSpan.BLOCK: 32, ScaleSpan.SPAN128: 128, ScaleSpan.ROW: length}[span]
    return [
        slice(at, min(at + step, end))
        for begin, end in itertools.pairwise(edges)
        for at in range(begin, end, step)
    ]


@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole", "groups"])
@pytest.mark.parametrize("rule", ScaleRule, ids=lambda rule: rule.name)
@pytest.mark.parametrize("span", FIXED, ids=lambda span: span.name)
@pytest.mark.parametrize("fmt", FORMATS)
def test_quantize_spans(
    fmt: str, span: ScaleSpan, rule: ScaleRule, starts: tuple[int, ...] | None
) -> None:
    x = wide(5, WIDTH)
    group_starts = None if starts is None else torch.tensor(starts)
    actual = quantize_spans(x, fmt, rule, span, group_starts=group_starts)
    assert actual.scale_span is span
    low = 0 if span is ScaleSpan.BLOCK else 1
    for part in spans_of(WIDTH, span, starts):
        byte = block_scale(x[:, part].abs().amax(1), fmt, rule).clamp(min=low)
        scaled = x[:, part].double() * torch.exp2(127.0 - byte.double())[:, None]
        scaled[byte == 255] = math.nan
        blocks = slice(part.start // 32, part.stop // 32)
        assert (actual.scale[:, blocks] == byte[:, None]).all()
        assert torch.equal(actual.qdata[:, part], encode(scaled, get_format(fmt).element))


@pytest.mark.parametrize("span", FIXED, ids=lambda span: span.name)
def test_a_block_span_is_the_plain_quantisation(span: ScaleSpan) -> None:
    x = wide(5, 32)  # one block: every span is that block
    x[4] = 2.0**-140  # below byte 1, which spans do not go below
    plain, actual = (
        quantize_blocks(x[:4], "mxfp8"),
        quantize_spans(x, "mxfp8", ScaleRule.RCEIL, span),
    )
    assert torch.equal(actual.qdata[:4], plain.qdata)
    assert torch.equal(actual.scale[:4], plain.scale)
    assert actual.scale[4, 0] == (0 if span is ScaleSpan.BLOCK else 1)


@pytest.mark.parametrize("span", FIXED, ids=lambda span: span.name)
@pytest.mark.parametrize("fmt", FORMATS)
def test_rebase(fmt: str, span: ScaleSpan) -> None:
    """Scales as quantised with the span; values moved by at most half of a subnormal step."""
    x = wide(5, WIDTH)[[0, 1, 4]]  # finite
    blocks = quantize_blocks(x, fmt)
    actual = mxpert.rebase(blocks, span)
    expected = quantize_spans(x, fmt, ScaleRule.RCEIL, span)
    assert torch.equal(actual.scale, expected.scale)
    before, after = dequantize_blocks(blocks), dequantize_blocks(actual)
    element = get_format(fmt).element
    step = 2.0 ** (1 - element.bias - element.mantissa_bits)
    bound = step / 2 * torch.exp2(actual.scale.float() - 127).repeat_interleave(32, 1)
    assert ((after - before).abs() <= bound).all()
    exact = before.abs() >= step * 2**element.mantissa_bits * 2 * bound / step
    assert exact.any()
    assert torch.equal(after[exact], before[exact])


def test_rebase_keeps_nan() -> None:
    x = wide(5, WIDTH)
    assert torch.equal(
        dequantize_blocks(mxpert.rebase(quantize_blocks(x, "mxfp8"), ScaleSpan.ROW))[2]
        .isnan()
        .nonzero()[:, 0],
        torch.arange(32),
    )


@pytest.mark.parametrize(("fmt", "free"), [("mxfp8_e4m3", 9), ("mxfp8_e5m2", 25)])
def test_the_certificate_counts_wide_blocks(fmt: str, free: int) -> None:
    """Blocks `free` binades down are free, one more is not; groups are looked at one by one."""
    x = torch.ones(2, 128)
    x[0, 32:64], x[0, 64:96], x[1, :64] = 2.0**-free, 2.0 ** -(free + 1), 0
    blocks = quantize_blocks(x, fmt)
    starts = torch.tensor([0, 64, 128])
    assert int(count_wide_blocks(blocks)) == 1
    assert int(count_wide_blocks(blocks, group_starts=starts)) == 1
    assert int(count_wide_blocks(blocks, group_starts=torch.tensor([0, 96, 128]))) == 1
    assert int(count_wide_blocks(blocks, group_starts=torch.tensor([0, 32, 96, 128]))) == 0


@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole", "groups"])
@pytest.mark.parametrize(("fmt", "free"), [("mxfp8_e4m3", 9), ("mxfp8_e5m2", 25)])
def test_auto(fmt: str, free: int, starts: tuple[int, ...] | None) -> None:
    """Rows as long as every block is near its row's maximum; one block too far: blocks."""
    x = torch.ones(3, WIDTH)
    x[1, 64:96], x[2, :32] = 2.0**-free, 0
    group_starts = None if starts is None else torch.tensor(starts)

    def quantise(span: ScaleSpan) -> MXTensor:
        return quantize_spans(x, fmt, ScaleRule.RCEIL, span, group_starts=group_starts)

    for expected in (ScaleSpan.ROW, ScaleSpan.BLOCK):
        auto, like = quantise(ScaleSpan.AUTO), quantise(expected)
        assert auto.wide_blocks is not None
        assert (auto.wide_blocks.item() > 0) == (expected is ScaleSpan.BLOCK)
        assert torch.equal(auto.qdata, like.qdata)
        assert torch.equal(auto.scale, like.scale)
        x[1, 64:96] /= 2


def test_auto_moves_with_its_decision() -> None:
    moved = quantize_spans(torch.ones(2, 64), "mxfp8", ScaleRule.RCEIL, ScaleSpan.AUTO).to("meta")
    assert moved.wide_blocks is not None
    assert moved.wide_blocks.device.type == moved.qdata.device.type == "meta"


def test_auto_lets_one_block_in_1024_pass() -> None:
    x = torch.ones(32, 64 * 32)
    for count, wide in ((1, -1), (2, 0), (3, 1)):
        x[count, :32] = 2.0**-12
        assert quantize_spans(x, "mxfp8", ScaleRule.RCEIL, ScaleSpan.AUTO).wide_blocks.tolist() == [
            wide
        ]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: mxpert.rebase(torch.ones(2, 32), ScaleSpan.ROW), TypeError, "MXTensor"),
        (
            lambda: mxpert.rebase(quantize_blocks(torch.ones(2, 32), "mxfp8"), "rows"),
            ValueError,
            "ScaleSpan",
        ),
        (
            lambda: mxpert.rebase(quantize_blocks(torch.ones(2, 32), "mxfp4"), ScaleSpan.ROW),
            ValueError,
            "mxfp8",
        ),
        (
            lambda: mxpert.rebase(quantize_blocks(torch.ones(32, 2), "mxfp8", 0), ScaleSpan.ROW),
            ValueError,
            "axis",
        ),
        (
            lambda: mxpert.rebase(quantize_blocks(torch.ones(2, 32), "mxfp8"), ScaleSpan.AUTO),
            ValueError,
            "quantise with AUTO",
        ),
        (
            lambda: mxpert.quantize_dual(torch.ones(32, 32), scale_span="rows"),
            ValueError,
            "ScaleSpan",
        ),
        (
            lambda: mxpert.quantize_dual(torch.ones(32, 32), scale_span=(ScaleSpan.ROW,)),
            TypeError,
            "ScaleSpan",
        ),
        (lambda: mxpert.training.MXFP8Recipe(scale_span="rows"), ValueError, "ScaleSpan"),
    ],
    ids=["plain", "string", "mxfp4", "axis", "auto", "dual", "pair", "recipe"],
)
def test_bad_input(call, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


SNR_GATE = 28.0
"""dB, contract for e4m3: the reference systems measured 28.2."""


def snr(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return 20 * math.log10(expected.norm() / (actual.double() - expected).norm())


@pytest.mark.parametrize("data", ["normal", "heavy", "spread", "outlier"])
@pytest.mark.parametrize("span", FIXED, ids=lambda span: span.name)
def test_snr_of_a_product(span: ScaleSpan, data: str) -> None:
    """What longer spans cost against 1×32, gated per kind of data; outlier channels too."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(192, 2048, generator=generator) for _ in range(2))
    if data == "heavy":  # Student's t with 3 degrees of freedom
        a, b = (
            x / (torch.randn(3, *x.shape, generator=generator).square().mean(0)).sqrt()
            for x in (a, b)
        )
    elif data == "spread":
        a *= torch.exp2(torch.randint(-6, 7, (192, 64), generator=generator)).repeat_interleave(
            32, 1
        )
    elif data == "outlier":  # channels 2^6 larger
        a[:, ::256] *= 64
    a, b = a.bfloat16(), b.bfloat16()
    expected = a.double() @ b.double().T

    def product(spans: ScaleSpan) -> torch.Tensor:
        values = (
            dequantize_blocks(quantize_spans(x, "mxfp8", ScaleRule.RCEIL, spans)).double()
            for x in (a, b)
        )
        left, right = values
        return left @ right.T

    cost = snr(product(ScaleSpan.BLOCK), expected) - snr(product(span), expected)
    # e4m3 keeps 14 binades below a span's maximum at full precision: less than 0.2 dB is lost while
    # blocks differ by no more than about 9 binades (the worst kind here: 2 × 6 and the normal
    # distribution's own spread of block maxima).
    assert cost <= 0.2
    if data != "heavy":  # whose own 1×32 quantisation already costs more than the contract's 0.2 dB
        assert snr(product(span), expected) >= SNR_GATE
