"""INT4, NVFP4 and MXFP8 weights in the layer for a few tokens, against decoded float64."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import mxpert
from mxpert.configs import MoEConfig
from mxpert.core.describe import describe
from mxpert.core.problem import SiLU, SwiGLU
from mxpert.formats.weight_tensor import WeightTensor
from mxpert.moe.hopper import few_tokens_limits
from mxpert.testing.numerics import assert_close_relative, assert_exact
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from support.hopper import layer_tolerance
from support.layers import explain_layer
from support.poison import poison_prepared
from support.races import hunt, redraw
from support.weight_formats import WITH_GROUPS, in_format
from tests.moe.hopper.problems import first_tokens, reference, run

pytestmark = pytest.mark.usefixtures("only_hopper", "nan_scratch")

heuristics = pytest.importorskip("mxpert.moe.hopper.config", reason="needs Gluon")
group_layout = pytest.importorskip("mxpert.moe.hopper.group_layout")

A_FORMATS = ("bf16", "mxfp8", "mxfp4")
MOST_TOKENS = 8
SHAPES = {
    "small": MoEShape(704, 384, 9, 3, SwiGLU(), has_bias=True),
    "even": MoEShape(768, 384, 9, 3, SiLU()),
    "wide": MoEShape(7168, 384, 24, 8, SiLU()),
}
"""`small` has odd numbers of row units and depth units, and half a unit of depth. Groups of 128
need the depth of `even`. The last stage of the ring has one unit in `small`, two in `even`."""

NAMES = (*WITH_GROUPS, "int4_g32-float32", "int4_g128-float16", "nvfp4-no_factors")


def shape_of(name: str, shape: str) -> str:
    return "even" if shape == "small" and name.startswith("int4_g128") else shape


@functools.cache
def problem(name: str, shape: str, device: torch.device) -> MoEInputs:
    """A layer with row-major weights on the device."""
    made = random_moe_problem(SHAPES[shape_of(name, shape)], MOST_TOKENS)
    format, _, kind = name.partition("-")
    weights = in_format(made.weights, format, exact=False, zero_points=kind == "zero_points")
    parts = weights.gate_up_proj, weights.down_proj
    if kind in ("float32", "float16"):
        parts = tuple(replace(p, scale=p.scale.to(getattr(torch, kind))) for p in parts)
    if kind == "no_factors":
        parts = tuple(WeightTensor(p.qdata, p.scale, p.format) for p in parts)
    weights = replace(weights, gate_up_proj=parts[0], down_proj=parts[1]).to(device)
    x, ids, factors = (t.to(device) for t in (made.x, made.topk_ids, made.topk_weights))
    return replace(made, weights=weights, x=x, topk_ids=ids, topk_weights=factors)


@functools.cache
def prepared(name: str, shape: str, device: torch.device) -> MoEInputs:
    """The same, prepared, with poison in what pads the weights."""
    inputs = problem(name, shape, device)
    weights = inputs.weights.prepare(device=device)
    assert isinstance(weights.layout, type(group_layout.HOPPER_GROUPS))
    for part in (weights.gate_up_proj, weights.down_proj):
        poison_prepared(part)
    return replace(inputs, weights=weights)


@functools.cache
def expected(name: str, a_format: str, shape: str, device: torch.device) -> torch.Tensor:
    return reference(problem(name, shape, device), a_format)


def one_launch(inputs: MoEInputs, a_format: str, **options: Any) -> MoEConfig | None:
    """The config of one launch; None if it does not serve so many tokens."""
    given = inputs.x, inputs.weights, inputs.topk_weights, inputs.topk_ids
    more = dict(activation=inputs.activation, activation_format=a_format, **options)
    found = describe(mxpert.fused_moe, *given, **more)
    if few_tokens_limits.unsupported(found):
        return None
    config: MoEConfig = heuristics.few_tokens_config(found)
    return config


def check(name: str, a_format: str, inputs: MoEInputs, num_tokens: int, shape: str) -> torch.Tensor:
    given = first_tokens(inputs, num_tokens)
    config = one_launch(given, a_format)
    assert config is not None
    with mxpert.override(backend="hopper", config=config):
        y = run(given, a_format, out_dtype=torch.float32)
    wanted = expected(name, a_format, shape, inputs.x.device)[:num_tokens]
    bound = layer_tolerance(a_format, torch.float32, inputs, num_tokens)
    assert_close_relative(y, wanted, bound, f"{name}, T = {num_tokens}")
    return y


@pytest.mark.parametrize("shape", ["small", "wide"])
@pytest.mark.parametrize("a_format", A_FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_layers(name: str, a_format: str, shape: str, device: torch.device) -> None:
    """Every number of tokens, with poisoned padding; repeats give the same bits."""
    inputs = prepared(name, shape, device)
    served = [n for n in range(1, 9) if one_launch(first_tokens(inputs, n), a_format)]
    short = a_format == "bf16" or shape == "wide" or name.startswith("nvfp4")
    most = 4 if short else 8
    assert served == [*range(1, most + 1)]
    for num_tokens in served:
        y = check(name, a_format, inputs, num_tokens, shape)
        for _ in range(3):
            again = check(name, a_format, inputs, num_tokens, shape)
            assert_exact(again, y, f"T = {num_tokens}")


@pytest.mark.parametrize("a_format", A_FORMATS)
@pytest.mark.parametrize("num_tokens", [3, 4])
def test_nvfp4_of_more_than_two_tokens_takes_two_launches(
    num_tokens: int, a_format: str, device: torch.device
) -> None:
    """Each gives the bits of its tokens alone, from ids and from logits."""
    inputs = prepared("nvfp4", "small", device)
    x, weights = inputs.x[:num_tokens], inputs.weights
    options = dict(activation=inputs.activation, activation_format=a_format)
    logits = torch.randn(num_tokens, weights.num_experts, device=device)
    top_k = inputs.topk_ids.shape[1]
    with mxpert.override():
        factors, ids = mxpert.route_topk(logits, top_k)
    config = one_launch(first_tokens(inputs, num_tokens), a_format)
    with mxpert.override(backend="hopper", config=config):
        parts = [
            mxpert.fused_moe(x[rows], weights, factors[rows], ids[rows], **options)
            for rows in (slice(2), slice(2, num_tokens))
        ]
        for _ in range(3):
            y = mxpert.fused_moe(x, weights, factors, ids, **options)
            assert_exact(y, torch.cat(parts), "from ids")
            y = mxpert.fused_moe_from_logits(x, weights, logits, top_k, **options)
            assert_exact(y, torch.cat(parts), "from logits")


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_the_comparison_catches_planted_errors(name: str, device: torch.device) -> None:
    inputs = problem(name, "small", device)
    weights = inputs.weights
    mistakes = [lambda part: replace(part, scale=part.scale.roll(1, dims=-1))]
    if "zero" in name:
        mistakes.append(lambda part: replace(part, zero_point=part.zero_point + 1))
    if name == "nvfp4":
        mistakes.append(lambda part: replace(part, row_scale=part.row_scale.roll(1, dims=-1)))
    for mistake in mistakes:
        gate_up, down = mistake(weights.gate_up_proj), mistake(weights.down_proj)
        wrong = replace(weights, gate_up_proj=gate_up, down_proj=down).prepare(device=device)
        with pytest.raises(AssertionError):
            check(name, "mxfp8", replace(inputs, weights=wrong), 2, "small")


@pytest.mark.parametrize("name", ["int4_g32", "int4_g64", "int4_g128"])
def test_a_bad_expert_is_its_own_matter(name: str, device: torch.device) -> None:
    """NaN in the scales of one expert reaches the tokens that name it, and no others."""
    inputs = problem(name, "small", device)
    weights = inputs.weights
    parts = [replace(p, scale=p.scale.clone()) for p in (weights.gate_up_proj, weights.down_proj)]
    for part in parts:
        part.scale[4] = torch.nan
    weights = replace(weights, gate_up_proj=parts[0], down_proj=parts[1]).prepare(device=device)
    ids = torch.tensor([[3, 4, 5], [2, 3, 5]], dtype=torch.int32, device=device)
    given = replace(first_tokens(inputs, 2), topk_ids=ids)
    good = replace(given, weights=prepared(name, "small", device).weights)
    bad = replace(given, weights=weights)
    with mxpert.override(backend="hopper", config=one_launch(good, "bf16")):
        y, wanted = run(bad, "bf16"), run(good, "bf16")
    assert y[0].isnan().all()
    assert_exact(y[1], wanted[1], "the other token")


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_the_heuristic_takes_one_launch(name: str, device: torch.device) -> None:
    inputs = first_tokens(prepared(name, "small", device), 1)
    with mxpert.override():
        assert "few_tokens" in str(explain_layer(inputs))
    y = check(name, "bf16", prepared(name, "small", device), 1, "small")
    with mxpert.override():
        assert_exact(run(inputs, "bf16", out_dtype=torch.float32), y, "the heuristic")


def test_scales_of_two_kinds_take_two_stages(device: torch.device) -> None:
    inputs = first_tokens(problem("int4_g32", "small", device), 1)
    weights = inputs.weights
    down = replace(weights.down_proj, scale=weights.down_proj.scale.float())
    mixed = replace(weights, down_proj=down)
    given = replace(inputs, weights=mixed.prepare(device=device))
    with mxpert.override(backend="hopper"):
        y = run(given, "bf16", out_dtype=torch.float32)
    wanted = expected("int4_g32", "bf16", "small", device)[:1]
    assert_close_relative(y, wanted, layer_tolerance("bf16", torch.float32, inputs, 1), "mixed")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("a_format, num_tokens", [("bf16", 1), ("mxfp8", 2)])
@pytest.mark.parametrize(
    "name", ["int4_g128-zero_points", "int4_g64", "int4_g32", "nvfp4", "mxfp8_e4m3"]
)
def test_repeats_beside_other_work(
    name: str, a_format: str, num_tokens: int, device: torch.device, pytestconfig: pytest.Config
) -> None:
    """Graphs of 50 layers give the same bits while other kernels compete for the SMs."""
    repeats = pytestconfig.getoption("--race-repeats")
    inputs = first_tokens(prepared(name, "wide", device), num_tokens)
    inputs = replace(inputs, x=inputs.x.clone(), topk_ids=inputs.topk_ids.clone())
    generator = torch.Generator(device).manual_seed(1)

    def layer_bits() -> tuple[torch.Tensor, ...]:
        return (run(inputs, a_format, out_dtype=torch.float32).view(torch.int32),)

    with mxpert.override(config=one_launch(inputs, a_format), backend="hopper"):
        assert layer_bits()[0].any()
        found = hunt(layer_bits, lambda: redraw(inputs, generator), repeats, device, per_graph=50)
    assert found.mismatches == 0, f"{found.mismatches} values differed in {repeats} repeats"
