"""The ops in traced programs: fake tensors, torch.compile, torch.export, autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mxpert
from mxpert import GateUpOrder, MoEWeights, SwiGLU
from mxpert.core.ops import OPS
from mxpert.core.schema import FlatLayout
from mxpert.moe.checks import moe_options

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, BLOCK = 4, 2, 64, 32, 16
FORMATS = ("bf16", "mxfp8", "mxfp4", "fp8_token")


def _weights() -> MoEWeights:
    generator = torch.Generator().manual_seed(0)
    gate_up, down = (
        mxpert.quantize(torch.randn(EXPERTS, *shape, generator=generator), "mxfp4")
        for shape in ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    )
    return MoEWeights(
        gate_up_proj=gate_up,
        down_proj=down,
        gate_up_order=GateUpOrder.INTERLEAVED,
        down_bias=torch.randn(EXPERTS, HIDDEN, generator=generator),
    )


WEIGHTS = _weights()


def inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x bfloat16 [T, H] and router logits [T, E]."""
    generator = torch.Generator().manual_seed(num_tokens)
    return (
        torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16(),
        torch.randn(num_tokens, EXPERTS, generator=generator),
    )


@dataclass(frozen=True)
class Layer:
    """A router and an MoE layer, fused or in stages, as in user code."""

    activation_format: str
    staged: bool

    def __call__(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        topk_weights, topk_ids = mxpert.route_topk(logits, TOP_K)
        options = {"activation": SwiGLU(), "activation_format": self.activation_format}
        if not self.staged:
            return mxpert.fused_moe(x, WEIGHTS, topk_weights, topk_ids, **options)
        rows = (
            x
            if self.activation_format in ("bf16", "fp8_token")
            else mxpert.quantize(x, self.activation_format)
        )
        plan = mxpert.make_routing_plan(
            topk_weights, topk_ids, num_experts=EXPERTS, routing_block_m=BLOCK
        )
        h = mxpert.moe_gate_up(rows, WEIGHTS, plan, **options)
        return mxpert.moe_down(h, WEIGHTS, plan, activation_format=self.activation_format)


LAYERS = pytest.mark.parametrize(
    "layer",
    [
        pytest.param(Layer(name, staged), id=f"{name}-{'stages' if staged else 'fused'}")
        for name in FORMATS
        for staged in (False, True)
    ],
)


@LAYERS
def test_one_graph_serves_every_token_count(layer: Layer) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    compiled(*inputs(5))
    first = counter.frame_count
    for num_tokens in (5, 3, 17):
        assert torch.equal(compiled(*inputs(num_tokens)), layer(*inputs(num_tokens)))
    assert counter.frame_count == first


@LAYERS
def test_exported_program_keeps_the_token_count_free(layer: Layer) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return layer(x, logits)

    tokens = torch.export.Dim("tokens", min=2, max=1024)
    program = torch.export.export(Module(), inputs(5), dynamic_shapes=({0: tokens}, {0: tokens}))
    for num_tokens in (2, 33):
        assert torch.equal(program.module()(*inputs(num_tokens)), layer(*inputs(num_tokens)))


@LAYERS
def test_fake_tensors_have_the_shape_and_dtype_of_the_result(layer: Layer) -> None:
    want = layer(*inputs(5))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = layer(torch.empty(5, HIDDEN, dtype=torch.bfloat16), torch.empty(5, EXPERTS))
    assert (fake.shape, fake.dtype) == (want.shape, want.dtype)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"])
def test_quantize_round_trip_compiles_as_it_runs(name: str, axis: int) -> None:
    def round_trip(x: torch.Tensor) -> torch.Tensor:
        return mxpert.dequantize(mxpert.quantize(x, name, axis=axis), dtype=torch.bfloat16)

    torch._dynamo.reset()
    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (32, 96):
        x = torch.randn(size, 64, generator=torch.Generator().manual_seed(size))
        assert torch.equal(compiled(x), round_trip(x))


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "fused": Layer("bf16", staged=False),
    "stages": Layer("bf16", staged=True),
    "route_topk": lambda x, logits: mxpert.route_topk(logits, TOP_K)[0],
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CALLS)
def test_outputs_carry_no_gradient(name: str, compiled: bool) -> None:
    torch._dynamo.reset()
    call = CALLS[name]
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    x, logits = (tensor.requires_grad_() for tensor in inputs(5))
    y = call(x, logits)
    if compiled or name == "route_topk":
        assert not y.requires_grad
    else:  # eagerly a layer says that it has no gradient
        with pytest.raises(mxpert.UnsupportedError, match="backward — need an inference pass"):
            y.sum().backward()


