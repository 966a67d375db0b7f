"""MXGroupedLinear, MXMoE, grouped_mm, activations: against plain torch, memory, state, compile."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, linear, silu

import mxpert
from mxpert.core.problem import Activation
from mxpert.testing.numerics import is_exact, sqnr_db
from mxpert.training import MXFP8Recipe, MXGroupedLinear, MXMoE, grouped_linear, grouped_mm
from mxpert.training.activation import gated_activation
from mxpert.training.permute import CombineRows, PermuteRows, sort_by_expert
from support.training import ACTIVATIONS, layer_floor_db

PLAIN = MXFP8Recipe(enabled=False)


def activate(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The definitions of `mxpert.core.problem`, in plain torch."""
    match activation:
        case mxpert.SiLU():
            return silu(gate) * up
        case mxpert.SwiGLU(alpha=alpha, limit=limit, beta=beta):
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return gate * torch.sigmoid(alpha * gate) * (up + beta)
        case mxpert.GELU(approximate=approximate):
            return gelu(gate, approximate=approximate) * up
        case mxpert.ClampedSiLU(limit=limit):
            return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        case mxpert.SiTUv2(beta=beta, beta_up=beta_up):
            gated = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
            return gated * (beta_up * torch.tanh(up / beta_up))


def plain_moe(moe: MXMoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the block computes, one expert after the other, and its auxiliary loss."""
    probabilities = linear(x, moe.router).softmax(-1)
    weights, ids = probabilities.topk(moe.top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    counts = torch.zeros(moe.num_experts, dtype=x.dtype)
    for expert in range(moe.num_experts):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        counts[expert] = len(token)
        biases = [
            None if layer.bias is None else layer.bias[expert]
            for layer in (moe.gate_up_proj, moe.down_proj)
        ]
        gate, up = linear(x[token], moe.gate_up_proj.weight[expert], biases[0]).chunk(2, -1)
        rows = linear(activate(moe.activation, gate, up), moe.down_proj.weight[expert], biases[1])
        y = y.index_add(0, token, weights[token, slot, None] * rows)
    loss = moe.num_experts * (counts / ids.numel() * probabilities.mean(0)).sum()
    return y, moe.aux_loss_coef * loss


def step(
    moe: MXMoE, x: torch.Tensor, grad: torch.Tensor, plain: bool = False
) -> dict[str, torch.Tensor]:
    """Output, loss and every gradient of one pass."""
    x = x.detach().clone().requires_grad_()
    moe.zero_grad()
    y, loss = plain_moe(moe, x) if plain else (moe(x), moe.aux_loss)
    ((y * grad).sum() + 100 * loss).backward()
    found = {name: parameter.grad.clone() for name, parameter in moe.named_parameters()}
    return {"y": y.detach(), "aux_loss": loss.detach(), "x": x.grad, **found}


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_moe_equals_a_loop_over_experts_in_float64(activation: Activation, bias: bool) -> None:
    torch.manual_seed(0)
    moe = MXMoE(6, 5, 4, 2, activation=activation, recipe=PLAIN, bias=bias, dtype=torch.float64)
    x, grad = torch.randn(2, 9, 6, dtype=torch.float64)
    found, wanted = step(moe, x, grad), step(moe, x, grad, plain=True)
    for name in wanted:
        torch.testing.assert_close(
            found[name], wanted[name], msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    "tokens, experts, top_k",
    [(1, 5, 1), (40, 3, 3), (33, 1, 1), (24, 8, 2)],
    ids=["one-token", "all-experts", "one-expert", "some-experts"],
)
def test_quantised_moe_is_near_the_loop(tokens: int, experts: int, top_k: int) -> None:
    torch.manual_seed(1)
    moe = MXMoE(64, 96, experts, top_k)
    x, grad = torch.randn(2, tokens, 64).bfloat16()
    found = step(moe, x, grad.float())
    exact = copy.deepcopy(moe).double()
    wanted = step(exact, x.double(), grad.double(), plain=True)
    for name, value in wanted.items():
        assert found[name].shape == value.shape
        if value.abs().max() < 1e-6:  # one expert leaves nothing to route
            assert found[name].abs().max() < 1e-3
        else:
            snr = sqnr_db(found[name], value)
            floor = layer_floor_db(x.numel())
            assert snr >= floor, f"{name}: {snr:.1f} dB, floor {floor:.1f}"


def test_moe_repeats_bit_for_bit_and_takes_no_tokens() -> None:
    torch.manual_seed(2)
    moe = MXMoE(32, 32, 4, 2, bias=True)
    x, grad = torch.randn(2, 3, 7, 32).bfloat16()
    first, second = step(moe, x, grad), step(moe, x, grad)
    assert all(is_exact(first[name], second[name]) for name in first)
    empty = step(moe, x[:0], grad[:0])
    assert empty.pop("y").shape == (0, 7, 32)
    assert not any(value.any() for value in empty.values())


@pytest.mark.parametrize("top_k", [1, 2])
def test_aux_loss_of_balance_and_collapse(top_k: int) -> None:
    """coef in perfect balance; with one expert per token and all tokens on it, coef · E."""
    moe = MXMoE(32, 32, 4, top_k, aux_loss_coef=0.5)
    with torch.no_grad():
        moe.router.zero_()
        moe.router[range(4), range(4)] = 50.0
    balanced = torch.eye(4, 32)
    if top_k == 2:
        balanced = balanced + 0.5 * balanced.roll(1, 0)[:, :32]
    moe(balanced)
    probability = torch.softmax(moe.router @ balanced.T, 0).mean(1)
    torch.testing.assert_close(probability, torch.full((4,), 0.25))
    assert moe.aux_loss.item() == pytest.approx(0.5, rel=1e-6)
    if top_k == 1:
        moe(torch.eye(4, 32)[:1].expand(8, 32))
        assert moe.aux_loss.item() == pytest.approx(0.5 * 4, rel=1e-6)


def test_moe_keeps_what_is_documented() -> None:
    torch.manual_seed(3)
    tokens, hidden, ffn, experts, top_k = 256, 64, 96, 4, 2
    rows = tokens * top_k
    moe = MXMoE(hidden, ffn, experts, top_k, dtype=torch.bfloat16)
    x = torch.randn(tokens, hidden).bfloat16().requires_grad_()
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = moe(x)
    capacity = mxpert.padded_capacity(rows, experts)
    copies = sum(
        size * 33 // 32
        for size in (
            hidden * capacity,
            experts * hidden * 2 * ffn,
            ffn * capacity,
            experts * ffn * hidden,
        )
    )
    plain = 2 * (rows * 2 * ffn + rows * hidden + tokens * hidden + experts * hidden)
    small = sum(storages.values()) - copies - plain
    # per token: at most five numbers for each expert and six for each slot, of 8 bytes
    assert 0 <= small <= tokens * 8 * (5 * experts + 6 * top_k) + 1024, small
    y.sum().backward()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activation_and_its_derivatives(activation: Activation) -> None:
    torch.manual_seed(4)
    gate_up = (2 * torch.randn(5, 16, dtype=torch.float64)).requires_grad_()
    torch.testing.assert_close(
        gated_activation(gate_up, activation), activate(activation, *gate_up.chunk(2, -1))
    )
    assert torch.autograd.gradcheck(gated_activation, (gate_up, activation))


def test_sort_by_expert_is_stable() -> None:
    ids = torch.tensor([[3, 1], [1, 0], [1, 3]])
    order, inverse, offsets = sort_by_expert(ids, 5)
    assert order.tolist() == [3, 1, 2, 4, 0, 5]
    assert order[inverse].tolist() == list(range(6))
    assert offsets.tolist() == [0, 1, 4, 4, 6, 6]


def test_permutation_and_combine_in_float64() -> None:
    torch.manual_seed(15)
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(7)])
    order, inverse, _ = sort_by_expert(ids, 5)
    tokens = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(7, 3, dtype=torch.float64, requires_grad=True)

    def there_and_back(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = PermuteRows.apply(tokens, order, inverse, 3)
        return CombineRows.apply(rows, inverse.view(ids.shape), weights)

    torch.testing.assert_close(
        there_and_back(tokens, weights), tokens * weights.sum(1, keepdim=True)
    )
    assert torch.autograd.gradcheck(there_and_back, (tokens, weights))


COMPILED = {
    "mxfp8": MXFP8Recipe(),
    "high-precision": MXFP8Recipe(high_precision_wgrad=True),
    "bf16": PLAIN,
}


@pytest.mark.parametrize("name", COMPILED)
def test_torch_compile_without_a_graph_break(name: str) -> None:
    torch.manual_seed(5)
    moe = MXMoE(32, 32, 4, 2, bias=True, recipe=COMPILED[name])
    compiled = torch.compile(copy.deepcopy(moe), backend="aot_eager", fullgraph=True)
    for module in (moe, compiled):
        module.down_proj.weight.main_grad = torch.zeros(4, 32, 32)
    for seed in range(2):  # other group sizes, same graph
        torch.manual_seed(seed)
        x, grad = torch.randn(2, 12, 32).bfloat16()
        results = []
        for module in (moe, compiled):
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            ((y * grad).sum() + module.aux_loss).backward()
            results.append(
                (
                    y,
                    leaf.grad,
                    module.router.grad,
                    module.gate_up_proj.weight.grad,
                    module.down_proj.weight.main_grad,
                    module.gate_up_proj.bias.grad,
                )
            )
        for eager, graph in zip(*results, strict=True):
            assert is_exact(graph, eager)


def test_autocast_changes_nothing() -> None:
    torch.manual_seed(13)
    moe = MXMoE(32, 32, 4, 2, bias=True)
    x, grad = torch.randn(2, 12, 32).bfloat16()
    plain = step(moe, x, grad)
    with torch.autocast("cpu", torch.bfloat16):
        inside = step(moe, x, grad)
    assert all(is_exact(inside[name], value) for name, value in plain.items())


def test_torch_compile_with_another_number_of_tokens() -> None:
    torch.manual_seed(14)
    moe = MXMoE(32, 32, 4, 2)
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 24):
        x = torch.randn(tokens, 32).bfloat16()
        assert is_exact(compiled(x), moe(x))


def test_state_copies_and_conversions() -> None:
    torch.manual_seed(6)
    moe = MXMoE(32, 64, 4, 2, bias=True)
    x = torch.randn(5, 32).bfloat16()
    y = moe(x)
    assert set(moe.state_dict()) == {
        "router",
        "gate_up_proj.weight",
        "gate_up_proj.bias",
        "down_proj.weight",
        "down_proj.bias",
    }
    other = MXMoE(32, 64, 4, 2, bias=True)
    assert not is_exact(other(x), y)
    other.load_state_dict(moe.state_dict())
    stored = io.BytesIO()
    torch.save(moe, stored)
    stored.seek(0)
    for same in (other, copy.deepcopy(moe), torch.load(stored, weights_only=False)):
        assert is_exact(same(x), y)
    narrow = copy.deepcopy(moe).to(torch.bfloat16)
    assert narrow.gate_up_proj.weight.dtype == torch.bfloat16
    assert narrow(x).dtype == torch.bfloat16
    assert "num_experts=4" in repr(moe)
    assert "mxfp8_e4m3" in repr(moe.gate_up_proj)


def test_reset_parameters_is_uniform_within_the_fan_in_bound() -> None:
    torch.manual_seed(7)
    moe = MXMoE(64, 256, 8, 2, bias=True)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.fill_(math.nan)
    moe.reset_parameters()
    for name, fan_in in (
        ("router", 64),
        ("gate_up_proj.weight", 64),
        ("gate_up_proj.bias", 64),
        ("down_proj.weight", 256),
        ("down_proj.bias", 256),
    ):
        value = moe.get_parameter(name)
        bound = fan_in**-0.5
        assert value.abs().max() <= bound
        # the deviation of n uniform values is off by √(1/5n) of itself; five of these
        assert value.std().item() == pytest.approx(
            bound / math.sqrt(3), rel=5 * math.sqrt(0.2 / value.numel())
        )


@pytest.mark.parametrize(
    "options, error, text",
    [
        (dict(hidden_size=48), ValueError, "hidden_size — need a positive multiple of 32, got 48"),
        (dict(intermediate_size=0), ValueError, "intermediate_size"),
        (dict(num_experts=2.0), TypeError, "num_experts — need an int"),
        (dict(top_k=5), ValueError, "top_k — need at most num_experts = 4"),
        (dict(activation="geglu"), ValueError, "activation"),
        (dict(aux_loss_coef=-1.0), ValueError, "aux_loss_coef"),
        (dict(recipe=None), TypeError, "recipe"),
    ],
    ids=["hidden", "zero", "float", "top-k", "activation", "coef", "recipe"],
)
def test_bad_modules_raise(options: dict[str, Any], error: type[Exception], text: str) -> None:
    sizes = dict(hidden_size=32, intermediate_size=32, num_experts=4, top_k=2)
    with pytest.raises(error, match=f"MXMoE: {text}"):
        MXMoE(**(sizes | options))


def test_bad_input_raises() -> None:
    with pytest.raises(ValueError, match=r"MXMoE: x.shape — need \[..., 32\]"):
        MXMoE(32, 32, 2, 1)(torch.zeros(3, 64))
    with pytest.raises(ValueError, match="MXGroupedLinear: out_features"):
        MXGroupedLinear(2, 32, 33)


def test_grouped_linear_module_is_the_function() -> None:
    torch.manual_seed(8)
    layer = MXGroupedLinear(3, 32, 64, bias=True, recipe=MXFP8Recipe.hybrid())
    x, offsets = torch.randn(9, 32).bfloat16(), torch.tensor([0, 4, 4, 8])
    assert is_exact(
        layer(x, offsets),
        grouped_linear(x, layer.weight, offsets, bias=layer.bias, recipe=layer.recipe),
    )
    assert MXGroupedLinear(3, 32, 64).bias is None


def test_grouped_mm_of_rows_is_grouped_linear() -> None:
    torch.manual_seed(9)
    a, weight = torch.randn(9, 32).bfloat16(), torch.randn(3, 64, 32).bfloat16().requires_grad_()
    offs = torch.tensor([4, 4, 8], dtype=torch.int32)
    y = grouped_mm(a, weight.transpose(-2, -1), offs=offs)
    assert is_exact(y, grouped_linear(a, weight, torch.tensor([0, 4, 4, 8])))
    y.sum().backward()
    assert weight.grad.shape == weight.shape
    assert not weight.grad[1].any()


def test_grouped_mm_agrees_with_torch() -> None:
    """Without quantisation, where torch has the op: float32 accumulation in another order."""
    torch.manual_seed(10)
    offs = torch.tensor([16, 32, 64], dtype=torch.int32)
    rows, columns = torch.randn(64, 32).bfloat16(), torch.randn(32, 64).bfloat16()
    weight = torch.randn(3, 64, 32).bfloat16().transpose(-2, -1)
    for a, b in ((rows, weight), (columns, rows)):
        found = grouped_mm(a, b, offs=offs, recipe=PLAIN)
        torch.testing.assert_close(found, torch._grouped_mm(a, b, offs=offs))
        assert sqnr_db(grouped_mm(a, b, offs=offs), found) >= 25


def test_gradcheck_of_grouped_mm_over_columns() -> None:
    torch.manual_seed(11)
    a = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    b = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    offs = torch.tensor([2, 2, 6], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda a, b: grouped_mm(a, b, offs=offs, recipe=PLAIN), (a, b))


@pytest.mark.parametrize("recipe", [MXFP8Recipe(), MXFP8Recipe.hybrid()], ids=["e4m3", "hybrid"])
def test_snr_of_grouped_mm_over_columns(recipe: MXFP8Recipe) -> None:
    torch.manual_seed(12)
    offs = torch.tensor([70, 70, 161], dtype=torch.int32)
    operands = torch.randn(96, 163).bfloat16(), torch.randn(163, 64).bfloat16()
    grad = torch.randn(3, 96, 64).bfloat16()
    results = []
    for options, dtype in ((recipe, torch.bfloat16), (PLAIN, torch.float64)):
        a, b = (value.to(dtype, copy=True).requires_grad_() for value in operands)
        out = grouped_mm(a, b, offs=offs, recipe=options)
        out.backward(grad.to(dtype))
        results.append((out.detach(), a.grad, b.grad))
        alone = [value.to(dtype, copy=True) for value in operands]
        alone[0].requires_grad_()
        grouped_mm(*alone, offs=offs, recipe=options).backward(grad.to(dtype))
        assert is_exact(alone[0].grad, a.grad), "the gradient of one operand alone"
    gates = (25, 20, 20) if recipe == MXFP8Recipe.hybrid() else (25, 25, 25)
    for gate, found, wanted in zip(gates, *results, strict=True):
        assert gate <= sqnr_db(found, wanted) < 40


@pytest.mark.parametrize(
    "change, error, text",
    [
        (dict(offs=None), TypeError, "offs — need a torch.Tensor"),
        (dict(offs=torch.zeros(2, dtype=torch.int64)), TypeError, "offs.dtype"),
        (dict(a=torch.zeros(2, 4, 32)), mxpert.UnsupportedError, "a, b — need 2D × 3D or 2D × 2D"),
        (dict(b=torch.zeros(2, 64, 32)), ValueError, "b.shape — need 32 rows"),
        (dict(b=torch.zeros(2, 32, 32).bfloat16()), TypeError, "b.dtype"),
        (dict(out_dtype=torch.bfloat16), ValueError, "out_dtype"),
        (dict(b=torch.zeros(32, 32)), ValueError, r"a.shape\[0\] — need a multiple of 32, got 4"),
    ],
    ids=["no-offs", "int64", "batched", "inner", "dtypes", "out-dtype", "ragged"],
)
def test_bad_grouped_mm_raises(change: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments = (
        dict(
            a=torch.zeros(4, 32),
            b=torch.zeros(2, 32, 32),
            offs=torch.tensor([2, 4], dtype=torch.int32),
        )
        | change
    )
    with pytest.raises(error, match=f"grouped_mm: {text}"):
        grouped_mm(arguments.pop("a"), arguments.pop("b"), **arguments)
