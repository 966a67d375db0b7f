"""The layer for a few tokens compiled for sm_90: registers, shared memory, instructions."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

import torch

from mxpert.core.problem import SiTUv2, SwiGLU
from mxpert.moe.hopper import config as heuristics
from mxpert.moe.hopper import few_tokens
from mxpert.moe.hopper.few_tokens_split import CTAS_PER_SM
from mxpert.moe.inputs import FusedMoEInputs
from mxpert.testing.problems import MODEL_SHAPES, MoEShape
from support.aot import TRITON_RELEASE, CompiledKernel, compile_for
from support.hopper_launches import describe
from support.launches import recorded_launches
from support.without_data import packed, rows_of, weights_of

SM_REGISTERS, SM_SHARED, RESERVED_SHARED = 65536, 228 * 1024, 1024
WARPS = 8
"""Of a CTA: the consumer's warpgroup, and that of the producer."""

MOST_SPILLS = 4 if TRITON_RELEASE >= (3, 9) else 0
"""As measured: kimi-k2 TP4 with four tokens."""

ON_INPUT = replace(MODEL_SHAPES["gpt-oss-120b"], top_k=1, activation=SwiGLU())
VARIANTS = [
    pytest.param(MODEL_SHAPES["gpt-oss-120b"], 1, "bf16", {}, id="gpt-oss-120b-1-bf16"),
    pytest.param(MODEL_SHAPES["gpt-oss-120b"], 2, "mxfp8", {}, id="gpt-oss-120b-2-mxfp8"),
    pytest.param(MODEL_SHAPES["kimi-k2-tp4"], 4, "bf16", {}, id="kimi-k2-tp4-4-bf16"),
    pytest.param(MODEL_SHAPES["dsv3-ep8"], 1, "mxfp4", {}, id="dsv3-ep8-1-mxfp4"),
    pytest.param(
        replace(MODEL_SHAPES["qwen3-235b"], activation=SiTUv2()), 2, "bf16", {}, id="qwen3-situ"
    ),
    pytest.param(ON_INPUT, 1, "bf16", {"apply_router_weight_on_input": True}, id="weight-on-input"),
]


def compiled(shape: MoEShape, num_tokens: int, a_format: str, options: dict) -> CompiledKernel:
    problem = describe(shape, num_tokens, a_format, **options)
    config = heuristics._few_tokens(problem, 3)
    stages = heuristics.require_few_tokens(config, problem)
    inputs = FusedMoEInputs(
        rows_of(num_tokens, problem.hidden_size, None),
        weights_of(problem, packed, has_bias=shape.has_bias),
        torch.empty(num_tokens, shape.top_k, device="meta"),
        torch.empty(num_tokens, shape.top_k, dtype=torch.int32, device="meta"),
    )
    with recorded_launches() as launches:
        few_tokens.few_tokens_layer(problem, stages, inputs)
    (launch,) = launches
    assert launch.grid == (CTAS_PER_SM * problem.target.num_sms,)
    return compile_for(launch.kernel, launch.arguments, target="sm_90")


@pytest.mark.parametrize("shape, num_tokens, a_format, options", VARIANTS)
def test_four_ctas_fit_on_an_sm(
    shape: MoEShape, num_tokens: int, a_format: str, options: dict
) -> None:
    kernel = compiled(shape, num_tokens, a_format, options)
    metrics = kernel.metrics
    assert metrics.matrix_instruction == "wgmma"
    assert metrics.spills <= MOST_SPILLS
    assert metrics.registers * 32 * WARPS * CTAS_PER_SM <= SM_REGISTERS
    assert (metrics.shared_memory + RESERVED_SHARED) * CTAS_PER_SM <= SM_SHARED


def test_sums_travel_whole() -> None:
    """Value and number of the launch are one store of 8 bytes, and readers load past L1."""
    kernel = compiled(MODEL_SHAPES["gpt-oss-120b"], 1, "bf16", {})
    assert kernel.count(r"LDG\.E\.(?:64|128)\.STRONG") > 0
    ptx = kernel.asm["ptx"]
    stores = re.findall(r"st\.global\.(\S+)", ptx)
    assert stores
    assert {store for store in stores if "b64" in store} == {"v2.b64"}
    assert not re.search(r"\b(?:red|atom)\.", ptx)  # no sum depends on an order of arrival
