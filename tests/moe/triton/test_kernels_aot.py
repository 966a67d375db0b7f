"""The MoE kernels compiled for three targets without a GPU: instructions, spills, shared memory.

The tests record launches on meta tensors with the heuristic's tiles, specialise them as the JIT
does, and compile them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mxpert.core.problem import (
    GELU,
    Activation,
    Combine,
    GemmConfig,
    MoEConfig,
    MoEProblem,
    Op,
    ReLU2,
    SiLU,
    SiTUv2,
    SwiGLU,
    WeightCache,
)
from mxpert.core.stage_configs import other_weight_caches
from mxpert.moe import combine
from mxpert.moe.triton import config as heuristics
from mxpert.testing.problems import MODEL_SHAPES, MoEShape
from support.aot import TRITON_RELEASE, Metrics, compile_for, specialize
from support.devices import DEVICES
from support.gfx950_listing import check_figures
from support.launches import RecordedLaunch, recorded_launches
from support.moe_launches import describe, launch_stages

TARGETS = ("sm_90", "sm_100", "gfx950")
NATIVE = {"sm_90": "wgmma", "sm_100": "tcgen05.mma.block_scale", "gfx950": "mfma_scale"}
"""Required matrix instruction for MX activations; Hopper decodes them to bf16."""
WITH_BF16 = {"sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx950": "mfma"}
FORMATS = tuple(heuristics.VALUE_BYTES)
"""Activation formats of the kernels."""
GEMMS = {"_moe_gate_up_kernel": Op.MOE_GATE_UP, "_moe_down_kernel": Op.MOE_DOWN}
TOKENS = {16: 64, 64: 2048, 128: 8192}
"""Row block of the heuristic (4 of 128 experts) → a token count for which it is chosen."""

MOST_SPILLS = {("mxfp4", 128, "sm_90"): 14} if TRITON_RELEASE >= (3, 9) else {}
"""As measured, where not 0."""

Recorder = Callable[..., list[RecordedLaunch]]


@pytest.fixture
def record() -> Iterator[Recorder]:
    """A function that runs both stages on meta tensors and returns the recorded launches."""
    with recorded_launches() as launches:

        def run(problem: MoEProblem, config: MoEConfig, shape: MoEShape) -> list[RecordedLaunch]:
            launches.clear()
            launch_stages(problem, config, shape)
            return list(launches)

        yield run


def compile_launch(launch: RecordedLaunch, target: str) -> Metrics:
    return compile_for(launch.kernel, launch.arguments, target=target).metrics


def scale_loads(arguments: dict[str, Any], target: str) -> int:
    """Largest number of byte loads. Only scales need them: one tile for each pipeline stage and the
    loop, twice if the matrix layout holds a scale in two threads."""
    threads = arguments["num_warps"] * (64 if DEVICES[target].kind == "hip" else 32)
    per_row = arguments["BLOCK_K"] // 32
    loads = sum(-(-rows * per_row // threads) for rows in (128, arguments["BLOCK_M"]))
    return 2 * (arguments["num_stages"] + 1) * loads


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("block_m", TOKENS)
@pytest.mark.parametrize("a_format", FORMATS)
def test_gemms_use_the_chip(record: Recorder, a_format: str, block_m: int, target: str) -> None:
    """Native matrix instruction, no spills, shared memory within the chip's and the estimate.

    On gfx950 the hot loop and the occupancy are no worse than recorded. Scales are loaded as bytes
    there: ROW_MAJOR weights have a scale byte for each row and 32 codes, and an MFMA takes bytes of
    rows that lie apart.
    """
    shape = MODEL_SHAPES["gpt-oss-120b"]
    problem = describe(target, a_format, TOKENS[block_m], shape)
    config = heuristics.layer_heuristic(problem)
    assert config.routing_block_m == block_m
    stages = {Op.MOE_GATE_UP: config.gate_up, Op.MOE_DOWN: config.down}
    gemms = [launch for launch in record(problem, config, shape) if launch.kernel.__name__ in GEMMS]
    assert len(gemms) == 2
    for launch in gemms:
        op = GEMMS[launch.kernel.__name__]
        compiled = compile_for(launch.kernel, launch.arguments, target=target)
        metrics = compiled.metrics
        wanted = (WITH_BF16 if a_format == "bf16" else NATIVE)[target]
        assert metrics.matrix_instruction == wanted
        assert metrics.spills <= MOST_SPILLS.get((a_format, block_m, target), 0)
        estimate = heuristics.shared_memory(problem.target, op, a_format, stages[op])
        assert metrics.shared_memory <= estimate <= problem.target.shared_memory
        assert metrics.global_loads.get(8, 0) <= scale_loads(launch.arguments, target)
        if target == "gfx950":
            name = f"{op.value} {a_format} {block_m} rows"
            check_figures(name, compiled, launch.arguments["num_warps"])


@pytest.mark.parametrize("target", ["sm_90", "gfx950"])
@pytest.mark.parametrize("a_format", ["bf16", "mxfp8"])
@pytest.mark.parametrize(
    "activation", [GELU(), GELU("tanh"), SwiGLU(limit=None, beta=0.5), ReLU2()], ids=str
)
def test_first_stage_of_other_activations(
    record: Recorder, activation: Activation, a_format: str, target: str
) -> None:
    """As for the others. Without a gate a tile of 128 weight rows is one of 128 features."""
    shape = replace(MODEL_SHAPES["gpt-oss-120b"], activation=activation)
    problem = describe(target, a_format, TOKENS[64], shape)
    config = heuristics.layer_heuristic(problem)
    names = ("_moe_gate_up_kernel", "_moe_up_kernel")
    launches = record(problem, config, shape)
    (launch,) = (each for each in launches if each.kernel.__name__ in names)
    assert (launch.kernel.__name__ == "_moe_up_kernel") is not activation.is_gated
    assert launch.arguments["BLOCK_N"] == (64 if activation.is_gated else 128)
    metrics = compile_launch(launch, target)
    wanted = (WITH_BF16 if a_format == "bf16" else NATIVE)[target]
    assert metrics.matrix_instruction == wanted
    assert metrics.spills == 0
    sizes = (problem.target, Op.MOE_GATE_UP, a_format, config.gate_up, activation.is_gated)
    assert metrics.shared_memory <= heuristics.shared_memory(*sizes)


@pytest.mark.parametrize("target", [*TARGETS, "sm_80"])
@pytest.mark.parametrize(
    ("w_format", "a_format", "block_m"),
    [("mxfp8_e4m3", "mxfp8", 16), ("nvfp4", "bf16", 128), ("int4_g32", "mxfp8", 16)]
    + [("int4_g128", "bf16", 128)],
)
def test_weights_of_other_formats(
    record: Recorder, w_format: str, a_format: str, block_m: int, target: str
) -> None:
    """No spills, shared memory within the estimate, tensor cores: of MX pairs with block scales."""
    shape = MODEL_SHAPES["kimi-k2-tp4"]
    described = describe(target, a_format, {16: 256, 128: 32768}[block_m], shape)
    problem = replace(described, weight_format=w_format)
    config = heuristics.layer_heuristic(problem)
    assert config.routing_block_m == block_m
    stages = {Op.MOE_GATE_UP: config.gate_up, Op.MOE_DOWN: config.down}
    gemms = [launch for launch in record(problem, config, shape) if launch.kernel.__name__ in GEMMS]
    assert len(gemms) == 2
    for launch in gemms:
        op = GEMMS[launch.kernel.__name__]
        metrics = compile_launch(launch, target)
        native = NATIVE if w_format.startswith("mx") else WITH_BF16
        assert metrics.matrix_instruction == native.get(target, "mma")
        assert metrics.spills == 0
        estimate = heuristics.shared_memory(
            problem.target, op, a_format, stages[op], weight_format=w_format
        )
        assert metrics.shared_memory <= estimate <= problem.target.shared_memory


@pytest.mark.parametrize("target", ["sm_90", "gfx950"])
def test_split_k_without_a_gate_is_finished(record: Recorder, target: str) -> None:
    shape = replace(MODEL_SHAPES["gpt-oss-120b"], activation=ReLU2())
    problem = describe(target, "mxfp4", 1, shape)
    config = heuristics.layer_heuristic(problem)
    config = replace(config, gate_up=replace(config.gate_up, split_k=2))
    launches = record(problem, config, shape)
    (finish,) = (each for each in launches if each.kernel.__name__ == "_moe_up_finish_kernel")
    assert compile_launch(finish, target).spills == 0


@pytest.mark.parametrize("model, loads", [("gpt-oss-120b", "buffer"), ("kimi-k2", "global")])
@pytest.mark.parametrize("a_format", FORMATS)
def test_amd_loads_weights_by_their_size(
    record: Recorder, a_format: str, model: str, loads: str
) -> None:
    """Through a buffer descriptor below 2 GiB, by 64-bit address above, in registers or straight
    into LDS (Triton 3.9). Neither spills."""
    shape = MODEL_SHAPES[model]
    problem = describe("gfx950", a_format, 64, shape)
    launches = record(problem, heuristics.layer_heuristic(problem), shape)
    (gate_up,) = (each for each in launches if each.kernel.__name__ == "_moe_gate_up_kernel")
    size = gate_up.arguments["w_ptr"].untyped_storage().size()
    assert (size < 2**31) is (loads == "buffer")
    metrics = compile_launch(gate_up, "gfx950")
    by_address = sum(
        count
        for name, count in metrics.instructions.items()
        if re.fullmatch(r"global_load_(dwordx4|lds_\w+)", name)
    )
    assert (by_address > 0) is (loads == "global"), "nothing but weights is that large"
    assert metrics.instructions["buffer_load_dwordx4"] > 0 or loads == "global"
    assert metrics.spills == 0
    assert metrics.matrix_instruction == (WITH_BF16 if a_format == "bf16" else NATIVE)["gfx950"]
    assert metrics.global_loads.get(8, 0) <= scale_loads(gate_up.arguments, "gfx950")


@pytest.mark.parametrize("target", TARGETS)
def test_token_quantiser_moves_whole_vectors(record: Recorder, target: str) -> None:
    shape = MODEL_SHAPES["gpt-oss-120b"]
    problem = describe(target, "fp8_token", 64, shape)
    quantisers = [
        launch
        for launch in record(problem, heuristics.layer_heuristic(problem), shape)
        if "quantize" in launch.kernel.__name__
    ]
    assert len(quantisers) == 2
    for launch in quantisers:
        metrics = compile_launch(launch, target)
        assert metrics.spills == 0
        assert set(metrics.global_loads) <= {128, 64}
        assert metrics.global_stores.get(64, 0) + metrics.global_stores.get(128, 0) > 0


@pytest.mark.parametrize("a_format", FORMATS)
def test_weights_stream_if_the_config_says_so(record: Recorder, a_format: str) -> None:
    """KEEP has no load with the non-temporal hint; neither spills."""
    shape = MODEL_SHAPES["gpt-oss-120b"]
    problem = describe("gfx950", a_format, TOKENS[16], shape)
    chosen = heuristics.layer_heuristic(problem)
    for config in (chosen, *other_weight_caches(chosen)):
        for launch in record(problem, config, shape):
            if launch.kernel.__name__ in GEMMS:
                op = GEMMS[launch.kernel.__name__]
                own = config.gate_up if op is Op.MOE_GATE_UP else config.down
                compiled = compile_for(launch.kernel, launch.arguments, target="gfx950")
                streams = own.weight_cache is WeightCache.STREAM
                assert (compiled.count(r"_load_.*\bnt\b") > 0) is streams, op
                assert compiled.metrics.spills == 0


VARIANTS = {
    "atomic": {"combine": Combine.ATOMIC},
    "flat_on_input": {"combine": Combine.FLAT, "apply_router_weight_on_input": True},
    "float32": {"out_dtype": torch.float32},
}


@pytest.mark.epilogues
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_epilogue_compiles(record: Recorder, variant: str, target: str) -> None:
    """With and without split-K and bias, each activation, on every target."""
    index = list(VARIANTS).index(variant)
    shape = MoEShape(
        2880,
        2880,
        128,
        4,
        (SiLU(), SiTUv2(), SwiGLU())[index],
        has_bias=index == 0,
        gate_up_order=MODEL_SHAPES["gpt-oss-20b"].gate_up_order,
    )
    a_format = FORMATS[index]
    for split_k in (1, 4):
        problem = describe(target, a_format, 64, shape, **VARIANTS[variant])
        config = heuristics.layer_heuristic(problem)
        config = replace(
            config,
            gate_up=replace(config.gate_up, split_k=split_k),
            down=replace(config.down, split_k=split_k),
        )
        launches = record(problem, config, shape)
        reduces = variant == "float32"
        assert len(launches) == (2 if split_k == 1 else 4) + reduces
        spills = {
            launch.kernel.__name__: compile_launch(launch, target).spills for launch in launches
        }
        assert spills == dict.fromkeys(spills, 0)


@pytest.mark.parametrize("a_format", FORMATS)
def test_one_binary_serves_all_models(record: Recorder, a_format: str) -> None:
    """Specialisations over the model shapes and odd token counts: one per kernel and epilogue."""
    config = MoEConfig(16, GemmConfig(16, 64, 128, 8, 4, 1, 2), GemmConfig(16, 128, 128, 8, 4))
    seen: dict[str, set[str]] = {}
    for (name, shape), num_tokens in itertools.product(MODEL_SHAPES.items(), (1, 3, 16)):
        same = MoEShape(
            shape.hidden_size,
            shape.intermediate_size,
            shape.num_experts,
            shape.top_k,
            SwiGLU(),
            shape.gate_up_order,
            has_bias=True,
        )
        problem = describe("sm_90", a_format, num_tokens, same)
        for kernel, _grid, arguments in record(problem, config, same):
            key = specialize(kernel, arguments, "sm_90").key
            seen.setdefault(kernel.__name__, set()).add(key)
        assert {kernel: len(keys) for kernel, keys in seen.items()} == dict.fromkeys(seen, 1), name
    # Both GEMMs, the finishing kernel of stage 1 after split-K, the combine; the quantiser of rows.
    assert len(seen) == (5 if a_format == "fp8_token" else 4)


def test_grids_fit_the_work(record: Recorder) -> None:
    """Few tokens: at most one row block per routed row. Most tokens: a grid below 2^31."""
    shape = MODEL_SHAPES["kimi-k2"]
    few = describe("sm_90", "bf16", 1, shape)
    config = MoEConfig(16, GemmConfig(16, 64, 128), GemmConfig(16, 128, 128))
    gate_up, down, reduce = record(few, config, shape)
    assert gate_up.grid == (8 * 2048 // 64,)
    assert down.grid == (8 * 7168 // 128,)
    assert reduce.grid == (7168 // combine.BLOCK_N,)
    most = describe("sm_90", "bf16", (2**24 - 1) // 8, shape)
    assert all(launch.grid[0] < 2**31 for launch in record(most, config, shape))
