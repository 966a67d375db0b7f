"""Replayed calls make the same launches as ordinary calls, at any tensor addresses.

A mock driver records the launches (support.launches).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from triton import knobs

import mxpert
from mxpert import Combine, Scoring
from mxpert.configs import HopperGemmConfig, MoEConfig
from mxpert.core import tables
from mxpert.core.problem import ACTIVATION_FORMATS
from mxpert.core.target import on_device
from mxpert.formats.tensor import Layout, MXTensor
from mxpert.moe.hopper.host import FUSED_MOE
from mxpert.routing.plan import RoutingPlan
from mxpert.testing.problems import MoEShape, random_moe_problem
from support.launches import H200, count_launches, without_device
from support.replays import Launches, check_interleaved, check_replay, check_same, flat, ordinary

SHAPE = MoEShape(
    hidden_size=256, intermediate_size=256, num_experts=8, top_k=2, activation=mxpert.SwiGLU()
)
SPLIT_K = MoEConfig(32, *[HopperGemmConfig("decode", 32, 3, k_splits=2, hi_lo=True)] * 2)
PINNED = MoEConfig(32, *[HopperGemmConfig("decode", 32, 3, hi_lo=True)] * 2)


@pytest.fixture(autouse=True)
def launches() -> Iterator[Launches]:
    with without_device() as made, on_device(H200):
        yield made


RECORD = """
import sys, torch, mxpert
from mxpert.core import replay
from mxpert.core.target import on_device
from support.launches import H200, without_device
recordings, record = [], replay._record
def noted(*arguments):
    result = record(*arguments)
    recordings.append(result[1])
    return result
replay._record = noted
with without_device(record=False), on_device(H200):
    for _ in range(4):
        mxpert.route_topk(torch.randn(17, 32), 2)
