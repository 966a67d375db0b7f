"""Encoded rows of the Hopper GEMMs, bit for bit: one pass against two, and against the oracle."""

from __future__ import annotations

import pytest
import torch

import mxpert
from mxpert import ScaleRule, SiLU
from mxpert.core.problem import MoEOptions
from mxpert.formats import FP8_TOKEN, quantize_blocks, quantize_token_rows
from mxpert.routing.plan import TOKEN_MASK, RoutingPlan
from mxpert.testing.numerics import assert_exact

rows = pytest.importorskip("mxpert.moe.hopper.encode", reason="needs Gluon")

pytestmark = pytest.mark.usefixtures("hopper", "nan_scratch")

EXPERTS, TOP_K, UNIT = 9, 3, 16
DEPTHS = (96, 384, 2880, 7168, 8224)
"""Less than a unit; steps of one and of several units, full and partial; more than one step."""

TOKENS = (1, 16, 333, 4999)
"""Few tokens: one row per program. From 4096 rows on a program has several, in few threads."""


def values(num_rows: int, depth: int, device: torch.device) -> torch.Tensor:
    """bfloat16 rows over many binades, with blocks and rows of zeros, infinities, tiny values."""
    generator = torch.Generator(device).manual_seed(depth)
    x = torch.randn(num_rows, depth, generator=generator, device=device)
    x *= torch.exp(3 * torch.randn(x.shape, generator=generator, device=device))
    x = x.bfloat16()
    blocks = x.unflatten(1, (-1, 32))
    blocks[::3, 1] = 0
    x[1::7] = 0
    x[2::7] *= 2.0**-120
    x[3::7] *= 2.0**-20
    x[4::7, 5] = -0.0
    return x


def plan_of(num_tokens: int, device: torch.device) -> RoutingPlan:
    generator = torch.Generator(device).manual_seed(num_tokens)
    logits = torch.randn(num_tokens, EXPERTS, generator=generator, device=device)
    topk_weights, topk_ids = mxpert.route_topk(logits, TOP_K)
    return mxpert.make_routing_plan(
        topk_weights, topk_ids, num_experts=EXPERTS, routing_block_m=UNIT
    )


