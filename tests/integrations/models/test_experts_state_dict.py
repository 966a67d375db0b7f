"""Loading experts of another size is torch's size-mismatch error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import mxpert
from mxpert.integrations.models.convert import mx_experts
from mxpert.testing.numerics import assert_exact
from support.mixtral import SIZES

IDS = torch.arange(12)[None]
KEY = "model.layers.0.mlp.experts.{}"


def converted(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = SIZES | dict(num_experts_per_tok=2, head_dim=32)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**config | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj_bias"):
                parameter.normal_()
    return mxpert.convert(model, progress=False)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"num_local_experts": 2}, id="fewer experts"),
        pytest.param({"num_local_experts": 8}, id="more experts"),
        pytest.param({"intermediate_size": 64}, id="wider experts"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_other_sizes_are_refused(change: dict[str, int], strict: bool, assign: bool) -> None:
    model, other = converted(), converted(1, **change)
    before = mx_experts(model)[0].weights
    experts = {name: tensor for name, tensor in other.state_dict().items() if ".experts." in name}
    name = KEY.format("gate_up_proj_blocks")
    with pytest.raises(RuntimeError, match=f"size mismatch for {name}: copying a param with shape"):
        model.load_state_dict(model.state_dict() | experts, strict=strict, assign=assign)
    assert mx_experts(model)[0].weights is before


def test_another_dtype_is_refused() -> None:
    model = converted()
    state = model.state_dict()
    name = KEY.format("down_proj_scales")
    with pytest.raises(RuntimeError, match=f"dtype mismatch for {name}"):
        model.load_state_dict(state | {name: state[name].float()})


def test_what_is_missing_stays_where_that_is_allowed() -> None:
    model, other = converted(), converted(1)
    name, before = KEY.format("down_proj_bias"), model.state_dict()
    given = other.state_dict()[name]
    assert not torch.equal(given, before[name])
    outcome = model.load_state_dict({name: given}, strict=False)
    assert KEY.format("down_proj_blocks") in outcome.missing_keys
    after = model.state_dict()
    for key, tensor in after.items():
        assert_exact(tensor, given if key == name else before[key], key)


def test_loaded_weights_are_copies() -> None:
    model, other = converted(), converted(1)
    given = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    model.load_state_dict(given)
    expected = model(IDS).logits
    for tensor in given.values():
        tensor.zero_()
    assert_exact(model(IDS).logits, expected, "logits")
