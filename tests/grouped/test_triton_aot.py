"""The grouped kernels compiled for three targets without a GPU: instructions, spills, memory.

The tests record launches on meta tensors with the heuristic's tiles, specialise them as the JIT
does, and compile them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mxpert.core.problem import GemmConfig, GroupedProblem, Op
from mxpert.device.groups import MAX_GROUPS, _padded_offsets_kernel
from mxpert.grouped import triton as grouped
from mxpert.grouped import triton as heuristics
from support.aot import TRITON_RELEASE, CompiledKernel, Metrics, compile_for, specialize
from support.devices import DEVICES
from support.gfx950_listing import check_figures
from support.grouped_launches import FORMATS, GEMMS, launch_dual, launch_gemm, launch_wgrad
from support.launches import RecordedLaunch, recorded_launches

TARGETS = ("sm_90", "sm_100", "gfx950")
INSTRUCTIONS = {
    "bf16": {"sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx950": "mfma"},
    "mx": {"sm_90": "wgmma", "sm_100": "tcgen05.mma.block_scale", "gfx950": "mfma_scale"},
}
"""Required matrix instruction; Hopper has no MX instruction and multiplies exact bf16 values."""
targets = pytest.mark.parametrize("target", TARGETS)


Recorder = Callable[..., RecordedLaunch]


@pytest.fixture
def record() -> Recorder:
    """A function that launches on meta tensors and returns the recorded launches."""

    def run(launch: Callable[..., object], *arguments: Any, **options: Any) -> RecordedLaunch:
        with recorded_launches() as launches:
            launch(*arguments, **options)
        (only,) = (each for each in launches if each.kernel is not _padded_offsets_kernel)
        return only

    return run


def compiled(launch: RecordedLaunch, target: str) -> CompiledKernel:
    return compile_for(launch.kernel, launch.arguments, target=target)


def metrics_of(launch: RecordedLaunch, target: str) -> Metrics:
    return compiled(launch, target).metrics


def assert_uses_the_chip(
    kernel: CompiledKernel, problem: GroupedProblem, config: Any, case: str
) -> None:
    """Check the matrix instruction, spills, the estimate of shared memory, and wide loads.

    Operands are loaded in 64 bits or more. Single bytes are scales, 32 bits are group offsets. On
    gfx950 the hot loop and the occupancy are no worse than recorded under the case's name.
    """
    metrics = kernel.metrics
    if kernel.target == "gfx950":
        check_figures(f"{problem.op.value} {case}", kernel, config.num_warps)
    kind = "bf16" if problem.a_format == "bf16" else "mx"
    assert metrics.matrix_instruction == INSTRUCTIONS[kind][problem.target.arch]
    assert metrics.spills == 0
    estimate = heuristics.shared_memory(problem, config)
    padding = estimate // 32 if TRITON_RELEASE >= (3, 9) and problem.target.kind == "hip" else 0
    assert metrics.shared_memory <= estimate + padding <= problem.target.shared_memory
    assert set(metrics.global_loads) <= ({8, 32, 64, 128} if kind == "mx" else {32, 128})
    assert set(metrics.global_stores) == {128}


@targets
@pytest.mark.parametrize("case", GEMMS)
def test_gemm(record: Recorder, case: str, target: str) -> None:
    pair, trans_b, m = GEMMS[case]
    chosen: list[Any] = []
    launch = record(lambda: chosen.extend(launch_gemm(target, FORMATS[pair], trans_b=trans_b, m=m)))
    assert_uses_the_chip(compiled(launch, target), *chosen, case)


@targets
@pytest.mark.parametrize("pair", ["bf16", "e4m3"])
def test_wgrad(record: Recorder, pair: str, target: str) -> None:
    chosen: list[Any] = []
    launch = record(lambda: chosen.extend(launch_wgrad(target, FORMATS[pair])))
    assert_uses_the_chip(compiled(launch, target), *chosen, pair)


@targets
def test_wgrad_accumulates_without_spills(record: Recorder, target: str) -> None:
    launch = record(launch_wgrad, target, FORMATS["e4m3"], accumulate=True)
    assert launch.arguments["ACCUMULATE"] is True
    assert metrics_of(launch, target).spills == 0


@targets
def test_padded_offsets(target: str) -> None:
    with recorded_launches() as launches:
        launch_wgrad(target, FORMATS["e4m3"])
    assert launches[0].kernel is _padded_offsets_kernel
    assert launches[0].grid == (1,)
    assert metrics_of(launches[0], target).scratch == 0


@targets
@pytest.mark.parametrize(
    "groups, dtype",
    [(0, torch.bfloat16), (8, torch.bfloat16), (8, torch.float32), (1024, torch.bfloat16)],
    ids=str,
)
def test_dual(record: Recorder, groups: int, dtype: torch.dtype, target: str) -> None:
    """The kernel loads the data and stores both copies with wide accesses."""
    launch = record(launch_dual, target, (8192, 2880), dtype, groups=groups)
    metrics = metrics_of(launch, target)
    assert metrics.spills == metrics.scratch == 0
    threads = launch.arguments["num_warps"] * (64 if target == "gfx950" else 32)
    data_loads = 64 * 128 * dtype.itemsize // 16 // threads
    assert metrics.global_loads[128] >= data_loads  # offsets may come in wide loads too
    assert metrics.global_stores[128] == 2 * 64 * 128 // 16 // threads
    assert metrics.registers <= 168  # three programs of four warps per SM on NVIDIA


@targets
@pytest.mark.parametrize("groups", [0, 8, 1024])
def test_dual_rounds_stochastically_without_spills(
    record: Recorder, groups: int, target: str
) -> None:
    options = {"groups": groups, "stochastic": True}
    launch = record(launch_dual, target, (8192, 2880), torch.bfloat16, **options)
    metrics = metrics_of(launch, target)
    newest = TRITON_RELEASE >= (3, 9) and target == "sm_100"  # as measured: one register
    assert metrics.spills <= (2 if newest else 0)
    assert metrics.scratch <= (8 if newest else 0)


@targets
def test_most_groups_fit(record: Recorder, target: str) -> None:
    """The search among 1024 groups causes no spills in the GEMM."""
    launch = record(launch_gemm, target, FORMATS["e4m3"], groups=MAX_GROUPS)
    assert launch.arguments["BLOCK_G"] == 2048
    assert metrics_of(launch, target).spills == 0


@pytest.mark.parametrize("op", ["dual", "e4m3", "bf16", "wgrad"])
def test_changing_rows_share_a_binary(record: Recorder, op: str) -> None:
    """Changing numbers of rows and groups, also odd or 1, do not recompile a kernel."""
    seen = set()
    for m, groups in itertools.product((1, 777, 8192), (1, 3, 16)):
        launch = {
            "dual": lambda m=m, groups=groups: record(
                launch_dual, "sm_90", (m, 2880), torch.bfloat16, groups=groups
            ),
            "e4m3": lambda m=m, groups=groups: record(
                launch_gemm, "sm_90", FORMATS["e4m3"], m=m, groups=groups
            ),
            "bf16": lambda m=m, groups=groups: record(
                launch_gemm, "sm_90", FORMATS["bf16"], m=m, groups=groups
            ),
            "wgrad": lambda m=m, groups=groups: record(
                launch_wgrad, "sm_90", FORMATS["e4m3"], m=m, groups=groups
            ),
        }[op]()
        # Only the tile depends on the rows: small groups have lower tiles with fewer warps.
        same = {"BLOCK_M": 128, "num_warps": 8}
        arguments = {name: same.get(name, value) for name, value in launch.arguments.items()}
        seen.add(specialize(launch.kernel, arguments, "sm_90").key)
    assert len(seen) == 1


@targets
def test_choices_are_valid(target: str) -> None:
    """The heuristic's config is valid and the first of configs(), which has several entries."""
    for op, pair, m, trans_b in itertools.product(
        (grouped.GROUPED_GEMM, grouped.GROUPED_WGRAD), FORMATS, (1, 256, 65536), (True, False)
    ):
        problem = GroupedProblem(
            op.op, DEVICES[target], m, 8, 2880, 2880, *FORMATS[pair], trans_b, torch.bfloat16
        )
        configs = list(op.configs(problem))
        assert configs[0] == op.heuristic(problem)
        assert len(set(configs)) > 3
        assert all(heuristics.invalid(problem, config) is None for config in configs)


