"""mxpert.MoE: router, prepared experts and activation as one module."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import mxpert
from mxpert import ClampedSiLU, GateUpOrder, MoEWeights, Scoring, SiLU, SwiGLU, UnsupportedError
from mxpert.core.problem import TopKOptions
from mxpert.formats import dequantize_blocks
from mxpert.integrations.checkpoints.gpt_oss import (
    collect_moe_inputs,
    demo_token_ids,
    load_transformers_oracle,
)
from mxpert.integrations.checkpoints.load import load_gpt_oss_layers
from mxpert.modules import quantize_weights
from mxpert.moe import prepared_experts
from mxpert.moe.published_tensors import expert_weights_from
from mxpert.testing.numerics import assert_exact, cosine
from support.gpt_oss import tiny_gpt_oss

E, H, F, K = 4, 64, 32, 2


def dense(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate_up [E, 2F, H], down [E, H, F], router [E, H]."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(E, 2 * F, H, generator=generator) / H**0.5,
        torch.randn(E, H, F, generator=generator) / F**0.5,
        torch.randn(E, H, generator=generator),
    )


def weights_of(seed: int = 0, *, bias: bool = False) -> MoEWeights:
    gate_up, down, _ = dense(seed)
    biases = {"gate_up_bias": torch.randn(E, 2 * F), "down_bias": torch.randn(E, H)}
    return quantize_weights(
        gate_up, down, gate_up_order=GateUpOrder.CONCATENATED, **biases if bias else {}
    )


def layer(seed: int = 0, *, bias: bool = False, **options: Any) -> mxpert.MoE:
    options = {"top_k": K} | options
    return mxpert.MoE(weights_of(seed, bias=bias), dense(seed)[2], **options).eval()


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, H, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("activation", [SiLU(), SwiGLU(), ClampedSiLU(1.0)], ids=lambda a: a.name)
@pytest.mark.parametrize(
    "routing",
    [
        TopKOptions(),
        TopKOptions(scoring=Scoring.SIGMOID, routed_scaling_factor=2.5),
        TopKOptions(num_groups=2, top_groups=1),
    ],
    ids=["softmax", "sigmoid", "groups"],
)
def test_it_computes_routing_and_fused_moe(activation: Any, routing: TopKOptions) -> None:
    correction = torch.tensor([0.0, 0.3, -0.3, 0.1])
    moe = layer(
        bias=True,
        activation=activation,
        routing=routing,
        router_bias=torch.ones(E),
        correction_bias=correction,
    )
    x = rows(3, 7)
    flat = x.flatten(0, 1)
    routed = mxpert.route_topk(
        flat @ dense()[2].T + 1,
        K,
        scoring=routing.scoring,
        num_groups=routing.num_groups,
        top_groups=routing.top_groups,
        correction_bias=correction,
        routed_scaling_factor=routing.routed_scaling_factor,
    )
    wanted = mxpert.fused_moe(
        flat.bfloat16(),
        moe.experts.weights,
        *routed,
        activation=activation,
        out_dtype=torch.float32,
    )
    torch.testing.assert_close(moe(x), wanted.view(x.shape), rtol=1e-5, atol=1e-6)


def test_router_weights_on_the_input_are_llama_4s() -> None:
    """One expert by an unnormalised sigmoid, whose score multiplies x: ``expert(w · x)``."""
    routing = TopKOptions("sigmoid", normalize=False)
    moe = layer(routing=routing, top_k=1, apply_router_weight_on_input=True)
    x = rows(23).bfloat16()
    topk_weights, topk_ids = mxpert.route_topk(
        x.float() @ dense()[2].T, 1, scoring="sigmoid", normalize=False
    )
    expected = mxpert.fused_moe(
        x,
        weights_of(),
        topk_weights,
        topk_ids,
        activation=SiLU(),
        apply_router_weight_on_input=True,
    )
    assert_exact(moe(x), expected, "MoE")
    assert_exact(moe.experts(x, topk_weights, topk_ids), expected, "PreparedExperts")
    on_output = layer(routing=routing, top_k=1)
    assert not torch.equal(on_output(x), expected)
    assert "apply_router_weight_on_input=True" in repr(moe)
    assert "apply_router_weight_on_input" not in repr(on_output)


def test_router_weights_on_the_input_of_several_experts_are_refused() -> None:
    moe = layer(top_k=1, apply_router_weight_on_input=True)
    routing = mxpert.route_topk(rows(5) @ dense()[2].T, K)
    with pytest.raises(ValueError, match=r"PreparedExperts: top_k — need 1 .*, got 2; call fused"):
        moe.experts(rows(5), *routing)


def test_it_is_the_formula_in_the_docstring() -> None:
    moe = layer()
    weights, (_, _, router), x = weights_of(), dense(), rows(5).bfloat16()
    gate_up, down = (
        dequantize_blocks(part).float() for part in (weights.gate_up_proj, weights.down_proj)
    )
    scores, chosen = (x.float() @ router.T).softmax(-1).topk(K)
    scores /= scores.sum(-1, keepdim=True)
    expected = torch.zeros(5, H)
    for token in range(5):
        for slot in range(K):
            expert = int(chosen[token, slot])
            gate, up = (gate_up[expert] @ x[token].float()).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            expected[token] += scores[token, slot] * (down[expert] @ hidden)
    assert cosine(moe(x), expected) > 0.9999
    assert cosine(layer(1)(x), expected) < 0.9  # the comparison can fail


def test_a_gpt_oss_layer_is_transformers_layer(tmp_path: Path) -> None:
    path = tiny_gpt_oss(tmp_path / "demo", intermediate_size=32, num_layers=1)
    (loaded,) = load_gpt_oss_layers(path)
    moe = mxpert.MoE(
        loaded.weights,
        loaded.router_weight.float(),
        top_k=loaded.top_k,
        activation=loaded.activation,
        router_bias=loaded.router_bias.float(),
    ).eval()
    capture = collect_moe_inputs(load_transformers_oracle(path), demo_token_ids(64), 0)
    assert cosine(moe(capture.hidden), capture.output) > 0.9999


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_experts_take_a_routers_own_dtypes(
    weights_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is converted on the way to the op: each conversion would be a kernel."""
    given: list[torch.Tensor] = []

    def noted(x: torch.Tensor, weights: MoEWeights, *routing: torch.Tensor, **options: Any) -> Any:
        given.extend((x, *routing))
        return mxpert.fused_moe(x, weights, *routing, **options)

    monkeypatch.setattr(prepared_experts, "fused_moe", noted)
    moe, x = layer(), rows(5).bfloat16()
    topk_weights, topk_ids = mxpert.route_topk(torch.randn(5, E), K)
    passed = x, topk_weights.to(weights_dtype), topk_ids.long()
    y = moe.experts(*passed)
    assert all(have is want for have, want in zip(given, passed, strict=True))
    assert torch.equal(y, moe.experts(x, passed[1].float(), topk_ids))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_state_dicts_go_around(bias: bool, assign: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"router_bias": torch.randn(E)} if bias else {}
    moe, other = layer(0, bias=bias, **options), layer(1, bias=bias, **options)
    x = rows(6)
    assert not torch.equal(other(x), moe(x))
    torch.save(moe.state_dict(), tmp_path / "moe.pt")
    state = torch.load(tmp_path / "moe.pt", weights_only=True)
    assert {name for name in state if name.startswith("experts.")} == {
        f"experts.{projection}_{kind}"
        for projection in ("gate_up_proj", "down_proj")
        for kind in ("blocks", "scales", *(["bias"] if bias else []))
    }
    other.load_state_dict(state, assign=assign)
    assert_exact(other(x), moe(x), "y")
    small = quantize_weights(
        *(part[:2] for part in dense()[:2]), gate_up_order=GateUpOrder.CONCATENATED
    )
    with pytest.raises(RuntimeError, match=r"size mismatch for experts\.gate_up_proj_blocks"):
        mxpert.MoE(small, dense()[2][:2], top_k=K).load_state_dict(state)


