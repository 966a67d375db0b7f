"""Arguments of the training layers are checked, and a second `convert` says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mxpert
from mxpert import ScaleRule
from mxpert.integrations.models.convert import mx_experts, restore
from mxpert.training import MXFP8Recipe, MXGroupedLinear, MXMoE
from support.mixtral import tiny_mixtral

LAYERS: dict[str, tuple[type, tuple[int, ...]]] = {
    "MXMoE": (MXMoE, (32, 32, 4, 2)),
    "MXGroupedLinear": (MXGroupedLinear, (4, 32, 32)),
}
BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "int64": ({"dtype": torch.int64}, TypeError, "dtype — need float32 or bfloat16 or float16"),
    "float8": ({"dtype": torch.float8_e4m3fn}, TypeError, "dtype — need"),
    "complex": ({"dtype": torch.complex64}, TypeError, "dtype — need"),
    "float64 in MXFP8": ({"dtype": torch.float64}, TypeError, "dtype — need"),
    "dtype as a string": ({"dtype": "bfloat16"}, TypeError, "dtype — need .* got 'bfloat16'"),
    "no device": ({"device": "gpu"}, ValueError, "device — need a device, got 'gpu'"),
    "device as a list": ({"device": []}, ValueError, "device — need a device"),
    "absent device": ({"device": "cuda:99"}, ValueError, "device — need a GPU of this machine"),
    "bias as a string": ({"bias": "no"}, TypeError, "bias — need True or False, got 'no'"),
    "bias as a tensor": ({"bias": torch.zeros(4)}, TypeError, "bias — need True .* got a Tensor"),
    "bias as None": ({"bias": None}, TypeError, "bias — need True or False, got None"),
    "recipe as a string": ({"recipe": "mxfp8"}, TypeError, "recipe — need an MXFP8Recipe"),
}
BAD_COEFFICIENTS: list[Any] = ["1", None, True, torch.tensor(0.1), 1j]
BAD_NUMBERS: list[float] = [-1.0, float("nan"), float("inf"), 10**400]


@pytest.mark.parametrize("case", BAD_OPTIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_options_of_the_layers_are_checked(name: str, case: str) -> None:
    layer, sizes = LAYERS[name]
    options, error, match = BAD_OPTIONS[case]
    with pytest.raises(error, match=f"^{name}: {match}"):
        layer(*sizes, **options)


@pytest.mark.parametrize("name", LAYERS)
def test_float64_is_for_layers_without_quantisation(name: str) -> None:
    layer, sizes = LAYERS[name]
    made = layer(*sizes, dtype=torch.float64, recipe=MXFP8Recipe(enabled=False))
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float64}


@pytest.mark.parametrize("value", BAD_COEFFICIENTS, ids=repr)
def test_the_coefficient_is_a_number(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^MXMoE: aux_loss_coef — need a number, got"):
        MXMoE(32, 32, 4, 2, aux_loss_coef=value)


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=["negative", "nan", "inf", "huge"])
def test_the_coefficient_is_finite_and_not_negative(value: float) -> None:
    with pytest.raises(ValueError, match=r"^MXMoE: aux_loss_coef — need a finite number of at le"):
        MXMoE(32, 32, 4, 2, aux_loss_coef=value)


@pytest.mark.parametrize("flag", ["enabled", "high_precision_wgrad"])
@pytest.mark.parametrize("value", ["no", 0, None, torch.tensor(True)], ids=repr)
def test_switches_of_the_recipe_are_booleans(flag: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^MXFP8Recipe: {flag} — need True or False"):
        MXFP8Recipe(**{flag: value})


@pytest.mark.parametrize("value", [None, 8, torch.float8_e4m3fn, ["mxfp8_e4m3"]], ids=repr)
def test_formats_of_the_recipe_are_names(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^MXFP8Recipe: forward_format — need one of"):
        MXFP8Recipe(forward_format=value)


@pytest.fixture
def converted() -> Any:
    model = tiny_mixtral(hidden_size=32, num_local_experts=2)
    return mxpert.convert(model, progress=False)


@pytest.mark.parametrize("name", ["recipe", "scale_rule"])
def test_what_needs_dense_weights_says_restore_first(name: str, converted: Any) -> None:
    value: Any = MXFP8Recipe() if name == "recipe" else ScaleRule.FLOOR
    with pytest.raises(ValueError, match=rf"^convert: {name} — need .*restore\(model\) first$"):
        mxpert.convert(converted, progress=False, **{name: value})
    assert len(mx_experts(converted)) == 1
    again = mxpert.convert(restore(converted), progress=False, **{name: value})
    assert bool(mx_experts(again)) == (name == "scale_rule")


def test_a_second_convert_may_change_the_activation_format(converted: Any) -> None:
    (experts,) = mx_experts(mxpert.convert(converted, "mxfp8"))
    assert experts.activation_format == "mxfp8"
