"""mxpert.MoE chooses experts in the call of its layer; hooks on its experts get ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import mxpert
from mxpert import MoE, TopKOptions
from mxpert.modules import PreparedExperts
from mxpert.moe import prepared_experts
from mxpert.testing.problems import MoEShape, random_moe_problem

E, H, K, T = 8, 64, 2, 5
LAYER = random_moe_problem(MoEShape(H, 32, E, K), T)
X = LAYER.x
BIAS = torch.randn(E, generator=torch.Generator().manual_seed(1))


def layer(**changes: Any) -> MoE:
    router = torch.randn(E, H, generator=torch.Generator().manual_seed(2))
    return MoE(LAYER.weights, router, **{"top_k": K, **changes}).eval()


def in_two_calls(moe: MoE, x: torch.Tensor = X) -> torch.Tensor:
    logits = moe.router(x.to(moe.router.weight.dtype))
    bias = moe.correction_bias
    topk = mxpert.route_topk(logits, moe.top_k, **vars(moe.routing), correction_bias=bias)
    return moe.experts(x, *topk)


@pytest.fixture
def from_logits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits of each call of `fused_moe_from_logits` by an experts module."""
    seen: list[torch.Tensor] = []

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        seen.append(arguments[2])
        return mxpert.fused_moe_from_logits(*arguments, **options)

    monkeypatch.setattr(prepared_experts, "fused_moe_from_logits", noted)
    return seen


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(routing=TopKOptions("sigmoid", normalize=False), correction_bias=BIAS),
        dict(
            routing=TopKOptions(
                "sigmoid", num_groups=4, top_groups=2, routed_scaling_factor=2.5, group_score="max"
            )
        ),
        dict(top_k=1, apply_router_weight_on_input=True),
    ],
    ids=["softmax", "sigmoid-bias", "groups", "on-input"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_has_the_bits_of_two_calls(
    options: dict[str, Any], dtype: torch.dtype, from_logits: list[torch.Tensor]
) -> None:
    moe, x = layer(**options), X.to(dtype)
    y = moe(x)
    assert len(from_logits) == 1
    assert y.dtype == dtype
    assert torch.equal(y, in_two_calls(moe, x))
    assert torch.equal(moe(x[None]), y[None])


def test_a_lost_option_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = layer(routing=TopKOptions(normalize=False))
    right = in_two_calls(moe)

    def without(*arguments: Any, routing: object, **options: Any) -> torch.Tensor:
        return mxpert.fused_moe_from_logits(*arguments, **options)

    assert torch.equal(moe(X), right)
    monkeypatch.setattr(prepared_experts, "fused_moe_from_logits", without)
    assert not torch.equal(moe(X), right)


Watch = Callable[[MoE, Callable[..., None]], Any]


@contextmanager
def patched_forward(moe: MoE, note: Callable[..., None]) -> Iterator[None]:
    forward = moe.experts.forward

    def noting(*arguments: torch.Tensor) -> torch.Tensor:
        note(moe.experts, arguments)
        return forward(*arguments)

    moe.experts.forward = noting  # type: ignore[method-assign]  # as Accelerate does
    yield
    del moe.experts.forward


@contextmanager
def wrapped(moe: MoE, note: Callable[..., None]) -> Iterator[None]:
    inner = moe.experts

    class Wrapper(torch.nn.Module):
        def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
            note(inner, arguments)
            return inner(*arguments)

    moe.experts = Wrapper()  # type: ignore[assignment]
    yield
    moe.experts = inner


WATCHES: dict[str, Watch] = {
    "forward-hook": lambda moe, note: moe.experts.register_forward_hook(
        lambda module, given, _: note(module, given)
    ),
    "pre-hook": lambda moe, note: moe.experts.register_forward_pre_hook(note),
    "global-hook": lambda moe, note: torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, given: note(module, given) if module is moe.experts else None
    ),
    "own-forward": patched_forward,
    "wrapper": wrapped,
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", WATCHES)
def test_who_watches_the_experts_gets_ids(
    name: str, compiled: bool, from_logits: list[torch.Tensor]
) -> None:
    moe, given = layer(), []
    right = moe(X)
    from_logits.clear()
    with WATCHES[name](moe, lambda _, arguments: given.append(arguments)):
        torch._dynamo.reset()
        call = torch.compile(moe, backend="eager") if compiled else moe
        assert torch.equal(call(X), right)
    if compiled and name == "global-hook":
        return  # torch.compile does not run hooks of all modules
    ((_, topk_weights, topk_ids),) = given
    assert (topk_weights.shape, topk_ids.dtype) == ((T, K), torch.int32)
    assert not from_logits
    assert torch.equal(moe(X), right)
    assert len(from_logits) == 1, "without the watcher it is one call again"


def test_other_ranks_get_ids(from_logits: list[torch.Tensor]) -> None:
    ranks = mxpert.ExpertParallel(num_experts=E, top_k=K, hidden_size=H, max_tokens=16)
    assert torch.equal(layer(expert_parallel=ranks)(X), layer()(X))
    assert len(from_logits) == 1


def test_a_subclass_keeps_its_forward(from_logits: list[torch.Tensor]) -> None:
    class Halved(PreparedExperts):
        def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
            return super().forward(*arguments) / 2

    moe = layer()
    right = moe(X)
    moe.experts = Halved(moe.experts.weights, mxpert.SiLU())
    assert torch.equal(moe(X), right / 2)


def test_the_compiled_module_holds_one_op() -> None:
    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    moe = layer(correction_bias=BIAS, routing=TopKOptions("sigmoid"))
    assert torch.equal(torch.compile(moe, fullgraph=True, backend=backend)(X), moe(X))
    assert [node for node in nodes if "mxpert" in node] == ["mxpert.fused_moe_from_logits"]


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda e: e.from_logits(X, torch.zeros(T, 4), K), ValueError, r"logits.shape — need \[5"),
        (lambda e: e.from_logits(X[:, :32], torch.zeros(T, E), K), ValueError, "x.shape — need"),
        (lambda e: e.from_logits(X, torch.zeros(T, E), 0), ValueError, "top_k — need 1"),
        (
            lambda e: e.train().from_logits(X.clone().requires_grad_(), torch.zeros(T, E), K),
            mxpert.UnsupportedError,
            "PreparedExperts: training — need evaluation mode",
        ),
    ],
    ids=["logits", "x", "top_k", "training"],
)
def test_errors(call: Callable[[PreparedExperts], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call(layer().experts)


def test_errors_of_the_module() -> None:
    moe = layer(top_k=1, apply_router_weight_on_input=True)
    with pytest.raises(ValueError, match="top_k — need 1 with apply_router_weight_on_input, got 2"):
        moe.experts.from_logits(X, torch.zeros(T, E), 2)
    exchanged = {"experts.gate_up_proj_scale": moe.experts.weights.gate_up_proj.scale.clone()}
    with pytest.raises(mxpert.UnsupportedError, match="PreparedExperts: buffers — need"):
        torch.func.functional_call(moe, exchanged, (X,))
    y = moe(X.clone().requires_grad_())
    with pytest.raises(mxpert.UnsupportedError, match="backward — need an inference pass"):
        y.sum().backward()


def test_x_of_any_strides() -> None:
    moe = layer()
    y = moe(X)
    assert torch.equal(moe(X.mT.contiguous().mT), y)
    assert torch.equal(moe.experts.from_logits(X.mT.contiguous().mT, moe.router(X.float()), K), y)