def test_published_tensors_make_the_same_layer() -> None:
    moe = layer(bias=True)
    state = moe.state_dict()
    tensors = {name.removeprefix("experts."): tensor for name, tensor in state.items()}
    again = mxpert.MoE(
        expert_weights_from(tensors, GateUpOrder.INTERLEAVED), state["router.weight"], top_k=K
    ).eval()
    assert_exact(again(rows(6)), moe(rows(6)), "y")


def test_it_can_be_copied_moved_cast_and_compiled() -> None:
    moe, x = layer(correction_bias=torch.zeros(E)), rows(6)
    expected = moe(x)
    assert_exact(copy.deepcopy(moe)(x), expected, "copy")
    assert_exact(moe.to("cpu")(x), expected, "moved")
    assert_exact(torch.compile(moe, fullgraph=True)(x), expected, "compiled")
    assert moe.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert moe.experts.weights.down_proj.qdata.dtype == torch.uint8
    assert moe(x[:0].bfloat16()).shape == (0, H)


def test_it_is_no_trainable_parameter_and_has_no_gradient() -> None:
    moe, x = layer(), rows(6).requires_grad_()
    assert not any(parameter.requires_grad for parameter in moe.parameters())
    with pytest.raises(UnsupportedError, match="backward — need an inference pass"):
        moe(x).sum().backward()
    with pytest.raises(UnsupportedError, match=r"training mode.*mxpert\.training\.MXMoE"):
        moe.train()(x)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "weights": ({"weights": dense()[0]}, TypeError, "weights — need MoEWeights"),
    "router shape": (
        {"router_weight": torch.zeros(E, H + 1)},
        ValueError,
        r"router_weight.shape — need \[4, 64\]",
    ),
    "router dtype": ({"router_weight": torch.zeros(E, H).int()}, TypeError, "router_weight.dtype"),
    "router bias": ({"router_bias": torch.zeros(E).bfloat16()}, TypeError, "router_bias.dtype"),
    "correction": ({"correction_bias": torch.zeros(E + 1)}, ValueError, "correction_bias.shape"),
    "top_k zero": ({"top_k": 0}, ValueError, "top_k — need 1 …"),
    "top_k large": ({"top_k": E + 1}, ValueError, r"top_k — need 1 … 4 "),
    "top_k float": ({"top_k": 2.0}, TypeError, "top_k — need an int"),
    "top_k bool": ({"top_k": True}, TypeError, "top_k — need an int"),
    "activation": ({"activation": "geglu"}, ValueError, "activation — need an activation object"),
    "format": ({"activation_format": "int8"}, ValueError, "activation_format — need one of"),
    "on input": (
        {"apply_router_weight_on_input": True},
        ValueError,
        "top_k — need 1 with apply_router_weight_on_input, got 2",
    ),
    "on input int": (
        {"apply_router_weight_on_input": 1, "top_k": 1},
        TypeError,
        "apply_router_weight_on_input — need a bool",
    ),
    "groups": ({"routing": mxpert.TopKOptions(num_groups=3)}, ValueError, "num_groups — need"),
    "routing": ({"routing": "softmax"}, TypeError, "routing — need TopKOptions"),
    "device": ({"router_weight": torch.zeros(E, H, device="meta")}, ValueError, "device"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    options, error, match = BAD[case]
    given: dict[str, Any] = {"weights": weights_of(), "router_weight": dense()[2], "top_k": K}
    with pytest.raises(error, match=f"^MoE: .*{match}"):
        mxpert.MoE(**given | options)


@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, H + 1), torch.zeros(2, H).int(), torch.tensor(1.0), torch.zeros(2, H).double()],
    ids=["shape", "int", "scalar", "f64"],
)
def test_bad_inputs_are_named(x: torch.Tensor) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^MoE: x"):
        layer()(x)


