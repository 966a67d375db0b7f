"""The portable kernels compiled for sm_80, sm_86, sm_89 and sm_120, and for sm_103.

There warps multiply operands in registers (mma.sync), and shared memory is small. Each case checks
the matrix instruction, spills, shared memory, and that the PTX has nothing that the chip lacks.
`--all-targets` compiles every case for every chip; otherwise each has a part of the cases.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import mxpert
from mxpert.core.problem import (
    Combine,
    Op,
    QuantizeProblem,
    RoutingProblem,
    RowsProblem,
    TopKOptions,
    TopKProblem,
)
from mxpert.formats import FORMATS as MX_FORMATS
from mxpert.formats import MXTensor, ScaleRule
from mxpert.formats.spec import get_format
from mxpert.grouped import triton as grouped_heuristics
from mxpert.moe.triton import config as moe_heuristics
from mxpert.quantize.inputs import DequantizeInputs, QuantizeInputs
from mxpert.quantize.triton import DEQUANTIZE, QUANTIZE
from mxpert.routing.inputs import PlanInputs, TopKInputs
from mxpert.routing.triton import PLAN, TOPK
from mxpert.testing.ahead_of_time import compile_kernel
from mxpert.testing.problems import MODEL_SHAPES
from support.aot import TRITON_RELEASE, CompiledKernel, compile_for
from support.devices import DEVICES, MMA_SYNC
from support.grouped_launches import FORMATS, GEMMS, launch_dual, launch_gemm, launch_wgrad
from support.inputs import INPUTS
from support.kernels import kernels_of
from support.launches import RecordedLaunch, recorded_launches
from support.moe_launches import describe, launch_stages

TRITON = kernels_of("triton")
MOE_GEMMS = {"_moe_gate_up_kernel": Op.MOE_GATE_UP, "_moe_down_kernel": Op.MOE_DOWN}
ROW_BLOCKS = {16: 64, 32: 1024, 64: 2048, 128: 8192}
"""Row block of the heuristic for gpt-oss-120b → a number of tokens for which it is chosen."""

HOPPER = r"griddepcontrol|cp\.async\.bulk|mbarrier|cluster|tensormap|setmaxnreg|\bfence\.proxy"
FORBIDDEN = {
    **dict.fromkeys(("sm_80", "sm_86", "sm_89"), rf"{HOPPER}|wgmma|tcgen05|e4m3|e5m2"),
    "sm_120": r"wgmma|tcgen05|setmaxnreg|\.multicast",
}
"""What the PTX must not contain. sm_89 has conversions of FP8, but Triton's round twice there."""

PARTS: dict[str, dict[str, set[Any]]] = {
    "sm_80": {"layer": {16, 128}, "gemm": {"e4m3-nn", "hybrid-nt"}, "wgrad": {"e4m3"}},
    "sm_86": {"layer": {64}, "gemm": {"bf16-nn"}, "wgrad": {"e4m3"}},
    "sm_89": {"layer": {128}, "gemm": {"e4m3-nt", "bf16-nt"}, "wgrad": {"bf16"}},
    "sm_120": {
        "layer": {32, 128},
        "gemm": {"e4m3-nn", "hybrid-nt", "e4m3-nt-small"},
        "wgrad": set(),
    },
}
"""The cases of a chip without `--all-targets`. Together the chips have each case once."""

MOST_STACK = (
    {("_routing_plan_scatter_kernel", "sm_120"): 8, ("_moe_down_kernel", "sm_80"): 8}
    if TRITON_RELEASE >= (3, 9)
    else {}
)
"""Bytes of stack, as measured, where not 0; the second is of MXFP8 activations and 32 rows."""

ONLY_ONCE = {"sm_80", "sm_120"}
"""Chips that kernels without matrix instructions are compiled for; the others make the same PTX."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test the cases of each chip: `target`, and a row block, GEMM or format."""
    every = metafunc.config.getoption("--all-targets")
    kind = metafunc.function.__name__.removeprefix("test_")
    cases = {"layer": ROW_BLOCKS, "gemm": GEMMS, "wgrad": ("bf16", "e4m3")}.get(kind)
    if cases is not None:
        chosen = [
            (target, case)
            for target in MMA_SYNC
            for case in cases
            if every or case in PARTS[target][kind]
        ]
        metafunc.parametrize("target, case", chosen)
    elif "target" in metafunc.fixturenames:
        metafunc.parametrize("target", [name for name in MMA_SYNC if every or name in ONLY_ONCE])


