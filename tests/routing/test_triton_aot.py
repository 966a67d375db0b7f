"""Routing kernels compiled for every target with the arguments of the host code's launches.

The launches are recorded, not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mxpert
from mxpert.core.describe import describe
from mxpert.core.problem import Scoring
from mxpert.core.target import on_device
from mxpert.moe.combine import combine_slots
from mxpert.routing import triton as routing
from mxpert.routing.inputs import PlanInputs, TopKInputs
from support.aot import SHARED_MEMORY_LIMIT, TARGETS, TRITON_RELEASE, compile_for, specialize
from support.launches import H200, RecordedLaunch, recorded_launches
from support.pairwise import latin

# (E, k) of the reference models: gpt-oss-120b and -20b, DeepSeek-V3 without and with its shared
# expert, Kimi-K2 likewise, DeepSeek-V4-pro and -flash, Qwen3-235B, Qwen3-Next.
MODELS = (
    (128, 4),
    (32, 4),
    (256, 8),
    (257, 9),
    (384, 8),
    (385, 9),
    (384, 6),
    (256, 6),
    (128, 8),
    (512, 10),
)
DEEPSEEK = {
    "scoring": Scoring.SIGMOID,
    "num_groups": 8,
    "top_groups": 4,
    "correction_bias": torch.zeros(256),
    "routed_scaling_factor": 2.5,
}


MOST_SPILLS = {("_routing_plan_scatter_kernel", "gfx950"): 56} if TRITON_RELEASE >= (3, 9) else {}
"""Scalar registers kept in vector registers, as measured; no memory is used."""


@pytest.fixture
def launches() -> Iterator[list[RecordedLaunch]]:
    with recorded_launches() as recorded:
        yield recorded


def launch_topk(num_tokens: int, num_experts: int, top_k: int, **options: Any) -> None:
    logits = torch.zeros(num_tokens, num_experts, dtype=options.pop("dtype", torch.float32))
    problem = describe(mxpert.route_topk, logits, top_k, **options)
    routing.TOPK.launch(
        problem,
        routing.TOPK.heuristic(problem),
        TopKInputs(logits=logits, correction_bias=options.get("correction_bias")),
    )


def launch_plan(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    unit: int,
    expert_parallel: bool = False,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.int32, torch.float32),
) -> None:
    ids = torch.zeros(num_tokens, top_k, dtype=dtypes[0])
    weights = ids.to(dtypes[1])
    problem = describe(
        mxpert.make_routing_plan, weights, ids, num_experts=num_experts, routing_block_m=unit
    )
    routing.PLAN.launch(
        problem,
        routing.PLAN.heuristic(problem),
        PlanInputs(
            topk_ids=ids,
            topk_weights=weights,
            expert_map=torch.zeros(num_experts, dtype=torch.int32) if expert_parallel else None,
            num_local_tokens=torch.zeros(1, dtype=torch.int32) if expert_parallel else None,
        ),
    )


def gate(launch: RecordedLaunch, target: str, *, stack: int = 0) -> None:
    """Check that a launch compiles without spills and fits in the chip's shared memory.

    stack: bytes of stack that a known case uses, a load and a store for each 4 of them.
    """
    name = launch.kernel.__name__
    assert all(size > 0 for size in launch.grid)
    metrics = compile_for(launch.kernel, launch.arguments, target=target).metrics
    most = MOST_SPILLS.get((name, target), stack // 2)
    assert metrics.spills <= most, f"{name} spills {metrics.spills}"
    assert metrics.scratch <= stack, f"{name} uses {metrics.scratch} bytes of stack"
    assert metrics.shared_memory <= SHARED_MEMORY_LIMIT[target]


def arguments_of(launch: RecordedLaunch) -> dict[str, Any]:
    return {key: value for key, value in launch.arguments.items() if key in launch.kernel.arg_names}


DTYPES = {
    "int32-float32": (torch.int32, torch.float32),
    "int64-bfloat16": (torch.int64, torch.bfloat16),
    "int64-float16": (torch.int64, torch.float16),
    "int64-float32": (torch.int64, torch.float32),
}
"""Of ids and weights."""


@pytest.mark.parametrize("dtypes, target, tokens", latin(DTYPES, TARGETS, (128, 16384)))
def test_plan_kernels_compile(launches, dtypes, target, tokens):
    """One launch and two: pairwise with dtypes and with targets."""
    launch_plan(tokens, 384, 8, 64, expert_parallel=True, dtypes=DTYPES[dtypes])
    assert [launch.kernel.__name__ for launch in launches] == (
        ["_routing_plan_expert_kernel"]
        if tokens == 128
        else ["_routing_plan_count_kernel", "_routing_plan_scatter_kernel"]
    )
    # Triton 3.9 spills two registers of the scatter kernel with int64 ids.
    spills = TRITON_RELEASE >= (3, 9) and "int64" in dtypes and target != "gfx950"
    for launch in launches:
        gate(launch, target, stack=8 if spills and "scatter" in launch.kernel.__name__ else 0)


def test_dependent_launch_waits_first(launches):
    """On Hopper and later, grid_dependency_wait comes before any access to global memory."""
    with on_device(H200):
        launch_topk(64, 256, 8)
        launch_plan(128, 384, 8, 64, expert_parallel=True)
        launch_plan(16384, 384, 8, 64, expert_parallel=True)
    for early in (False, True):
        combine_slots(
            torch.zeros(64, 2880),
            torch.zeros(16, 4, dtype=torch.int32),
            H200,
            plan_before_wait=early,
        )
    assert len(launches) == 6
    for launch in launches:
        assert launch.arguments["launch_pdl"] is True
        ptx = compile_for(launch.kernel, launch.arguments, target="sm_90").asm["ptx"]
        assert ptx.count("griddepcontrol.wait") == 1
        ahead, after = ptx.split("griddepcontrol.wait")
        early = re.findall(r"\b(?:ld|st)\.global[.\w]*", ahead)
        if launch.arguments.get("PLAN_BEFORE_WAIT"):  # loads of four slots' rows bypass L1
            assert len(early) == 4
            assert all(access.startswith("ld.global.cg") for access in early)
        else:
            assert not early, launch.kernel.__name__
        assert "st.global" in after


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dtype": torch.bfloat16}, id="softmax-chosen"),
        pytest.param({"normalize": False}, id="softmax-all"),
        pytest.param(DEEPSEEK, id="deepseek-v3"),
        pytest.param(
            DEEPSEEK | {"scoring": Scoring.SQRTSOFTPLUS, "group_score": "max", "clamp_nan": True},
            id="sqrtsoftplus",
        ),
        pytest.param({"clamp_nan": True}, id="softmax-clamped"),
    ],
)
def test_topk_kernel_compiles(launches, options, target):
    launch_topk(64, 256, 8, **options)
    gate(launches[0], target)


def test_binaries_do_not_depend_on_the_model(launches):
    """Binaries depend on padded sizes only: ten models, nine token counts, two block sizes."""
    for experts, top_k in MODELS:
        for tokens in (1, 3, 16, 17, 128, 250, 777, 4096, 16384):
            launch_topk(tokens, experts, top_k)
            for unit in (16, 48):
                launch_plan(tokens, experts, top_k, unit)
    binaries = {}
    for launch in launches:
        call = specialize(launch.kernel, arguments_of(launch), "sm_90")
        binaries.setdefault(launch.kernel.__name__, set()).add(call.key)
    counts = {name: len(variants) for name, variants in binaries.items()}
    # E ≤ 128 and E ≤ 512, each with three sizes of tiles.
    assert counts == {
        "_route_topk_kernel": 2,
        "_routing_plan_expert_kernel": 6,
        "_routing_plan_count_kernel": 6,
        "_routing_plan_scatter_kernel": 6,
    }