def test_amd_refuses_mx_tiles_without_scaled_mfma() -> None:
    """bf16 operands are multiplied by bf16 MFMA in any tile."""
    with recorded_launches():
        problem, chosen = launch_gemm("gfx950", FORMATS["e4m3"])
    assert heuristics.invalid(problem, chosen) is None
    low = GemmConfig(16, 64, 64, 4)
    assert "set block_k to 128" in (heuristics.invalid(problem, low) or "")
    dense = replace(problem, a_format="bf16", b_format="bf16")
    assert heuristics.invalid(dense, low) is None
    streamed = heuristics.invalid(dense, replace(low, weight_cache="stream"))
    assert streamed == "needs weight_cache keep, got stream"
    with pytest.raises(ValueError, match=r"grouped_gemm: config — need .*as bf16"):
        heuristics.require_valid(problem, low)


@pytest.mark.parametrize("arch, kind", [("sm_75", "cuda"), ("gfx942", "hip")])
def test_older_chips_are_refused(arch: str, kind: str) -> None:
    target = replace(DEVICES["sm_90"], kind=kind, arch=arch)
    problem = GroupedProblem(
        Op.GROUPED_GEMM, target, 64, 2, 64, 64, "bf16", "bf16", True, torch.bfloat16
    )
    reason = grouped.GROUPED_GEMM.unsupported(problem)
    assert reason is not None
    assert arch in reason


def test_grids_fit_the_work(record: Recorder) -> None:
    """At most one row tile per row, or full tiles plus one ragged tile per group; below 2^31."""
    config = grouped.GROUPED_GEMM.heuristic(
        GroupedProblem(
            Op.GROUPED_GEMM,
            DEVICES["sm_90"],
            8192,
            8,
            2880,
            2880,
            "bf16",
            "bf16",
            True,
            torch.bfloat16,
        )
    )
    columns = -(-2880 // config.block_n)
    assert record(launch_gemm, "sm_90", FORMATS["bf16"]).grid == (
        (8192 // config.block_m + 8) * columns,
    )
    assert record(launch_gemm, "sm_90", FORMATS["bf16"], m=3).grid == (3 * columns,)
    assert record(launch_gemm, "sm_90", FORMATS["bf16"], m=1 << 30, groups=1024).grid[0] < 2**31