print(len(recordings), None in recordings, "torch._dynamo" in sys.modules)
"""


def test_recording_a_call_imports_no_compiler() -> None:
    """torch wraps dispatch modes so that their first use imports torch._dynamo: seconds."""
    options: Any = dict(capture_output=True, text=True, check=True, timeout=120)
    options["env"] = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", RECORD], **options)
    assert done.stdout.split() == ["1", "False", "False"]


class Layer:
    """Arguments of the ops, in newly allocated memory."""

    def __init__(
        self, num_tokens: int, *, layout: Layout = Layout.HOPPER_FRAGMENT, has_bias: bool = False
    ) -> None:
        shape = replace(SHAPE, has_bias=has_bias)
        problem = random_moe_problem(shape, num_tokens, device=torch.device("cpu"))
        self.weights = problem.weights.prepare(device="cpu", layout=layout)
        self.x, self.ids, self.routing = problem.x, problem.topk_ids, problem.topk_weights
        self.logits = torch.randn(num_tokens, SHAPE.num_experts)
        self.bias = torch.randn(SHAPE.num_experts)
        self.expert_map = torch.arange(SHAPE.num_experts, dtype=torch.int32)
        self.num_local = torch.tensor([num_tokens], dtype=torch.int32)
        self.out = torch.empty_like(self.x)
        self.wide_ids, self.narrow = self.ids.long(), self.routing.bfloat16()
        self.rows: dict[str, torch.Tensor | MXTensor] = {}
        self.square = torch.randn(64, 64)

    def fused(self, name: str = "bf16", **options: Any) -> Any:
        return mxpert.fused_moe(
            self.x,
            self.weights,
            self.routing,
            self.ids,
            activation=SHAPE.activation,
            activation_format=name,
            **options,
        )

    def topk(self, **options: Any) -> Any:
        return mxpert.route_topk(self.logits, SHAPE.top_k, **options)

    def plan(self, **options: Any) -> Any:
        return mxpert.make_routing_plan(
            self.routing, self.ids, num_experts=SHAPE.num_experts, routing_block_m=16, **options
        )

    def gate_up(self, name: str) -> Any:
        return mxpert.moe_gate_up(
            self.x, self.weights, self.own_plan, activation=SHAPE.activation, activation_format=name
        )

    def down(self, name: str) -> Any:
        return mxpert.moe_down(self.h(name), self.weights, self.own_plan, activation_format=name)

    @functools.cached_property
    def own_plan(self) -> RoutingPlan:
        return self.plan()

    def h(self, name: str) -> torch.Tensor | MXTensor:
        if name not in self.rows:
            self.rows[name] = self.gate_up(name)
        return self.rows[name]

    @functools.cached_property
    def codes(self) -> MXTensor:
        return mxpert.quantize(self.x, "mxfp8")


CASES: dict[str, tuple[Callable[[], Layer], Callable[[Layer], Any]]] = {
    "topk": (lambda: Layer(5), Layer.topk),
    "topk-groups": (
        lambda: Layer(5),
        lambda layer: layer.topk(
            scoring=Scoring.SIGMOID, num_groups=2, top_groups=1, correction_bias=layer.bias
        ),
    ),
    "plan": (lambda: Layer(5), Layer.plan),
    "plan-two-launches": (lambda: Layer(3000), Layer.plan),
    "plan-of-a-rank": (
        lambda: Layer(5),
        lambda layer: layer.plan(expert_map=layer.expert_map, num_local_tokens=layer.num_local),
    ),
    "quantize": (lambda: Layer(5), lambda layer: mxpert.quantize(layer.x, "mxfp4")),
    "quantize-columns": (
        lambda: Layer(32),
        lambda layer: mxpert.quantize(layer.x, "mxfp8", axis=0),
    ),
    "dequantize": (lambda: Layer(5), lambda layer: mxpert.dequantize(layer.codes)),
    "layer-of-codes": (
        lambda: Layer(4),
        lambda layer: mxpert.fused_moe(
            layer.codes,
            layer.weights,
            layer.routing,
            layer.ids,
            activation=SHAPE.activation,
            activation_format="mxfp8",
        ),
    ),
    "layer-prefill": (lambda: Layer(700), Layer.fused),
    "layer-bias": (lambda: Layer(4, has_bias=True), Layer.fused),
    "layer-of-a-rank": (
        lambda: Layer(4),
        lambda layer: layer.fused(expert_map=layer.expert_map, num_local_tokens=layer.num_local),
    ),
    "layer-out": (lambda: Layer(4), lambda layer: layer.fused(out=layer.out)),
    "layer-out-split-k": (
        lambda: Layer(4),
        lambda layer: pin(SPLIT_K, lambda: layer.fused(out=layer.out)),
    ),
    "layer-out-prefill": (lambda: Layer(700), lambda layer: layer.fused(out=layer.out)),
    "layer-out-portable": (
        lambda: Layer(4, layout=Layout.ROW_MAJOR),
        lambda layer: layer.fused(out=layer.out),
    ),
    "layer-int64": (
        lambda: Layer(4),
        lambda layer: mxpert.fused_moe(
            layer.x, layer.weights, layer.narrow, layer.wide_ids, activation=SHAPE.activation
        ),
    ),
    "layer-portable": (lambda: Layer(4, layout=Layout.ROW_MAJOR), Layer.fused),
    "layer-portable-mxfp8": (
        lambda: Layer(4, layout=Layout.ROW_MAJOR),
        lambda layer: layer.fused("mxfp8"),
    ),
    **{
        f"layer-{name}": (lambda: Layer(4), lambda layer, name=name: layer.fused(name))
        for name in ACTIVATION_FORMATS
    },
    **{
        f"{stage.__name__}-{name}": (
            lambda: Layer(20),
            lambda layer, stage=stage, name=name: stage(layer, name),
        )
        for stage in (Layer.gate_up, Layer.down)
        for name in ACTIVATION_FORMATS
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_replay_launches_what_the_call_does(
    name: str, launches: Launches, replays: list[object]
) -> None:
    check_replay(launches, replays, *CASES[name])


def test_what_decides_is_looked_at(launches: Launches, replays: list[object]) -> None:
    layer, other = Layer(4), Layer(4, has_bias=True)
    more = Layer(5)
    strided = Layer(4)
    strided.x = torch.zeros(4, 512, dtype=torch.bfloat16)[:, :256]
    calls: list[tuple[object, Callable[[], Any]]] = [
        *((one, lambda one=one: one.fused()) for one in (layer, other, more, strided)),
        *(
            (layer, lambda options=options: layer.fused("mxfp8", **options))
            for options in (
                {},
                {"out_dtype": torch.float32},
                {"apply_router_weight_on_input": True},
                {"scale_rule": mxpert.ScaleRule.FLOOR},
                {"expert_map": layer.expert_map},
            )
        ),
        (layer, lambda: pin(PINNED, layer.fused)),
        *(
            (layer, lambda options=options: layer.topk(**options))
            for options in (
                {},
                {"normalize": False},
                {"routed_scaling_factor": 2.0},
                {"correction_bias": layer.bias},
                {"scoring": Scoring.SIGMOID},
            )
        ),
        *(
            (layer, lambda axis=axis, name=name: mxpert.quantize(layer.square, name, axis=axis))
            for axis in (-1, 0)
            for name in ("mxfp4", "mxfp8")
        ),
    ]
    check_interleaved(launches, replays, calls)


def pin(config: MoEConfig, call: Callable[[], Any]) -> Any:
    with mxpert.override(config=config):
        return call()


def test_a_pinned_config_and_a_new_table_are_not_answered_from_before(
    replays: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(4)
    for _ in range(3):
        layer.fused()
    pin(PINNED, layer.fused)
    assert len(replays) == 1
    layer.fused()
    assert len(replays) == 2
    monkeypatch.setattr(
        tables,
        "tuned_row",
        lambda problem, backend: mock.Mock(
            config=[*FUSED_MOE.configs(problem)][1],
            place="a row",
            backend=backend,
            num_tokens=problem.num_tokens,
        ),
    )
    tables.reload_tables()
    layer.fused()
    assert len(replays) == 2, "another config, for the first time"
    monkeypatch.undo()
    tables.reload_tables()


def test_one_config_on_two_backends(launches: Launches, replays: list[object]) -> None:
    """Training ops have no config: two backends' resolutions differ only in the kernel."""
    x = torch.randn(64, 256).bfloat16()
    calls = {}
    for backend in ("hopper", "triton"):

        def call(backend: str = backend) -> Any:
            with mxpert.override(backend=backend):
                return mxpert.quantize_dual(x, "mxfp8")

        calls[backend] = call
    for _ in range(3):
        for call in calls.values():
            call()
    assert replays
    names = {}
    for backend, call in calls.items():
        launches.clear()
        call()
        names[backend] = [launch[4] for launch in launches]
    assert names["hopper"] != names["triton"]