def encode(
    x: torch.Tensor | mxpert.MXTensor, plan: RoutingPlan, options: MoEOptions, scatter: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode the rows in use; return code bytes [T * k, K padded] and scales [T * k]."""
    found = rows.encode_rows(x, plan, plan.capacity, options, scatter=scatter)
    places = plan.slot_rows.flatten().long()
    return found.codes.view(torch.uint8)[places], found.scale[places]


def stored(codes: torch.Tensor) -> torch.Tensor:
    """Permute codes [M, K] to the K order of the GEMMs, padded with zeros."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 128))
    return codes.unflatten(1, (-1, 4, 8, 4)).transpose(2, 3).flatten(1)


def source_rows(plan: RoutingPlan, scatter: bool) -> torch.Tensor:
    """Index in x of each row in use."""
    places = plan.slot_rows.flatten().long()
    return (plan.sorted_token_ids[places] & TOKEN_MASK).long() if scatter else places


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("scatter", [True, False], ids=["tokens", "sorted"])
@pytest.mark.parametrize("rule", ScaleRule, ids=lambda rule: rule.name.lower())
@pytest.mark.parametrize("a_format", ["mxfp8", "mxfp4"])
def test_one_pass_equals_quantise_then_rebase(
    a_format: str, rule: ScaleRule, scatter: bool, depth: int, num_tokens: int, device: torch.device
) -> None:
    plan, options = plan_of(num_tokens, device), MoEOptions(SiLU(), a_format, rule)
    x = values(num_tokens if scatter else plan.capacity, depth, device)
    if num_tokens > 1:
        x[-1, 7] = float("inf")
    codes, scale = encode(x, plan, options, scatter)
    expected_codes, expected_scale = encode(
        quantize_blocks(x, a_format, -1, rule), plan, options, scatter
    )
    assert_exact(scale, expected_scale, "scale")
    lost = scale.isnan()  # whatever their codes are
    assert_exact(lost, x.isinf().any(1)[source_rows(plan, scatter)], "rows with an infinity")
    assert_exact(codes[~lost], expected_codes[~lost], "codes")


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("scatter", [True, False], ids=["tokens", "sorted"])
def test_token_rows_are_the_oracles(
    scatter: bool, depth: int, num_tokens: int, device: torch.device
) -> None:
    plan, options = plan_of(num_tokens, device), MoEOptions(SiLU(), FP8_TOKEN)
    x = values(num_tokens if scatter else plan.capacity, depth, device)
    codes, scale = encode(x, plan, options, scatter)
    expected = quantize_token_rows(x[source_rows(plan, scatter)])
    assert_exact(scale, expected.scale, "scale")
    assert_exact(codes, stored(expected.qdata), "codes")


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("scatter", [True, False], ids=["tokens", "sorted"])
def test_split_rows_are_hi_and_lo(
    scatter: bool, depth: int, num_tokens: int, device: torch.device
) -> None:
    plan, options = plan_of(num_tokens, device), MoEOptions(SiLU(), "bf16")
    x = values(num_tokens if scatter else plan.capacity, depth, device)
    found = rows.encode_rows(x, plan, plan.capacity, options, scatter=scatter)
    places = plan.slot_rows.flatten().long()
    scale = found.scale[places]
    scaled = x[source_rows(plan, scatter)].float() / scale[:, None]
    hi = scaled.to(torch.float8_e4m3fn)
    lo = ((scaled - hi.float()) * 16).to(torch.float8_e4m3fn)
    assert (scaled.abs().amax(1) <= 448).all(), "hi saturates"
    assert (torch.frexp(scale).mantissa == 0.5).all(), "scales are powers of two"
    codes = found.codes.unflatten(0, (2, -1))[:, places].float()
    assert_exact(codes[0], stored(hi.float()), "hi", ignore_zero_sign=True)
    assert_exact(codes[1], stored(lo.float()), "lo", ignore_zero_sign=True)


def scaled_rows(x: torch.Tensor, a_format: str, scale: torch.Tensor) -> torch.Tensor:
    """Values of bfloat16 rows as their activation format holds them, over the rows' scales."""
    if a_format == FP8_TOKEN:
        return quantize_token_rows(x).qdata.view(torch.float8_e4m3fn).float()
    values = x if a_format == "bf16" else quantize_blocks(x, a_format, -1).dequantize()
    return values.float() / scale[:, None]  # by powers of two


@pytest.mark.parametrize(
    "depth, num_tokens", [(96, 1), (384, 16), (2880, 333), (2880, 4999), (7168, 16), (8224, 333)]
)
@pytest.mark.parametrize("scatter", [True, False], ids=["tokens", "sorted"])
@pytest.mark.parametrize(
    "a_format, dtype",
    [("bf16", torch.bfloat16)]
    + [(name, torch.float16) for name in ("bf16", FP8_TOKEN, "mxfp8", "mxfp4", "coded")],
)
def test_rows_of_16_bits_hold_their_formats_values(
    a_format: str,
    dtype: torch.dtype,
    scatter: bool,
    depth: int,
    num_tokens: int,
    device: torch.device,
) -> None:
    """Their values over the row's scale, each 16 of K permuted: exact as bfloat16, and as float16
    up to half of its smallest number. "coded": MXFP8 rows."""
    name = "mxfp8" if a_format == "coded" else a_format
    plan, options = plan_of(num_tokens, device), MoEOptions(SiLU(), name)
    x = values(num_tokens if scatter else plan.capacity, depth, device)
    given = quantize_blocks(x, name, -1) if a_format == "coded" else x
    found = rows.encode_rows(
        given, plan, plan.capacity, options, scatter=scatter, in_order=True, dtype=dtype
    )
    places = plan.slot_rows.flatten().long()
    scale = found.scale[places]
    assert not scale.isnan().any()
    expected = scaled_rows(x[source_rows(plan, scatter)], name, scale)
    expected = torch.nn.functional.pad(expected, (0, -depth % 128))
    k = torch.arange(16, device=device)  # 4 t + j lies at 8 (j // 2) + 2 t + j % 2
    source = torch.empty_like(k)
    source[8 * (k % 4 // 2) + 2 * (k // 4) + k % 2] = k
    wanted = expected.unflatten(1, (-1, 16))[:, :, source].flatten(1)
    if dtype is torch.float16:
        assert ((wanted - wanted.half().float()).abs() <= 2.0**-25).all()
        wanted = wanted.half().float()
    assert found.codes.dtype is dtype
    assert_exact(found.codes[places].float(), wanted, "rows", ignore_zero_sign=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("a_format", ["bf16", FP8_TOKEN, "mxfp8", "mxfp4"])
def test_bad_values_spoil_their_row(a_format: str, bad: float, device: torch.device) -> None:
    """NaN and infinity make the row's scale NaN, and change no bit of another row."""
    plan, options = plan_of(16, device), MoEOptions(SiLU(), a_format)
    x = values(16, 2880, device)
    clean, clean_scale = encode(x, plan, options, True)
    x[5, 100] = bad
    codes, scale = encode(x, plan, options, True)
    token = torch.arange(16, device=device).repeat_interleave(TOP_K)
    assert_exact(codes[token != 5], clean[token != 5], "other rows")
    assert_exact(scale[token != 5], clean_scale[token != 5], "other scales")
    assert scale[token == 5].isnan().all()
