"""Portable parts of an MoE layer: rows of fp8_token, scales ahead of their use, refusals."""

from __future__ import annotations

import pytest
import torch

import mxpert
from mxpert.configs import GemmConfig, MoEConfig
from mxpert.core.launch import record_launches
from mxpert.core.problem import Target
from mxpert.core.target import detect_target, on_device
from mxpert.formats import quantize_token_rows
from mxpert.moe.token_rows import quantize_tokens
from mxpert.testing.numerics import assert_exact
from support.devices import DEVICES
from support.executors import Executor
from tests.conformance.cases.moe import EXACT, EXACT_FORMATS


@pytest.mark.parametrize("width", [32, 160, 2880])
def test_token_rows_equal_the_oracle(width: int) -> None:
    """Codes and scales are bit-exact: strided rows, zeros, tiny values, NaN, infinity."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(9, 2 * width, generator=generator).bfloat16()[:, :width]
    x[1], x[2] = 0, x[2] * 2.0**-125
    x[3, 7] *= 2.0**90
    x[4, 5], x[5, 31] = torch.nan, -torch.inf
    found, expected = quantize_tokens(x), quantize_token_rows(x)
    assert_exact(found.scale, expected.scale, "scale")
    good = expected.scale.isfinite()
    assert good.sum() == 7
    assert_exact(found.qdata[good], expected.qdata[good], "codes")
    assert found.block_scale.eq(127).all()


@pytest.mark.parametrize("a_format", EXACT_FORMATS)
@pytest.mark.parametrize("target", [None, DEVICES["gfx950"]], ids=["here", "gfx950"])
def test_scales_are_loaded_a_step_ahead_but_on_amd(a_format: str, target: Target | None) -> None:
    """On AMD the pipeliner loads them ahead. The result is the same."""
    case, executor = EXACT[f"{a_format}-clamped_silu-split"], Executor("triton", "interpreted")
    with on_device(target), record_launches() as records:
        case.check(executor)
        kind = detect_target("cpu").kind
    ahead = [
        record.launch.constants["PREFETCH_SCALES"]
        for record in records
        if "PREFETCH_SCALES" in record.launch.constants
    ]
    assert ahead == [kind != "hip"] * 2


def test_a_config_that_cannot_run_is_refused() -> None:
    case = EXACT["bf16-silu-small"]
    wrong = MoEConfig(32, GemmConfig(16, 48, 128), GemmConfig(16, 128, 128))
    with (
        mxpert.override(backend="triton", config=wrong),
        pytest.raises(ValueError, match=r"moe_gate_up: config — need .*power of two"),
    ):
        case.run(case.inputs())