def test_unaligned_arguments_are_launched_as_they_are(
    launches: Launches, replays: list[object]
) -> None:
    layer = Layer(4)
    for _ in range(3):
        layer.topk()
    layer.logits = torch.zeros(33)[1:].view(4, 8)
    replays.clear()
    want = ordinary(launches, layer.topk)
    launches.clear()
    check_same(layer, want, (launches, layer.topk()))
    assert not replays


def test_watched_launches_are_not_replayed(launches: Launches, replays: list[object]) -> None:
    layer = Layer(4)
    for _ in range(3):
        layer.topk()
    replays.clear()
    hook = lambda metadata: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        layer.topk()
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert launches[-1][11] is not None, "the hook"
    assert count_launches(layer.topk) == 1
    assert not replays


def test_the_fill_of_the_deterministic_mode_reaches_every_buffer(replays: list[object]) -> None:
    layer = Layer(4)
    for _ in range(3):
        layer.topk()
    replays.clear()
    torch.use_deterministic_algorithms(True)
    try:
        assert all(weight.isnan().all() for weight in layer.topk()[0])
    finally:
        torch.use_deterministic_algorithms(False)
    assert not replays


def test_other_operators_among_the_launches_are_kept(replays: list[object]) -> None:
    """ATOMIC clears and converts its output with torch operators, so it is not replayed."""
    layer = Layer(4, layout=Layout.ROW_MAJOR)
    for _ in range(4):
        y = layer.fused(combine=Combine.ATOMIC, out_dtype=torch.bfloat16)
    assert not replays
    assert not y.any(), "zeroed, and the kernels here do nothing"


def test_one_tensor_twice_says_nothing_about_two(launches: Launches, replays: list[object]) -> None:
    layer = Layer(4)
    own = layer.num_local
    layer.expert_map = layer.num_local = torch.zeros(1, dtype=torch.int32)

    def run() -> None:
        mxpert.make_routing_plan(
            layer.routing[:, :1].contiguous(),
            layer.ids[:, :1].contiguous(),
            num_experts=1,
            routing_block_m=16,
            expert_map=layer.expert_map,
            num_local_tokens=layer.num_local,
        )

    for _ in range(3):
        run()
    layer.num_local = own
    launches.clear()
    run()
    assert {layer.expert_map.data_ptr(), own.data_ptr()} <= set(flat(launches))


