"""`num_sms`: who keeps to it, who refuses it and with which words, and what `explain` says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import mxpert
from mxpert import UnsupportedError
from mxpert.configs import Cdna4GemmConfig, HopperGemmConfig, HopperKernel, MoEConfig
from mxpert.core.problem import GroupedProblem, MoEProblem, Op, leaves_sms, resident_programs
from mxpert.core.registry import explain_problem
from mxpert.core.target import on_device
from mxpert.formats.tensor import Layout
from mxpert.moe.cdna4.config import prefill_config
from mxpert.testing.problems import MODEL_SHAPES, MoEShape, random_moe_problem
from mxpert.training import MXFP8Recipe, MXGroupedLinear, MXMoE, grouped_linear, grouped_mm
from support.devices import DEVICES
from support.launches import RecordedLaunch, recorded_launches
from support.layers import plan_of
from support.without_data import layer_of

LAYOUTS = {"sm_90": Layout.HOPPER_FRAGMENT, "gfx950": Layout.CDNA4_FRAGMENT}
OFFSETS = torch.tensor([0, 40, 64])


def layer(
    arch: str, num_tokens: int = 8192, a_format: str = "mxfp8", num_sms: int | None = 8
) -> MoEProblem:
    layout = LAYOUTS.get(arch, Layout.ROW_MAJOR)
    shape = MODEL_SHAPES["gpt-oss-20b"]
    return layer_of(shape, num_tokens, DEVICES[arch], layout, a_format, num_sms=num_sms)


def grouped(arch: str, num_sms: int | None = 8, op: Op = Op.GROUPED_GEMM) -> GroupedProblem:
    name, trans_b = "mxfp8_e4m3", op is Op.GROUPED_GEMM
    sizes = 4096, 8, 2880, 2880
    return GroupedProblem(
        op, DEVICES[arch], *sizes, name, name, trans_b, torch.bfloat16, num_sms=num_sms
    )


@pytest.mark.parametrize("op", [Op.GROUPED_GEMM, Op.GROUPED_WGRAD], ids=lambda op: op.value)
@pytest.mark.parametrize(
    ("arch", "backend"), [("sm_90", "hopper"), ("gfx950", "cdna4"), ("sm_100", "triton")]
)
def test_grouped_gemms_keep_to_it_everywhere(arch: str, backend: str, op: Op) -> None:
    found, free = explain_problem(grouped(arch, 8, op)), explain_problem(grouped(arch, None, op))
    assert found.resolution == free.resolution
    assert found.resolution.kernel.backend == backend
    assert f"SMs:     GEMMs occupy at most 8 of {DEVICES[arch].num_sms}" in str(found)
    assert "SMs:" not in str(free)


def test_layers_of_hopper_keep_their_config() -> None:
    for num_tokens in (64, 8192):
        found, free = (explain_problem(layer("sm_90", num_tokens, num_sms=n)) for n in (8, None))
        assert found.resolution == free.resolution
        assert "SMs:     GEMMs occupy at most 8 of 132" in str(found)


def test_one_launch_for_few_tokens_has_no_persistent_grid() -> None:
    tile = HopperGemmConfig("few_tokens", 8, 3, consumers=1, hi_lo=False)
    with (
        mxpert.override(config=MoEConfig.of(tile, tile)),
        pytest.raises(UnsupportedError, match="num_sms — need a config with a persistent grid"),
    ):
        explain_problem(layer("sm_90", 1))


def test_a_prefill_layer_of_gfx950_gets_a_persistent_grid() -> None:
    free = explain_problem(layer("gfx950", num_sms=None)).resolution.config
    found = explain_problem(layer("gfx950")).resolution.config
    assert not free.gate_up.persistent
    for stage in ("gate_up", "down"):
        assert getattr(found, stage) == replace(getattr(free, stage), persistent=True)


REFUSED: dict[str, tuple[MoEProblem, str]] = {
    "portable": (layer("sm_100"), "triton has no persistent grid to keep to num_sms; drop num_sms"),
    "plain layout": (
        replace(layer("sm_90"), weight_layout=Layout.ROW_MAJOR),
        "hopper needs weights in HOPPER_FRAGMENT layout",
    ),
    "decode of gfx950": (
        layer("gfx950", 8),
        "cdna4 has no persistent grid to keep to num_sms; drop num_sms, or pass tokens enough for "
        "the prefill kernel",
    ),
    "bf16 of gfx950": (
        layer("gfx950", 8192, "bf16"),
        "drop num_sms, or pass activation_format='mxfp8'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_without_a_persistent_grid_are_refused(name: str) -> None:
    problem, words = REFUSED[name]
    with pytest.raises(UnsupportedError, match=re.escape(words)) as refused:
        explain_problem(problem)
    assert "\n" not in str(refused.value)
    explain_problem(replace(problem, options=replace(problem.options, num_sms=None)))


@pytest.mark.parametrize(
    "stage", [prefill_config(128), Cdna4GemmConfig("decode", 16, 256)], ids=["prefill", "decode"]
)
def test_a_pinned_config_without_a_persistent_grid_raises(stage: Cdna4GemmConfig) -> None:
    pinned = MoEConfig.of(stage, stage)
    with (
        mxpert.override(config=pinned),
        pytest.raises(UnsupportedError, match="num_sms — need a config with a persistent grid"),
    ):
        explain_problem(layer("gfx950"))


def test_a_pinned_persistent_config_is_taken() -> None:
    stage = replace(prefill_config(128), persistent=True)
    with mxpert.override(config=MoEConfig.of(stage, stage)):
        assert explain_problem(layer("gfx950")).resolution.config.gate_up == stage


def test_the_reference_refuses_it() -> None:
    a, b = torch.ones(64, 32).bfloat16(), torch.ones(2, 5, 32).bfloat16()
    with pytest.raises(UnsupportedError, match=r"reference has no persistent grid .* drop num_sms"):
        mxpert.grouped_gemm(a, b, OFFSETS, num_sms=1)
    with pytest.raises(UnsupportedError, match="reference has no persistent grid"):
        mxpert.grouped_wgrad(a, a, OFFSETS, num_sms=1)


def test_number_of_programs() -> None:
    """A grid that leaves SMs has one program for each: a second one would take another SM."""
    problem = grouped("sm_90")
    for limit, per_sm, programs in ((None, 2, 264), (132, 2, 264), (131, 2, 131), (1, 8, 1)):
        limited = replace(problem, num_sms=limit)
        assert resident_programs(limited, per_sm) == programs
        assert leaves_sms(limited) is (limit not in (None, 132))


# ---- arguments


def fused_moe(num_sms: Any) -> None:
    inputs = random_moe_problem(MoEShape(64, 32, 4, 2), 5)
    routed = inputs.topk_weights, inputs.topk_ids
    mxpert.fused_moe(inputs.x, inputs.weights, *routed, activation="silu", num_sms=num_sms)


def from_logits(num_sms: Any) -> None:
    inputs = random_moe_problem(MoEShape(64, 32, 4, 2), 5)
    layer = inputs.x, inputs.weights, torch.zeros(5, 4), 2
    mxpert.fused_moe_from_logits(*layer, activation="silu", num_sms=num_sms)


def stage(which: str) -> Callable[[Any], None]:
    inputs = random_moe_problem(MoEShape(64, 32, 4, 2), 5)
    plan = plan_of(inputs, 16)

    def call(num_sms: Any) -> None:
        if which == "gate_up":
            options = dict(activation="silu", num_sms=num_sms)
            mxpert.moe_gate_up(inputs.x, inputs.weights, plan, **options)
        else:
            h = torch.zeros(plan.capacity, 32, dtype=torch.bfloat16)
            mxpert.moe_down(h, inputs.weights, plan, num_sms=num_sms)

    return call


def grouped_call(op: str) -> Callable[[Any], None]:
    def call(num_sms: Any) -> None:
        a, b = torch.ones(64, 32).bfloat16(), torch.ones(2, 32, 32).bfloat16()
        calls: dict[str, Callable[[], object]] = {
            "gemm": lambda: mxpert.grouped_gemm(a, b, OFFSETS, num_sms=num_sms),
            "wgrad": lambda: mxpert.grouped_wgrad(a, a, OFFSETS, num_sms=num_sms),
            "linear": lambda: grouped_linear(a, b, OFFSETS, num_sms=num_sms),
            "mm": lambda: grouped_mm(a, b, OFFSETS[1:].int(), num_sms=num_sms),
            "outer": lambda: grouped_mm(a.mT, a, OFFSETS[1:].int(), num_sms=num_sms),
        }
        calls[op]()

    return call


CALLS: dict[str, Callable[[Any], None]] = {
    "fused_moe": fused_moe,
    "fused_moe_from_logits": from_logits,
    "moe_gate_up": stage("gate_up"),
    "moe_down": stage("down"),
    "grouped_gemm": grouped_call("gemm"),
    "grouped_wgrad": grouped_call("wgrad"),
    "grouped_linear": grouped_call("linear"),
    "grouped_mm": grouped_call("mm"),
    "grouped_mm-outer": grouped_call("outer"),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_values(name: str) -> None:
    op = name.partition("-")[0]
    for value in (1.5, True, "8"):
        with pytest.raises(TypeError, match=rf"{op}: num_sms — need an int or None, got"):
            CALLS[name](value)
    for value in (0, -3):
        with pytest.raises(ValueError, match=rf"{op}: num_sms — need at least 1, got {value}"):
            CALLS[name](value)
    with on_device(DEVICES["sm_100"]), pytest.raises(ValueError, match=r"need 1 to 148, which "):
        CALLS[name](149)


def test_products_of_torch_refuse_it() -> None:
    plain = MXFP8Recipe(enabled=False)
    a, b = torch.ones(64, 32), torch.ones(2, 5, 32)
    with pytest.raises(ValueError, match="num_sms — need None where torch multiplies, got 1; pass"):
        grouped_linear(a, b, OFFSETS, recipe=plain, num_sms=1)
    with pytest.raises(ValueError, match="num_sms — need None where torch multiplies"):
        grouped_mm(a.mT, a, OFFSETS[1:].int(), recipe=plain, num_sms=1)


# ---- launches of the modules


def grids(launches: list[RecordedLaunch]) -> dict[str, set[tuple[int, ...]]]:
    found: dict[str, set[tuple[int, ...]]] = {}
    for launch in launches:
        name = launch.kernel.__name__
        if "gemm" in name or "wgrad" in name:
            found.setdefault(name, set()).add(launch.grid)
    return found


RECIPES = {
    "mxfp8": MXFP8Recipe(),
    "bf16": MXFP8Recipe(enabled=False),
    "high_precision": MXFP8Recipe(high_precision_wgrad=True),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("num_sms", [1, 74, 148])
def test_the_gemms_of_a_training_step(num_sms: int, recipe: MXFP8Recipe) -> None:
    """Forward, dgrad and wgrad, of the function and of the modules."""
    options: dict[str, Any] = dict(recipe=recipe, dtype=torch.bfloat16, num_sms=num_sms)
    linear, moe = MXGroupedLinear(2, 1024, 8192, **options), MXMoE(1024, 4096, 2, 2, **options)
    x = torch.zeros(1024, 1024, dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor([0, 640, 1024])
    for call in (
        lambda: linear(x, offsets),
        lambda: moe(x),
        lambda: grouped_linear(x, linear.weight, offsets, recipe=recipe, num_sms=num_sms),
        lambda: grouped_mm(x, linear.weight.mT, offsets[1:].int(), recipe=recipe, num_sms=num_sms),
    ):
        with on_device(DEVICES["sm_100"]), recorded_launches() as launches:
            call().sum().backward()
        found = grids(launches)
        assert set(found) == {"_grouped_gemm_kernel", "_grouped_wgrad_kernel"}
        assert max(set().union(*found.values())) == (num_sms,)
    outer = torch.zeros(1024, 2048, dtype=torch.bfloat16, requires_grad=True)
    with on_device(DEVICES["sm_100"]), recorded_launches() as launches:
        options = dict(recipe=recipe, num_sms=num_sms)
        grouped_mm(outer.mT, outer, offsets[1:].int(), **options).sum().backward()
    assert set().union(*grids(launches).values()) == {(num_sms,)}
    assert f"num_sms={num_sms}" in repr(linear)


@pytest.mark.parametrize("num_sms", [1, 66])
def test_a_module_for_inference_passes_it_on(num_sms: int) -> None:
    shape = MoEShape(256, 256, num_experts=4, top_k=2)
    weights = random_moe_problem(shape, 1).weights.prepare(
        device="cpu", layout=Layout.HOPPER_FRAGMENT
    )
    router = torch.randn(4, 256)
    module = mxpert.MoE(weights, router, top_k=2, num_sms=num_sms).eval()
    with on_device(DEVICES["sm_90"]), recorded_launches() as launches, torch.no_grad():
        module(torch.randn(8, 256, dtype=torch.bfloat16))
    assert grids(launches) == {"_moe_gemm_decode_kernel": {(num_sms,)}}


def test_hopper_config_of_another_kernel_is_not_taken_for_persistent() -> None:
    from mxpert.moe.hopper.host import GATE_UP

    problem = layer("sm_90")
    config = HopperGemmConfig("decode", block_m=8, num_stages=5)
    assert GATE_UP.persistent(problem, config) is config
    few = replace(config, kernel=HopperKernel.FEW_TOKENS)
    assert "no persistent grid" in str(GATE_UP.persistent(problem, few))
