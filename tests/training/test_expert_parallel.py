"""clip_grad_norm_ on one rank: torch's own, in float32. Several ranks: tests/distributed."""

from __future__ import annotations

import math

import pytest
import torch

from mxpert.training import clip_grad_norm_


def layers(dtype: torch.dtype, scale: float = 1.0) -> torch.nn.Module:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4, bias=False))
    model = model.to(dtype)
    for parameter in list(model.parameters())[:-1]:
        parameter.grad = scale * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_do_not_overflow(dtype: torch.dtype) -> None:
    """512 values around 2^15 in float16: their norm is above its largest number, 65504."""
    model = layers(dtype, 2.0**13)
    grads = [each.grad.double() for each in model.parameters() if each.grad is not None]
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
    assert norm > 65504
    found = clip_grad_norm_(model, 1.0)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(norm, rel=1e-6)
    clipped = [each.grad.double() for each in model.parameters() if each.grad is not None]
    assert math.sqrt(sum(float(grad.square().sum()) for grad in clipped)) == pytest.approx(1, 0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm_type", [1, 2.0, 3, math.inf])
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_wide_gradients_are_clipped_as_by_torch(
    dtype: torch.dtype, norm_type: float, limit: float
) -> None:
    mine, theirs = layers(dtype), layers(dtype)
    found = clip_grad_norm_(mine.parameters(), limit, norm_type, False, True)
    wanted = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit, norm_type)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_large_float32_gradients_do_not_overflow() -> None:
    """Two tensors of norm 1e25, whose squares float32 does not hold."""
    parts = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    for part in parts:
        part.grad = torch.tensor([1e19])
    assert clip_grad_norm_(parts, 1.0).item() == pytest.approx(2**0.5 * 1e19)


def test_one_tensor_and_nothing() -> None:
    part = torch.nn.Parameter(torch.zeros(2))
    assert clip_grad_norm_(part, 1.0).item() == 0
    assert clip_grad_norm_([], 1.0).item() == 0
    part.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(part, 1.0).item() == 5


def test_norms_that_are_not_finite() -> None:
    model = layers(torch.float32)
    model[0].weight.grad[0, 0] = torch.nan
    held = model[0].bias.grad.clone()
    with pytest.raises(RuntimeError, match="the norm — need a finite one, got nan"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert torch.equal(model[0].bias.grad, held)
    assert clip_grad_norm_(model, 1.0).isnan()


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((layers(torch.float32), 1.0, object()), "norm_type — need a number; pass expert_parallel"),
        ((layers(torch.float32), "1"), "max_norm — need a number"),
        ((3, 1.0), "parameters — need a Module or its parameters"),
        (([3], 1.0), "parameters — need tensors"),
    ],
    ids=["group", "max_norm", "parameters", "a parameter"],
)
def test_wrong_arguments(arguments: tuple[object, ...], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        clip_grad_norm_(*arguments)
