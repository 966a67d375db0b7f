"""The layer for a few tokens on a GPU: numbers, determinism, graphs, streams, what it refuses."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert import GateUpOrder
from mxpert.configs import MoEConfig
from mxpert.core.problem import GELU, SiLU, SwiGLU
from mxpert.formats import MXFP4, MXFP8_E4M3
from mxpert.moe.hopper import few_tokens, few_tokens_limits
from mxpert.testing.numerics import assert_exact
from mxpert.testing.problems import MoEInputs, MoEShape, Routing, random_moe_problem
from support.races import hunt, redraw
from tests.moe.hopper.problems import Case, first_tokens, run

pytestmark = pytest.mark.usefixtures("only_hopper")

heuristics = pytest.importorskip("mxpert.moe.hopper.config", reason="needs Gluon")


FORMATS = ("bf16", "mxfp8", "mxfp4")
"""Activation formats that the kernel serves."""

MOST = {"bf16": 4, "mxfp8": 8, "mxfp4": 8}

SMALL = MoEShape(hidden_size=704, intermediate_size=416, num_experts=9, top_k=3)
"""Odd numbers of row units and depth units; the last ones are not full. 416 is 13 blocks."""

LAYERS: dict[str, tuple[MoEShape, bool]] = {
    "gpt_oss": (
        replace(SMALL, activation=SwiGLU(), gate_up_order=GateUpOrder.INTERLEAVED, has_bias=True),
        False,
    ),
    "silu": (replace(SMALL, activation=SiLU()), False),
    "gelu": (replace(SMALL, activation=GELU("tanh"), has_bias=True), False),
    "on_input": (replace(SMALL, top_k=1, activation=SiLU(), has_bias=True), True),
    "one_range": (MoEShape(256, 4096, 40, 4), False),
    "wide": (MoEShape(7168, 512, 24, 8), False),
    "deep": (MoEShape(4096, 3072, 20, 8), False),
}


def few(a_format: str, num_stages: int = 3) -> MoEConfig:
    tile = mxpert.configs.HopperGemmConfig(
        "few_tokens", block_m=8, num_stages=num_stages, consumers=1, hi_lo=a_format == "bf16"
    )
    return MoEConfig.of(tile, tile)


@functools.cache
def layer(name: str, a_format: str, device: torch.device) -> Case:
    shape, on_input = LAYERS[name]
    inputs = random_moe_problem(shape, MOST[a_format], device=device)
    return Case(inputs, a_format, apply_router_weight_on_input=on_input)


# ---- Numbers.


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("a_format", FORMATS)
def test_every_number_of_tokens(a_format: str, name: str, device: torch.device) -> None:
    problem = layer(name, a_format, device)
    with mxpert.override(config=few(a_format), backend="hopper"):
        for num_tokens in range(
            1, min(MOST[a_format], few_tokens_limits.SLOTS // LAYERS[name][0].top_k) + 1
        ):
            problem.check(num_tokens, name)


@pytest.mark.parametrize("num_stages", [2, 4, 6])
def test_rings(num_stages: int, device: torch.device) -> None:
    with mxpert.override(config=few("bf16", num_stages), backend="hopper"):
        layer("gpt_oss", "bf16", device).check(1, f"{num_stages} stages")


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("a_format", FORMATS)
def test_output_dtypes(a_format: str, out_dtype: torch.dtype, device: torch.device) -> None:
    with mxpert.override(config=few(a_format), backend="hopper"):
        layer("gpt_oss", a_format, device).check(2, "dtype", out_dtype=out_dtype)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("routing", [Routing.ONE_EXPERT, Routing.ZIPF], ids=lambda r: r.value)
def test_shared_experts(routing: Routing, ids_dtype: torch.dtype, device: torch.device) -> None:
    inputs = random_moe_problem(SMALL, 4, routing=routing, device=device)
    inputs = replace(inputs, topk_ids=inputs.topk_ids.to(ids_dtype))
    with mxpert.override(config=few("bf16"), backend="hopper"):
        Case(inputs, "bf16").check(4, routing.value)


def test_equal_and_absent_ids(device: torch.device) -> None:
    """A token may name an expert twice, or none; a token without experts gives zeros."""
    inputs = random_moe_problem(replace(SMALL, has_bias=True), 4, device=device)
    ids = torch.tensor([[2, 2, 5], [-1, 7, -1], [-1, -1, -1], [5, 2, 5]], dtype=torch.int32)
    case = Case(replace(inputs, topk_ids=ids.to(device)), "bf16")
    with mxpert.override(config=few("bf16"), backend="hopper"):
        case.check(4, "ids")
        y = run(case.prepared, "bf16")
    assert not y[2].any()


def test_expert_map(device: torch.device) -> None:
    inputs = random_moe_problem(SMALL, 4, device=device)
    expert_map = torch.full((20,), -1, dtype=torch.int32, device=device)
    expert_map[3::2] = torch.arange(9, dtype=torch.int32, device=device)
    ids = torch.randint(0, 20, (4, 3), dtype=torch.int32, device=device)
    case = Case(replace(inputs, topk_ids=ids), "mxfp8", expert_map=expert_map)
    with mxpert.override(config=few("mxfp8"), backend="hopper"):
        case.check(4, "map")
        expert_map.fill_(-1)
        assert not run(case.prepared, "mxfp8", expert_map=expert_map).any()


@pytest.mark.parametrize("format", [MXFP8_E4M3, MXFP4], ids=lambda f: f.name)
def test_quantised_tokens(format: mxpert.MXFormat, device: torch.device) -> None:
    a_format = "mxfp8" if format is MXFP8_E4M3 else "mxfp4"
    inputs = random_moe_problem(SMALL, 3, device=device)
    with mxpert.override():  # a pinned backend is that of the layer
        inputs = replace(inputs, x=mxpert.quantize(inputs.x, format))
    with mxpert.override(config=few(a_format), backend="hopper"):
        Case(inputs, a_format).check(3, "quantised")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_is_its_own_matter(bad: float, device: torch.device) -> None:
    inputs = random_moe_problem(SMALL, 3, device=device)
    inputs = replace(inputs, weights=inputs.weights.prepare(device=device))
    with mxpert.override(config=few("bf16"), backend="hopper"):
        good = run(inputs, "bf16")
        inputs.x[1, 100] = bad
        y = run(inputs, "bf16")
    assert y[1].isnan().all()
    assert_exact(y[[0, 2]], good[[0, 2]], "other tokens")


# ---- What calls leave to the next ones.


def _problems(device: torch.device) -> list[tuple[MoEInputs, str]]:
    """Layers of several sizes and numbers of tokens, which share the memory between calls."""
    return [
        (first_tokens(layer(name, a_format, device).prepared, tokens), a_format)
        for name in ("gpt_oss", "wide", "deep")
        for a_format in ("bf16", "mxfp8")
        for tokens in (1, 2, 4)
        if (name, tokens) != ("deep", 4)
    ]


def test_calls_give_the_same_bits(device: torch.device) -> None:
    """5000 calls of all kinds back to back; the memory starts with other numbers."""
    for words in few_tokens.memory.tensors:
        if words.dtype is torch.int64:
            words.random_(-(1 << 62), 1 << 62)
    problems = _problems(device)
    expected = []
    for inputs, a_format in problems:
        with mxpert.override(config=few(a_format), backend="hopper"):
            expected.append(run(inputs, a_format))
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for index in range(5000):
        place = index * 7 % len(problems)
        inputs, a_format = problems[place]
        with mxpert.override(config=few(a_format), backend="hopper"):
            differing += (run(inputs, a_format) != expected[place]).sum()
    assert differing.item() == 0


def test_graphs_with_changing_routing(device: torch.device) -> None:
    inputs = first_tokens(layer("gpt_oss", "bf16", device).prepared, 2)
    inputs = replace(inputs, topk_ids=inputs.topk_ids.clone(), x=inputs.x.clone())
    with mxpert.override(config=few("bf16"), backend="hopper"):
        run(inputs, "bf16")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [run(inputs, "bf16") for _ in range(3)]
        for seed in range(20):
            torch.manual_seed(seed)
            inputs.topk_ids.copy_(torch.rand(2, 9, device=device).topk(3).indices)
            inputs.x.normal_()
            graph.replay()
            expected = run(inputs, "bf16")
            for result in results:
                assert_exact(result, expected, "graph")


def test_several_streams(device: torch.device) -> None:
    """Launches on different streams wait for each other, whatever runs beside them."""
    problems = _problems(device)[:6]
    expected = []
    for inputs, a_format in problems:
        with mxpert.override(config=few(a_format), backend="hopper"):
            expected.append(run(inputs, a_format))
    torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    results: list[tuple[int, torch.Tensor]] = []
    matrix = torch.randn(2048, 2048, dtype=torch.bfloat16, device=device)
    for index in range(600):
        place = index % len(problems)
        inputs, a_format = problems[place]
        with torch.cuda.stream(streams[index % 3]):
            if index % 3 == 2:
                torch.mm(matrix, matrix)
            with mxpert.override(config=few(a_format), backend="hopper"):
                results.append((place, run(inputs, a_format)))
    torch.cuda.synchronize(device)
    assert all(torch.equal(result, expected[place]) for place, result in results)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name, a_format, num_tokens",
    [("gpt_oss", "bf16", 1), ("gpt_oss", "mxfp8", 4), ("wide", "bf16", 2), ("wide", "bf16", 1)],
)
def test_repeats_beside_other_work(
    name: str, a_format: str, num_tokens: int, device: torch.device, pytestconfig: pytest.Config
) -> None:
    """Graphs of 50 layers give the same bits while other kernels compete for the SMs."""
    repeats = pytestconfig.getoption("--race-repeats")
    inputs = first_tokens(
        random_moe_problem(LAYERS[name][0], num_tokens, device=device), num_tokens
    )
    inputs = replace(inputs, weights=inputs.weights.prepare(device=device))
    generator = torch.Generator(device).manual_seed(1)

    def layer_bits() -> tuple[torch.Tensor, ...]:
        return (run(inputs, a_format, out_dtype=torch.float32).view(torch.int32),)

    with mxpert.override(config=few(a_format), backend="hopper"):
        assert layer_bits()[0].any()
        found = hunt(layer_bits, lambda: redraw(inputs, generator), repeats, device, per_graph=50)
    assert found.mismatches == 0, f"{found.mismatches} values differed in {repeats} repeats"


# ---- What it refuses.


def test_a_launch_that_does_not_fit_fails(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not hang, and the next call is right."""
    problem = layer("silu", "bf16", device)
    inputs = first_tokens(problem.prepared, 1)
    few_tokens._launch.cache_clear()
    monkeypatch.setattr(few_tokens, "num_ctas", lambda problem: 16 * problem.target.num_sms)
    with (
        mxpert.override(config=few("bf16", 4), backend="hopper"),
        pytest.raises(RuntimeError, match=r"(?i)cooperative|too large"),
    ):
        run(inputs, "bf16")
    monkeypatch.undo()
    few_tokens._launch.cache_clear()
    with mxpert.override(config=few("bf16", 4), backend="hopper"):
        problem.check(1, "after a failed launch")


def test_configs_that_do_not_serve_a_layer(device: torch.device) -> None:
    problem = layer("silu", "bf16", device)
    inputs = random_moe_problem(SMALL, 5, device=device)
    inputs = replace(inputs, weights=problem.prepared.weights)
    with mxpert.override(config=few("bf16"), backend="hopper"):
        with pytest.raises(ValueError, match="serves 1 to 4 tokens"):
            run(inputs, "bf16")
        with pytest.raises(ValueError, match="no whole row of features"):
            run(first_tokens(inputs, 1), "fp8_token")
    with (
        mxpert.override(config=few("bf16", 40), backend="hopper"),
        pytest.raises(ValueError, match="num_stages from 2 to"),
    ):
        run(first_tokens(inputs, 1), "bf16")