def _eager_layer() -> None:
    x, logits = inputs(5)
    for layer in (Layer("bf16", staged=False), Layer("mxfp8", staged=True)):
        layer(x, logits)


EVERY_OP = {
    f"mxpert::{name}"
    for name in (
        "route_topk",
        "make_routing_plan",
        "quantize",
        "moe_gate_up",
        "moe_down",
        "fused_moe",
    )
}


def test_a_dispatch_mode_sees_the_ops() -> None:
    seen: set[str] = set()

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(func.name())
            return func(*args, **(kwargs or {}))

    with Note():
        _eager_layer()
    assert seen >= EVERY_OP


def test_a_function_mode_sees_the_ops() -> None:
    seen: set[str] = set()

    class Note(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.add(str(func).replace(".", "::"))
            return func(*args, **(kwargs or {}))

    with Note():
        _eager_layer()
    assert seen >= EVERY_OP


def test_the_profiler_sees_the_ops() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _eager_layer()
    assert {event.key for event in profile.key_averages()} >= EVERY_OP


def test_a_traced_graph_holds_the_ops() -> None:
    layer = Layer("bf16", staged=False)
    graph = make_fx(layer)(*inputs(5)).graph
    targets = {str(node.target) for node in graph.nodes}
    assert {"mxpert.route_topk.default", "mxpert.fused_moe.default"} <= targets


def test_a_tensor_subclass_sees_the_ops() -> None:
    seen: set[str] = set()

    class Noting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.add(str(func).replace(".", "::"))
            return super().__torch_function__(func, types, args, kwargs or {})

    mxpert.route_topk(inputs(5)[1].as_subclass(Noting), TOP_K)
    assert "mxpert::route_topk" in seen


def test_nothing_else_goes_through_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager calls bypass the dispatcher: rebuilding arguments from a schema costs as much as a
    launch."""
    monkeypatch.setattr(FlatLayout, "flatten", None)
    monkeypatch.setattr(FlatLayout, "rebuild", None)
    with torch.inference_mode():
        _eager_layer()
    _eager_layer()


def _routed(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, logits = inputs(num_tokens)
    topk_weights, topk_ids = mxpert.route_topk(logits, TOP_K)
    return x, topk_weights.bfloat16(), topk_ids.long()


def _into(
    out: torch.Tensor, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    return mxpert.fused_moe(x, WEIGHTS, topk_weights, topk_ids, activation=SwiGLU(), out=out)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_compiled_layer_writes_into_its_output(dynamic: bool) -> None:
    """Rows of a larger buffer, as a caller with one buffer for several layers passes them."""

    def layer(buffer: torch.Tensor, *routed: torch.Tensor) -> torch.Tensor:
        return _into(buffer[1:], *routed) + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for num_tokens in (5, 3):
        x, *routing = _routed(num_tokens)
        want = torch.zeros(num_tokens + 1, HIDDEN, dtype=torch.bfloat16)
        result = layer(want, x, *routing)
        buffer = torch.zeros_like(want)
        assert torch.equal(compiled(buffer, x, *routing), result)
        assert torch.equal(buffer, want)
        assert want[1:].any()


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_fused_moe_out_opcheck(num_tokens: int) -> None:
    spec = OPS["fused_moe_out"]
    options = moe_options("fused_moe", SwiGLU())
    x, topk_weights, topk_ids = _routed(num_tokens)
    flat = spec._layout.flatten(
        (options, x, WEIGHTS, topk_weights, topk_ids, None, None, torch.zeros_like(x))
    )
    torch.library.opcheck(torch.ops.mxpert.fused_moe_out, tuple(flat))
