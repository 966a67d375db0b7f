"""Autocast and matmul precision stay outside of ops, forward and backward; torch.func is refused.

`tests/fuzz/ambient.py` draws such states around every public function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import mxpert
from mxpert import GateUpOrder, UnsupportedError
from mxpert.core.ambient import isolated
from mxpert.modules import PreparedExperts, quantize_weights
from mxpert.testing.numerics import assert_exact
from mxpert.training import MXFP8Recipe, MXMoE, grouped_linear, grouped_mm
from mxpert.training.activation import gated_activation

E, H, F, T = 4, 64, 32, 9
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(T, H, generator=GENERATOR)
WEIGHTS = quantize_weights(
    torch.randn(E, 2 * F, H, generator=GENERATOR),
    torch.randn(E, H, F, generator=GENERATOR),
    gate_up_order=GateUpOrder.CONCATENATED,
)
ROUTER = torch.randn(E, H, generator=GENERATOR)
LOGITS = X @ ROUTER.T
ROUTING = mxpert.route_topk(LOGITS, 2)
OFFSETS = torch.tensor([0, 3, 3, 7, 9])


def layer(x: torch.Tensor = X) -> torch.Tensor:
    return mxpert.fused_moe(
        x.bfloat16(), WEIGHTS, *ROUTING, activation=mxpert.SwiGLU(), out_dtype=torch.float32
    )


def from_logits(x: torch.Tensor = X) -> torch.Tensor:
    return mxpert.fused_moe_from_logits(
        x.bfloat16(), WEIGHTS, LOGITS, 2, activation="silu", out_dtype=torch.float32
    )


def gemm(x: torch.Tensor = X) -> torch.Tensor:
    return mxpert.grouped_gemm(
        x.bfloat16(), WEIGHTS.gate_up_proj.dequantize(torch.bfloat16), OFFSETS
    )


def linear(recipe: MXFP8Recipe, x: torch.Tensor = X) -> list[torch.Tensor]:
    """The result and the gradients of x, weight and bias."""
    leaves = [
        each.clone().requires_grad_() for each in (x, torch.randn(E, H, H), torch.randn(E, H))
    ]
    y = grouped_linear(leaves[0], leaves[1], OFFSETS, bias=leaves[2], recipe=recipe)
    y.backward(torch.cos(y.detach()))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def block(x: torch.Tensor = X) -> list[torch.Tensor]:
    """A training layer: the result, its loss, and all gradients."""
    module, leaf = MXMoE(H, F, E, 2, bias=True), x.clone().requires_grad_()
    y = module(leaf)
    assert module.aux_loss is not None
    (y.square().sum() + module.aux_loss).backward()
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert leaf.grad is not None
    return [y.detach(), module.aux_loss.detach(), leaf.grad, *grads]


CALLS: dict[str, Callable[[], Any]] = {
    "fused_moe": layer,
    "fused_moe_from_logits": from_logits,
    "grouped_gemm": gemm,
    "MoE": lambda: mxpert.MoE(WEIGHTS, ROUTER, top_k=2).eval()(X),
    "linear": lambda: linear(MXFP8Recipe()),
    "plain-linear": lambda: linear(MXFP8Recipe(enabled=False)),
    "MXMoE": block,
}
every_call = pytest.mark.parametrize("name", CALLS)


def results(name: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    found = CALLS[name]()
    return found if isinstance(found, list) else [found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_call
def test_autocast_changes_nothing(name: str, dtype: torch.dtype) -> None:
    expected = results(name)
    with torch.autocast("cpu", dtype):
        found = results(name)
    for number, (have, want) in enumerate(zip(found, expected, strict=True)):
        assert_exact(have, want, f"{name}, result {number}")


@every_call
def test_matmul_precision_changes_nothing(name: str) -> None:
    expected = results(name)
    torch.set_float32_matmul_precision("medium")
    try:
        found = results(name)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    for number, (have, want) in enumerate(zip(found, expected, strict=True)):
        assert_exact(have, want, f"{name}, result {number}")


def test_the_precision_comes_back_when_the_last_thread_leaves() -> None:
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with isolated("cpu"):
            inside.set()
            leave.wait(10)

    torch.set_float32_matmul_precision("high")
    try:
        thread = threading.Thread(target=stay)
        thread.start()
        inside.wait(10)
        with pytest.raises(KeyError), isolated("cpu"):
            raise KeyError
        assert torch.get_float32_matmul_precision() == "highest"
        leave.set()
        thread.join()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    module = MXMoE(H, F, E, 2)
    expected = module(X)
    loss = module.aux_loss
    torch.set_default_dtype(dtype)
    try:
        assert_exact(module(X), expected, "MXMoE")
        assert_exact(module.aux_loss, loss, "its loss")
    finally:
        torch.set_default_dtype(torch.float32)


FOLLOWED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "quantize": lambda x: mxpert.quantize(x, "mxfp8").dequantize(),
    "dequantize": lambda x: (
        mxpert.MXTensor(
            WEIGHTS.down_proj.qdata[0], WEIGHTS.down_proj.scale[0], WEIGHTS.down_proj.format
        ).dequantize()
        * x.sum()
    ),
    "fused_moe": layer,
    "fused_moe_from_logits": from_logits,
    "grouped_gemm": gemm,
    "route_topk": lambda x: mxpert.route_topk(x @ ROUTER.T, 2)[0],
    "grouped_linear": lambda x: grouped_linear(x, torch.ones(E, H, H), OFFSETS),
    "grouped_mm": lambda x: grouped_mm(x, torch.ones(E, H, H), offs=OFFSETS[1:].int()),
    "gated_activation": lambda x: gated_activation(x, mxpert.SiLU()),
    "MXMoE": MXMoE(H, F, E, 2),
}
TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]] = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(X),
    "vjp": lambda f: torch.func.vjp(f, X),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
    "vmap": lambda f: torch.func.vmap(f)(X[None]),
    "jacrev": lambda f: torch.func.jacrev(lambda x: f(x).sum())(X),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", [name for name in FOLLOWED if name != "dequantize"])
def test_transforms_are_refused(name: str, transform: str) -> None:
    """They gave zeros; for the functions that autograd differentiates an error of torch."""
    with pytest.raises(UnsupportedError, match=r": torch.func — need a call outside of grad"):
        TRANSFORMS[transform](FOLLOWED[name])


def test_forward_mode_is_refused() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        with pytest.raises(UnsupportedError, match=r"quantize: torch.func — need"):
            mxpert.quantize(dual, "mxfp8")
        mxpert.quantize(X, "mxfp8")  # a tensor without a tangent


def test_transforms_of_other_tensors_are_allowed() -> None:
    gradient = torch.func.grad(lambda x: (x * layer(X)).sum())(X)
    assert_exact(gradient, layer(X), "the factor of x")


def experts() -> PreparedExperts:
    return PreparedExperts(WEIGHTS, mxpert.SiLU()).eval()


@pytest.mark.parametrize("name", ["gate_up_proj_qdata", "down_proj_scale"])
def test_exchanged_buffers_are_refused(name: str) -> None:
    """They were ignored."""
    module = experts()
    other = getattr(module, name).clone()
    call = X.bfloat16(), *ROUTING
    with pytest.raises(UnsupportedError, match="PreparedExperts: buffers — need the prepared"):
        torch.func.functional_call(module, {name: other}, call)
    expected = module(*call)
    setattr(module, name, other)
    with pytest.raises(UnsupportedError, match="load_state_dict takes the published tensors"):
        module(*call)
    module.load_state_dict(module.state_dict())
    assert_exact(module(*call), expected, "after load_state_dict")


def test_functional_call_exchanges_the_router() -> None:
    module = mxpert.MoE(WEIGHTS, ROUTER, top_k=2).eval()
    other = mxpert.MoE(WEIGHTS, -ROUTER, top_k=2).eval()
    found = torch.func.functional_call(module, {"router.weight": -ROUTER}, (X,))
    assert_exact(found, other(X), "another router")


def test_rows_of_another_width_are_refused() -> None:
    """[1, 9, 128] was read as 18 rows of 64, if there were ids for 18."""
    x = torch.randn(1, T, 2 * H).bfloat16()
    weights, ids = (each.repeat(2, 1) for each in ROUTING)
    with pytest.raises(ValueError, match=r"PreparedExperts: x.shape — need \[\.\.\., 64\]"):
        experts()(x, weights, ids)