def test_a_backward_pass_is_refused_and_the_mode_is_kept() -> None:
    """In recorded calls as in the first one."""
    layer = Layer(4)
    layer.x.requires_grad_()
    for enabled in (True, False, True):
        with torch.set_grad_enabled(enabled):
            for _ in range(3):
                y = layer.fused()
                assert y.requires_grad is enabled
                if enabled:
                    with pytest.raises(mxpert.UnsupportedError, match="fused_moe: backward"):
                        y.sum().backward()
            assert torch.is_grad_enabled() is enabled


def test_nothing_holds_the_tensors_of_a_call(launches: Launches) -> None:
    layer = Layer(4)
    for _ in range(3):
        y = layer.fused()
    launches.clear()  # the stand-in's record; the first launch of a binary has tensors in it
    held = [weakref.ref(value) for value in (layer.x, layer.weights, y)]
    del layer, y
    assert not any(reference() for reference in held)


WRONG: dict[str, Callable[[Layer], Any]] = {
    "top-k-bool": lambda layer: mxpert.route_topk(layer.logits, True),
    "top-k-list": lambda layer: mxpert.route_topk(layer.logits, [2]),
    "normalize-int": lambda layer: layer.topk(normalize=1),
    "scoring-name": lambda layer: layer.topk(scoring="tanh"),
    "logits-double": lambda layer: mxpert.route_topk(layer.logits.double(), 2),
    "logits-sparse": lambda layer: mxpert.route_topk(layer.logits.to_sparse(), 2),
    "logits-list": lambda layer: mxpert.route_topk(layer.logits.tolist(), 2),
    "unit-bool": lambda layer: mxpert.make_routing_plan(
        layer.routing, layer.ids, num_experts=8, routing_block_m=True
    ),
    "ids-short": lambda layer: mxpert.make_routing_plan(
        layer.routing, layer.ids.short(), num_experts=8, routing_block_m=16
    ),
    "out-short": lambda layer: layer.fused(out=layer.out[1:]),
    "axis-bool": lambda layer: mxpert.quantize(layer.x, "mxfp8", axis=True),
    "axis-float": lambda layer: mxpert.quantize(layer.x, "mxfp8", axis=-1.0),
    "format-list": lambda layer: mxpert.quantize(layer.x, ["mxfp8"]),
    "format-unknown": lambda layer: mxpert.quantize(layer.x, "mxfp9"),
    "rule-name": lambda layer: mxpert.quantize(layer.x, "mxfp8", scale_rule="up"),
    "weight-on-input-int": lambda layer: layer.fused(apply_router_weight_on_input=0),
    "x-float": lambda layer: mxpert.fused_moe(
        layer.x.float(), layer.weights, layer.routing, layer.ids, activation=SHAPE.activation
    ),
    "x-transposed": lambda layer: mxpert.fused_moe(
        layer.x.t().contiguous().t(),
        layer.weights,
        layer.routing,
        layer.ids,
        activation=SHAPE.activation,
    ),
    "weights-none": lambda layer: mxpert.fused_moe(
        layer.x, None, layer.routing, layer.ids, activation=SHAPE.activation
    ),
    "x-meta": lambda layer: mxpert.fused_moe(
        layer.x.to("meta"), layer.weights, layer.routing, layer.ids, activation=SHAPE.activation
    ),
    "activation-name": lambda layer: mxpert.fused_moe(
        layer.x, layer.weights, layer.routing, layer.ids, activation="geglu"
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_as_on_the_first_call(name: str) -> None:
    layer = Layer(4)
    with pytest.raises((TypeError, ValueError)) as cold:
        WRONG[name](layer)
    for _ in range(3):
        mxpert.route_topk(layer.logits, 1)
        layer.topk(), layer.plan(), layer.fused()
        mxpert.quantize(layer.x, "mxfp8")
        mxpert.make_routing_plan(layer.routing, layer.ids, num_experts=8, routing_block_m=1)
    with pytest.raises(type(cold.value)) as warm:
        WRONG[name](layer)
    assert str(warm.value) == str(cold.value)
    assert " — need " in str(warm.value)
