"""The grouped kernels of every GPU: loops of AMD, offsets of copies, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert.configs import GemmConfig
from mxpert.core.launch import record_launches
from mxpert.core.target import detect_target, on_device
from mxpert.device.groups import MAX_GROUPS, padded_offsets
from mxpert.grouped.inputs import GroupedGemmInputs
from mxpert.grouped.triton import GROUPED_GEMM
from mxpert.routing.plan import padded_group_offsets
from mxpert.testing.numerics import assert_exact
from support.devices import DEVICES
from support.executors import Executor
from tests.conformance.cases.grouped import EXACT_GEMMS, EXACT_WGRADS, TILES

LOOPS = {
    "nt": EXACT_GEMMS["e4m3-ragged-nt"],
    "nn": EXACT_GEMMS["e4m3-ragged-nn"],
    "wgrad": EXACT_WGRADS["e4m3-ragged"],
}


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_of_amd_are_exact(loop: str) -> None:
    """On AMD kernels load scales in the step that multiplies them, elsewhere one step ahead."""
    with on_device(DEVICES["gfx950"]), record_launches() as records:
        LOOPS[loop].check(Executor("triton", "plain"))
    ahead = [
        record.launch.constants["PREFETCH_SCALES"]
        for record in records
        if "PREFETCH_SCALES" in record.launch.constants
    ]
    assert ahead == [False]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("groups", [1, 127, 128, 129, 1000])
def test_padded_offsets(groups: int, dtype: torch.dtype) -> None:
    """More groups than the kernel handles per iteration; offsets are clamped to the copies' end."""
    sizes = torch.randint(0, 70, (groups,), generator=torch.Generator().manual_seed(groups))
    sizes[::3] = 0
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(dtype)
    expected = padded_group_offsets(offsets)
    for length in (int(expected[-1]) + 64, int(expected[-1]) // 64 * 32):
        problem = replace(
            LOOPS["wgrad"].problem(detect_target("cpu")), num_rows=length, num_groups=groups
        )
        actual = padded_offsets(problem, offsets)
        assert_exact(actual, expected.clamp(max=length), "padded offsets")


def test_more_groups_are_refused() -> None:
    problem = LOOPS["nt"].problem(DEVICES["sm_90"])
    assert GROUPED_GEMM.unsupported(replace(problem, num_groups=MAX_GROUPS)) is None
    reason = GROUPED_GEMM.unsupported(replace(problem, num_groups=MAX_GROUPS + 1))
    assert reason is not None
    assert "1024 groups" in reason


@pytest.mark.parametrize(
    "config, reason",
    [
        (replace(TILES["small"], block_n=48), "block_n must be a power of two"),
        (replace(TILES["small"], split_k=2), "split_k 1"),
        (GemmConfig(256, 256, 64, num_warps=4), "accumulators a thread"),
        (GemmConfig(128, 128, 256, num_warps=8, num_stages=8), "bytes of shared memory"),
    ],
    ids=["shape", "split", "registers", "memory"],
)
def test_invalid_configs_are_refused(config: GemmConfig, reason: str) -> None:
    operand = mxpert.quantize(torch.ones(64, 64), "mxfp8_e4m3")
    inputs = GroupedGemmInputs(a=operand, b=operand, group_offsets=torch.zeros(3).int())
    with pytest.raises(ValueError, match=reason):
        GROUPED_GEMM.launch(LOOPS["nt"].problem(DEVICES["sm_90"]), config, inputs)
