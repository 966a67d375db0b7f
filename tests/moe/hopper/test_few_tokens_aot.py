"""The layer for a few tokens compiled for sm_90a: registers, shared memory, instructions."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

import torch

from mxpert.core.cuda_kernel import CompiledCudaKernel
from mxpert.core.problem import GELU, ClampedSiLU, MoEProblem, SiLU, SiTUv2, SwiGLU, TopKOptions
from mxpert.formats import MXFP4, MXFP8_E4M3
from mxpert.formats.weight_tensor import WeightLike
from mxpert.moe.hopper import config as heuristics
from mxpert.moe.hopper import few_tokens, few_tokens_limits, group_layout
from mxpert.moe.hopper.group_layout import HOPPER_GROUPS
from mxpert.moe.inputs import FusedMoEInputs, LayerInputs, LogitsInputs
from mxpert.testing.problems import MODEL_SHAPES, MoEShape
from support.aot import disassembled
from support.hopper_launches import describe
from support.launches import recorded_launches, without_device
from support.sass import overwritten_operands, register_operands
from support.without_data import packed, plain_in, rows_of, weights_of

SM_REGISTERS = 65536

GPT_OSS = MODEL_SHAPES["gpt-oss-120b"]
ON_INPUT = replace(GPT_OSS, top_k=1, activation=SwiGLU())
QWEN3 = MODEL_SHAPES["qwen3-235b"]
VARIANTS = [
    pytest.param(GPT_OSS, 1, "bf16", {}, id="gpt-oss-120b-1-bf16"),
    pytest.param(GPT_OSS, 2, "mxfp8", {}, id="gpt-oss-120b-2-mxfp8"),
    pytest.param(GPT_OSS, 8, "mxfp8", {}, id="gpt-oss-120b-8-mxfp8"),
    pytest.param(MODEL_SHAPES["kimi-k2-tp4"], 4, "bf16", {}, id="kimi-k2-tp4-4-bf16"),
    pytest.param(MODEL_SHAPES["dsv3-ep8"], 1, "mxfp4", {}, id="dsv3-ep8-1-mxfp4"),
    pytest.param(replace(QWEN3, activation=SiTUv2()), 2, "bf16", {}, id="situ"),
    pytest.param(replace(QWEN3, activation=SiLU()), 4, "mxfp4", {}, id="silu"),
    pytest.param(replace(QWEN3, activation=GELU()), 1, "mxfp8", {}, id="gelu"),
    pytest.param(replace(QWEN3, activation=GELU("tanh")), 1, "bf16", {}, id="gelu-tanh"),
    pytest.param(replace(QWEN3, activation=ClampedSiLU(7.0)), 1, "bf16", {}, id="clamped-silu"),
    pytest.param(ON_INPUT, 1, "bf16", {"apply_router_weight_on_input": True}, id="weight-on-input"),
    pytest.param(GPT_OSS, 3, "bf16", {"out_dtype": torch.float32}, id="float32"),
]


def compiled(
    shape: MoEShape, num_tokens: int, a_format: str, options: dict, coded: object = None
) -> CompiledCudaKernel:
    problem = describe(shape, num_tokens, a_format, **options)
    inputs = FusedMoEInputs(
        rows_of(num_tokens, problem.hidden_size, coded),
        weights_of(problem, packed, has_bias=shape.has_bias),
        torch.empty(num_tokens, shape.top_k, device="meta"),
        torch.empty(num_tokens, shape.top_k, dtype=torch.int32, device="meta"),
    )
    return compile_launch(problem, inputs)


def compile_launch(problem: MoEProblem, inputs: LayerInputs) -> CompiledCudaKernel:
    config = heuristics.few_tokens_config(problem)
    stages = heuristics.require_few_tokens(config, problem)
    with recorded_launches() as launches:
        few_tokens.few_tokens_layer(problem, stages, inputs)
    (launch,) = launches
    assert launch.grid == (problem.target.num_sms,)
    assert launch.arguments["shared"] <= problem.target.shared_memory
    with without_device(record=False):
        found: CompiledCudaKernel = launch.kernel.compile(launch.arguments)
    return found


def check(kernel: CompiledCudaKernel) -> None:
    """One CTA fits on an SM, and no second one: launches never share it. Nothing is spilled."""
    (registers,) = map(int, re.findall(r"Used (\d+) registers", kernel.log))
    of_a_cta = registers * 32 * few_tokens_limits.WARPS
    assert of_a_cta <= SM_REGISTERS < 2 * of_a_cta
    assert set(re.findall(r"(\d+) bytes spill", kernel.log)) == {"0"}
    assert "serialized" not in kernel.log  # of wgmma


@pytest.mark.parametrize("shape, num_tokens, a_format, options", VARIANTS)
def test_a_cta_fits_on_an_sm(
    shape: MoEShape, num_tokens: int, a_format: str, options: dict
) -> None:
    check(compiled(shape, num_tokens, a_format, options))


@pytest.mark.parametrize("coded, a_format", [(MXFP8_E4M3, "mxfp8"), (MXFP4, "mxfp4")])
def test_quantised_tokens(coded: object, a_format: str) -> None:
    check(compiled(QWEN3, 2, a_format, {}, coded))


ROUTINGS = [
    pytest.param(GPT_OSS, 1, TopKOptions(clamp_nan=True), torch.bfloat16, False, id="gpt-oss"),
    pytest.param(QWEN3, 4, TopKOptions(normalize=False), torch.float16, False, id="qwen3-moe"),
    pytest.param(
        MODEL_SHAPES["kimi-k2-tp4"], 4, TopKOptions("sigmoid"), torch.float32, True, id="kimi-k2"
    ),
    pytest.param(
        replace(GPT_OSS, num_experts=512, top_k=16),
        2,
        TopKOptions("sqrtsoftplus", clamp_nan=True),
        torch.float32,
        True,
        id="most-experts",
    ),
    pytest.param(
        MODEL_SHAPES["deepseek-v3"],
        4,
        TopKOptions("sigmoid", num_groups=8, top_groups=4),
        torch.float32,
        True,
        id="deepseek-v3",
    ),
    pytest.param(
        replace(QWEN3, num_experts=160, top_k=6),
        2,
        TopKOptions(normalize=False, num_groups=8, top_groups=3, group_score="max"),
        torch.bfloat16,
        False,
        id="deepseek-v2",
    ),
    pytest.param(
        replace(GPT_OSS, num_experts=512, top_k=16),
        2,
        TopKOptions(num_groups=32, top_groups=5),
        torch.float32,
        True,
        id="most-groups",
    ),
    pytest.param(
        replace(GPT_OSS, num_experts=512, top_k=16),
        2,
        TopKOptions("sqrtsoftplus", num_groups=2, clamp_nan=True),
        torch.float32,
        True,
        id="largest-groups",
    ),
    pytest.param(
        replace(QWEN3, num_experts=64, top_k=6),
        1,
        TopKOptions(),
        torch.float32,
        True,
        id="ernie-4.5",
    ),
]


@pytest.mark.parametrize("shape, num_tokens, routing, dtype, is_biased", ROUTINGS)
def test_from_logits(
    shape: MoEShape, num_tokens: int, routing: TopKOptions, dtype: torch.dtype, is_biased: bool
) -> None:
    experts = shape.num_experts
    problem = replace(describe(shape, num_tokens, "bf16"), routing=routing, num_routed=experts)
    inputs = LogitsInputs(
        rows_of(num_tokens, problem.hidden_size, None),
        weights_of(problem, packed, has_bias=shape.has_bias),
        torch.empty(num_tokens, experts, dtype=dtype, device="meta"),
        torch.empty(experts, device="meta") if is_biased else None,
    )
    assert few_tokens_limits.chooses_experts(problem, inputs)
    check(compile_launch(problem, inputs))


WEIGHTS = [
    pytest.param("int4_g128", torch.bfloat16, False, 1, "bf16", id="int4_g128"),
    pytest.param("int4_g128", torch.float16, True, 2, "bf16", id="int4_g128-zero_points"),
    pytest.param("int4_g64", torch.float32, False, 4, "mxfp8", id="int4_g64-float32"),
    pytest.param("int4_g32", torch.bfloat16, False, 2, "mxfp4", id="int4_g32"),
    pytest.param("int4_g32", torch.bfloat16, True, 4, "bf16", id="int4_g32-zero_points"),
    pytest.param("nvfp4", None, False, 1, "bf16", id="nvfp4-bf16"),
    pytest.param("nvfp4", None, False, 2, "mxfp8", id="nvfp4-mxfp8"),
    pytest.param("mxfp8_e4m3", None, False, 1, "bf16", id="mxfp8-bf16"),
    pytest.param("mxfp8_e4m3", None, False, 2, "mxfp8", id="mxfp8-mxfp8"),
    pytest.param("mxfp8_e4m3", None, False, 4, "bf16", id="mxfp8-bf16-4"),
]


@pytest.mark.parametrize("format, scales, zero_points, num_tokens, a_format", WEIGHTS)
def test_weights_with_groups(
    format: str, scales: torch.dtype | None, zero_points: bool, num_tokens: int, a_format: str
) -> None:
    """No register of weights is written while a product reads it: ptxas does so where it may."""
    shape = MODEL_SHAPES["kimi-k2-tp4"]
    problem = describe(shape, num_tokens, a_format)
    problem = replace(problem, weight_format=format, weight_layout=HOPPER_GROUPS)

    def projection(experts: int, num_rows: int, depth: int) -> WeightLike:
        plain = plain_in(format)(experts, num_rows, depth)
        if scales is not None:
            zeros = plain.zero_point if zero_points else None
            plain = replace(plain, scale=plain.scale.to(scales), zero_point=zeros)
        return HOPPER_GROUPS._empty(plain, group_layout._described(plain))

    inputs = FusedMoEInputs(
        rows_of(num_tokens, problem.hidden_size, None),
        weights_of(problem, projection, has_bias=shape.has_bias),
        torch.empty(num_tokens, shape.top_k, device="meta"),
        torch.empty(num_tokens, shape.top_k, dtype=torch.int32, device="meta"),
    )
    kernel = compile_launch(problem, inputs)
    check(kernel)
    code = disassembled(kernel.cubin)
    assert register_operands(code) > 0
    assert not overwritten_operands(code)


def test_instructions() -> None:
    """Words travel whole and past L1, no sum depends on an order of arrival, operands wait."""
    code = disassembled(compiled(MODEL_SHAPES["kimi-k2-tp4"], 1, "bf16", {}).cubin)
    words = re.findall(r"\b(?:LDG|STG)\.E\S*STRONG\.GPU", code)
    assert words
    assert all(".64." in word or ".128." in word for word in words), words
    assert not re.search(r"\b(?:RED|ATOM|ATOMG)\.", code)
    assert register_operands(code) > 0
    assert not overwritten_operands(code)
