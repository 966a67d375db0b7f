"""INT4, NVFP4 and MXFP8 weights in the Hopper kernels on a GPU, against decoded float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert import SwiGLU
from mxpert.core.problem import MoEConfig
from mxpert.formats.layouts import WeightLayout
from mxpert.formats.weight_tensor import WeightLike
from mxpert.testing.numerics import assert_close_relative, assert_exact
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from support.hopper import layer_tolerance
from support.layers import explain_layer
from support.poison import poison_prepared
from support.weight_formats import WITH_GROUPS, in_format
from tests.moe.hopper.problems import first_tokens, reference, run

pytestmark = pytest.mark.usefixtures("only_hopper", "nan_scratch")

heuristics = pytest.importorskip("mxpert.moe.hopper.config", reason="needs Gluon")
group_layout = pytest.importorskip("mxpert.moe.hopper.group_layout")


A_FORMATS = ("bf16", "mxfp8", "fp8_token")
TOKENS = (1, 17, 129, 777)


def layout_of(name: str) -> WeightLayout:
    """What `prepare` takes: float16 holds INT4 with bfloat16 scales and without zero points."""
    if name.startswith("int4") and "zero" not in name:
        return group_layout.HOPPER_GROUPS_FLOAT16
    return group_layout.HOPPER_GROUPS


def tiles_of(a_format: str, name: str) -> dict[str, MoEConfig]:
    """Every tile, those of decode with their depth split, and stages with different rows."""
    found = {}
    hi_lo = a_format == "bf16"
    float16 = hi_lo and layout_of(name) is group_layout.HOPPER_GROUPS_FLOAT16
    for tile, config in heuristics.tiles(hi_lo, name.partition("-")[0], float16).items():
        found[tile] = MoEConfig(config.block_m, config, config)
        if tile.startswith("decode"):
            split = replace(config, k_splits=3), replace(config, k_splits=2)
            found[tile + "_split"] = MoEConfig(config.block_m, *split)
        if config.rows_dtype.itemsize == 2:
            decode = replace(found["decode32"].gate_up, k_splits=2)
            found[f"decode_{tile}"] = MoEConfig(config.block_m, decode, config)
            found[f"{tile}_decode"] = MoEConfig(config.block_m, config, decode)
    return found


CASES = [
    pytest.param(name, a_format, tile, id=f"{name}-{a_format}-{tile}")
    for name in WITH_GROUPS
    for a_format in A_FORMATS
    for tile in tiles_of(a_format, name)
    if a_format != "fp8_token" or tile == "decode16"
]


@functools.cache
def problem(name: str, device: torch.device) -> MoEInputs:
    """Odd numbers of row units (11) and depth units (3); but for groups of 128 half a unit."""
    name, _, zeros = name.partition("-")
    shape = MoEShape(768 if name == "int4_g128" else 704, 384, 9, 3, SwiGLU(), has_bias=True)
    made = random_moe_problem(shape, max(TOKENS))
    weights = in_format(made.weights, name, exact=False, zero_points=bool(zeros)).to(device)
    x, ids, factors = (t.to(device) for t in (made.x, made.topk_ids, made.topk_weights))
    return replace(made, weights=weights, x=x, topk_ids=ids, topk_weights=factors)


@functools.cache
def prepared(name: str, device: torch.device) -> MoEInputs:
    """The same, prepared, with poison in what pads the weights."""
    inputs = problem(name, device)
    weights = inputs.weights.prepare(device=device)
    assert weights.layout is layout_of(name)
    for part in (weights.gate_up_proj, weights.down_proj):
        poison_prepared(part)
    return replace(inputs, weights=weights)


@functools.cache
def expected(name: str, a_format: str, device: torch.device) -> torch.Tensor:
    return reference(problem(name, device), a_format)


def check(name: str, a_format: str, inputs: MoEInputs, num_tokens: int) -> torch.Tensor:
    y = run(first_tokens(inputs, num_tokens), a_format, out_dtype=torch.float32)
    wanted = expected(name, a_format, inputs.x.device)[:num_tokens]
    bound = layer_tolerance(a_format, torch.float32, inputs, num_tokens)
    assert_close_relative(y, wanted, bound, f"{name}, T = {num_tokens}")
    return y


@pytest.mark.parametrize("name, a_format, tile", CASES)
def test_layers(name: str, a_format: str, tile: str, device: torch.device) -> None:
    """Every tile, with poisoned padding; repeats give the same bits."""
    with mxpert.override(backend="hopper", config=tiles_of(a_format, name)[tile]):
        for num_tokens in TOKENS:
            y = check(name, a_format, prepared(name, device), num_tokens)
            for _ in range(3):
                again = check(name, a_format, prepared(name, device), num_tokens)
                assert_exact(again, y, f"{tile}, T = {num_tokens}")


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_the_comparison_catches_planted_errors(name: str, device: torch.device) -> None:
    inputs = problem(name, device)

    def planted(mistake: Callable[[WeightLike], WeightLike]) -> MoEInputs:
        weights = inputs.weights
        gate_up, down = mistake(weights.gate_up_proj), mistake(weights.down_proj)
        return replace(inputs, weights=replace(weights, gate_up_proj=gate_up, down_proj=down))

    mistakes = [lambda part: replace(part, scale=part.scale.roll(1, dims=-1))]
    if "zero" in name:
        mistakes.append(lambda part: replace(part, zero_point=part.zero_point + 1))
    if name == "nvfp4":
        mistakes.append(lambda part: replace(part, row_scale=part.row_scale.roll(1, dims=-1)))
    for wrong in map(planted, mistakes):
        wrong = replace(wrong, weights=wrong.weights.prepare(device=device))
        with pytest.raises(AssertionError):
            check(name, "mxfp8", wrong, 129)


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_the_heuristic_serves_and_explain_says_so(name: str, device: torch.device) -> None:
    inputs = prepared(name, device)
    with mxpert.override():
        assert "backend: hopper" in str(explain_layer(inputs))
        for num_tokens in TOKENS:
            check(name, "bf16", inputs, num_tokens)


def test_what_the_layout_cannot_hold_runs_on_portable_kernels(device: torch.device) -> None:
    """Zero points with float32 scales."""
    inputs = problem("int4_g64-zero_points", device)
    parts = inputs.weights.gate_up_proj, inputs.weights.down_proj
    gate_up, down = (replace(part, scale=part.scale.float()) for part in parts)
    weights = replace(inputs.weights, gate_up_proj=gate_up, down_proj=down)
    given = replace(inputs, weights=weights.prepare(device=device))
    with pytest.raises(mxpert.UnsupportedError, match="HOPPER_GROUPS"):
        run(given, "bf16")
    with mxpert.override():
        assert "backend: triton" in str(explain_layer(given))


def test_scales_beyond_float16_multiply_e4m3_rows(device: torch.device) -> None:
    """One scale of 2 keeps all weights in HOPPER_GROUPS, whose tiles have hi and lo rows."""
    inputs = problem("int4_g32", device)
    scale = inputs.weights.gate_up_proj.scale.clone()
    scale[0, 0, 0] = 2.0
    gate_up = replace(inputs.weights.gate_up_proj, scale=scale)
    plain = replace(inputs.weights, gate_up_proj=gate_up)
    weights = plain.prepare(device=device)
    assert weights.layout is group_layout.HOPPER_GROUPS
    given = replace(inputs, weights=weights)
    y = run(given, "bf16", out_dtype=torch.float32)
    wanted = reference(replace(inputs, weights=plain), "bf16")
    assert_close_relative(y, wanted, layer_tolerance("bf16", torch.float32, given, 777), "scale 2")


def test_packing_on_the_gpu_gives_the_bits_of_the_cpu(device: torch.device) -> None:
    for name in WITH_GROUPS:
        given = problem(name, device).weights
        mine = given.prepare(device=device)
        theirs = given.to("cpu").prepare(device="cpu", layout=layout_of(name))
        for one, other in (
            (mine.gate_up_proj, theirs.gate_up_proj),
            (mine.down_proj, theirs.down_proj),
        ):
            assert torch.equal(one.qdata.cpu(), other.qdata)
            assert torch.equal(one.scale.cpu().view(torch.uint8), other.scale.view(torch.uint8))


def test_a_graph_replays_the_layer(device: torch.device) -> None:
    inputs = first_tokens(prepared("int4_g128", device), 17)
    first = run(inputs, "mxfp8")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(inputs, "mxfp8")
    for _ in range(3):
        y.zero_()
        graph.replay()
        assert_exact(y, first, "graph")


@pytest.mark.parametrize("tile", ["decode32", "narrow"])
@pytest.mark.parametrize("name", ["int4_g128", "int4_g64-zero_points", "nvfp4", "mxfp8_e4m3"])
def test_many_repeats_give_the_same_bits(name: str, tile: str, device: torch.device) -> None:
    """A register operand that is overwritten while wgmma reads it would show in some of them."""
    inputs = first_tokens(prepared(name, device), 129)
    with mxpert.override(backend="hopper", config=tiles_of("mxfp8", name)[tile]):
        first = run(inputs, "mxfp8", out_dtype=torch.float32)
        differing = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(300):
            again = run(inputs, "mxfp8", out_dtype=torch.float32)
            differing += (again.view(torch.int32) != first.view(torch.int32)).sum()
    assert int(differing) == 0