def compiled(launch: RecordedLaunch, target: str) -> CompiledKernel:
    """Compile a launch; check spills, shared memory and the instructions."""
    kernel = compile_for(launch.kernel, launch.arguments, target=target)
    metrics = kernel.metrics
    stack = MOST_STACK.get((kernel.name, target), 0)  # a load and a store for each 4 bytes
    assert metrics.spills <= stack // 4, (kernel.name, metrics)
    assert metrics.scratch <= stack, (kernel.name, metrics)
    assert metrics.shared_memory <= DEVICES[target].shared_memory
    assert re.search(FORBIDDEN[target], kernel.asm["ptx"]) is None, kernel.name
    return kernel


@pytest.mark.parametrize("a_format", moe_heuristics.VALUE_BYTES)
def test_layer(target: str, case: int, a_format: str) -> None:
    """Both stages with the heuristic's tiles, and what runs between them."""
    shape = MODEL_SHAPES["gpt-oss-120b"]
    problem = describe(target, a_format, ROW_BLOCKS[case], shape)
    config = moe_heuristics.layer_heuristic(problem)
    assert config.routing_block_m == case
    stages = {Op.MOE_GATE_UP: config.gate_up, Op.MOE_DOWN: config.down}
    with recorded_launches() as launches:
        launch_stages(problem, config, shape)
    for launch in launches:
        metrics = compiled(launch, target).metrics
        if (op := MOE_GEMMS.get(launch.kernel.__name__)) is None:
            continue
        assert metrics.matrix_instruction == "mma"
        estimate = moe_heuristics.shared_memory(problem.target, op, a_format, stages[op])
        assert metrics.shared_memory <= estimate <= problem.target.shared_memory
        assert metrics.global_loads[128] > 0


def test_split_layer(target: str) -> None:
    """Split K, the finishing kernels with each MX output, and atomic combination."""
    shape = MODEL_SHAPES["kimi-k2-tp4"]
    for a_format in ("mxfp8", "mxfp4"):
        problem = describe(target, a_format, 1, shape, combine=Combine.ATOMIC)
        config = moe_heuristics.layer_heuristic(problem)
        assert config.gate_up.split_k > 1
        with recorded_launches() as launches:
            launch_stages(problem, config, shape)
        names = {launch.kernel.__name__ for launch in launches}
        assert {"_moe_gate_up_finish_kernel", "_moe_down_kernel"} <= names
        for launch in launches:
            compiled(launch, target)


def check_grouped(target: str, launches: list[RecordedLaunch], problem: Any, config: Any) -> None:
    for launch in launches:
        metrics = compiled(launch, target).metrics
        if launch.kernel.__name__ == "_padded_offsets_kernel":
            continue
        assert metrics.matrix_instruction == "mma"
        estimate = grouped_heuristics.shared_memory(problem, config)
        assert metrics.shared_memory <= estimate <= problem.target.shared_memory
        assert metrics.global_loads[128] > 0


def test_gemm(target: str, case: str) -> None:
    pair, trans_b, rows = GEMMS[case]
    with recorded_launches() as launches:
        problem, config = launch_gemm(target, FORMATS[pair], trans_b=trans_b, m=rows)
    check_grouped(target, launches, problem, config)


def test_wgrad(target: str, case: str) -> None:
    with recorded_launches() as launches:
        problem, config = launch_wgrad(target, FORMATS[case], accumulate=case == "e4m3")
    check_grouped(target, launches, problem, config)


def test_quantize_dual(target: str) -> None:
    with recorded_launches() as launches:
        launch_dual(target, (8192, 2880), torch.bfloat16, groups=8)
    compiled(launches[0], target)