def test_bad_dense_weights_are_named() -> None:
    gate_up, down, _ = dense()
    order = GateUpOrder.CONCATENATED
    with pytest.raises(ValueError, match=r"^quantize_weights: down_proj\.shape\[-1\] — need a mu"):
        quantize_weights(gate_up, down[..., :20], gate_up_order=order)
    with pytest.raises(TypeError, match=r"^quantize_weights: gate_up_proj\.dtype"):
        quantize_weights(gate_up.double(), down, gate_up_order=order)
    with pytest.raises(ValueError, match=r"gate_up_proj\.shape — need \[E, 2F, H\]"):
        quantize_weights(gate_up[:, :32], down, gate_up_order=order)
    with pytest.raises(ValueError, match=r"gate_up_order — need a GateUpOrder .*'concatenated'"):
        quantize_weights(gate_up, down, gate_up_order="gate_first")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^quantize_weights: gate_up_bias\.dtype"):
        quantize_weights(gate_up, down, gate_up_order=order, gate_up_bias=torch.ones(E).int())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_dtype_leaves_float32_routing_parameters(dtype: torch.dtype) -> None:
    """Rounded to bfloat16, these biases and logits would choose other experts."""
    order = mxpert.GateUpOrder.CONCATENATED
    dense = torch.randn(4, 64, 32), torch.randn(4, 32, 32)
    experts = quantize_weights(*dense, gate_up_order=order)
    bias = torch.tensor([1.0, 1.001, 1.002, 1.003])
    for router_dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(4, 32).to(router_dtype)
        moe = mxpert.MoE(experts, weight.clone(), top_k=1, correction_bias=bias.clone())
        for moved in (moe.to(dtype), moe.to("cpu", dtype), moe.type(dtype)):
            found = moved.state_dict()
            assert torch.equal(found["correction_bias"], bias)
            if router_dtype == torch.float32:
                assert torch.equal(found["router.weight"], weight)
            else:
                assert found["router.weight"].dtype == dtype
    torch.nn.Sequential(moe).to(dtype)
    assert moe.correction_bias.dtype == torch.float32
