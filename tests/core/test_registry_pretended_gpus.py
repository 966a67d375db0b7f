"""A layer and a training step as on an A100, A10, L40S or RTX 5090: all kernels are Triton's.

Launches are recorded and not run, so the results are uninitialised memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import mxpert
from mxpert.core.problem import ACTIVATION_FORMATS
from mxpert.core.target import on_device
from mxpert.errors import PerformanceWarning
from mxpert.moe.prepared_weights import fastest_layout
from mxpert.testing.problems import MoEShape, random_moe_problem
from mxpert.training import MXFP8Recipe, MXGroupedLinear
from support.devices import DEVICES, MMA_SYNC
from support.launches import RecordedLaunch, recorded_launches


@pytest.fixture(params=MMA_SYNC)
def launches(request: pytest.FixtureRequest) -> Iterator[list[RecordedLaunch]]:
    """The launches of calls as on a GPU; a warning that something is slow is an error."""
    with (
        on_device(DEVICES[request.param]),
        recorded_launches() as recorded,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", PerformanceWarning)
        yield recorded


def names(launches: list[RecordedLaunch]) -> set[str]:
    return {launch.kernel.__name__ for launch in launches}


@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
def test_layer(launches: list[RecordedLaunch], a_format: str) -> None:
    shape = MoEShape(hidden_size=256, intermediate_size=256, num_experts=8, top_k=2)
    inputs = random_moe_problem(shape, 64, device="cpu")
    launches.clear()
    topk_weights, topk_ids = mxpert.route_topk(torch.zeros(64, 8), top_k=2)
    mxpert.fused_moe(
        inputs.x,
        inputs.weights,
        topk_weights,
        topk_ids,
        activation=inputs.activation,
        activation_format=a_format,
    )
    assert names(launches) >= {
        "_route_topk_kernel",
        "_routing_plan_expert_kernel",
        "_moe_gate_up_kernel",
        "_moe_down_kernel",
        "_moe_combine_kernel",
    }


def test_training_step(launches: list[RecordedLaunch]) -> None:
    layer = MXGroupedLinear(2, 64, 96, recipe=MXFP8Recipe())
    x = torch.zeros(128, 64, dtype=torch.bfloat16, requires_grad=True)
    layer(x, torch.tensor([0, 64, 128])).sum().backward()
    assert names(launches) >= {
        "_quantize_dual_kernel",
        "_grouped_gemm_kernel",
        "_grouped_wgrad_kernel",
    }


@pytest.mark.parametrize("arch", MMA_SYNC)
def test_dependent_launch_is_asked_for_from_sm_90_on(arch: str) -> None:
    with on_device(DEVICES[arch]), recorded_launches() as launches:
        mxpert.route_topk(torch.zeros(64, 8), top_k=2)
    (launch,) = launches
    assert launch.arguments.get("launch_pdl", False) is (arch == "sm_120")
    assert launch.arguments["USE_PDL"] is (arch == "sm_120")


@pytest.mark.parametrize("arch", MMA_SYNC)
def test_weights_stay_in_row_major(arch: str) -> None:
    assert fastest_layout(arch, ()).name == "ROW_MAJOR"