def empty(*size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


@pytest.mark.parametrize("name", MX_FORMATS)
def test_quantize(target: str, name: str) -> None:
    """Along rows and across them, and back."""
    fmt = get_format(name)
    shape = (4096, 2880)
    x = empty(*shape, dtype=torch.bfloat16)
    with recorded_launches() as launches:
        for axis in (-1, -2):
            problem = QuantizeProblem(
                Op.QUANTIZE, DEVICES[target], shape, axis, x.dtype, fmt, ScaleRule.RCEIL
            )
            made = QUANTIZE.launch(problem, None, QuantizeInputs(x=x))
            assert isinstance(made, MXTensor)
            DEQUANTIZE.launch(problem, None, DequantizeInputs(tensor=made))
    assert len({launch.kernel for launch in launches}) == 4
    for launch in launches:
        compiled(launch, target)


@pytest.mark.parametrize("tokens", [128, 16384], ids=["one-launch", "two-launches"])
def test_routing(target: str, tokens: int) -> None:
    ids = empty(tokens, 8, dtype=torch.int32)
    chip = DEVICES[target]
    top_k = TopKProblem(Op.ROUTE_TOPK, chip, tokens, 8, 256, TopKOptions())
    plan = RoutingProblem(Op.ROUTING_PLAN, chip, tokens, 8, 256, 256, 64)
    with recorded_launches() as launches:
        TOPK.launch(
            top_k,
            TOPK.heuristic(top_k),
            TopKInputs(logits=empty(tokens, 256, dtype=torch.bfloat16)),
        )
        PLAN.launch(plan, PLAN.heuristic(plan), PlanInputs(topk_weights=ids.float(), topk_ids=ids))
    for launch in launches:
        compiled(launch, target)


def test_training_rows(target: str) -> None:
    rows, width, top_k = 4096, 2880, 8
    gate_up = empty(rows, 2 * width, dtype=torch.bfloat16)
    values, ids = gate_up[:, :width].contiguous(), empty(rows // top_k, top_k, dtype=torch.int64)
    weights = ids.float()
    calls: dict[Op, dict[str, Any]] = {
        Op.ACTIVATE_ROWS: dict(gate_up=gate_up),
        Op.ACTIVATE_ROWS_BACKWARD: dict(gate_up=gate_up, grad=values),
        Op.COMBINE_ROWS: dict(rows=values, row_ids=ids, weights=weights, out_dtype=torch.bfloat16),
        Op.COMBINE_ROWS_BACKWARD: dict(
            rows=values, row_ids=ids, weights=weights, grad=values[: rows // top_k]
        ),
    }
    with recorded_launches() as launches:
        for op, tensors in calls.items():
            activation = mxpert.SwiGLU() if "activate" in op.value else None
            problem = RowsProblem(
                op,
                DEVICES[target],
                rows,
                width,
                values.dtype,
                1 if activation else top_k,
                activation,
            )
            TRITON[op].launch(problem, None, INPUTS[op](**tensors))
    assert len(launches) == 4
    for launch in launches:
        compiled(launch, target)


def test_sm_120_multiplies_mxfp4_as_it_is() -> None:
    """sm_120 has block-scaled instructions for MXFP4 by MXFP4, and for MXFP8 by MXFP8."""
    shape = MODEL_SHAPES["gpt-oss-120b"]
    problem = describe("sm_120", "mxfp4", 8192, shape)
    with recorded_launches() as launches:
        launch_stages(problem, moe_heuristics.layer_heuristic(problem), shape)
    assert "kind::mxf4" in compiled(launches[0], "sm_120").asm["ptx"]
    with recorded_launches() as launches:
        launch_gemm("sm_120", FORMATS["e4m3"])
    assert "kind::mxf8f6f4.block_scale" in compiled(launches[0], "sm_120").asm["ptx"]


def test_sm_103_compiles() -> None:
    """Triton 3.6 has no disassembler for it, so instructions are not counted."""
    shape = MODEL_SHAPES["gpt-oss-120b"]
    problem = describe("sm_103", "mxfp8", 64, shape)
    with recorded_launches() as launches:
        launch_stages(problem, moe_heuristics.layer_heuristic(problem), shape)
    ptx = compile_kernel(launches[0].kernel, launches[0].arguments, target="sm_103").asm["ptx"]
    assert "tcgen05.mma" in ptx
    assert "block_scale" in ptx
