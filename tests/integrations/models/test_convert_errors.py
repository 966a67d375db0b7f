"""What cannot be converted is refused by name, and before any weight is touched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.moe import use_experts_implementation

import mxpert
import mxpert.integrations.transformers  # registers the implementations
from mxpert import GELU, ClampedSiLU, GateUpOrder, ReLU2, SiLU, SwiGLU, UnsupportedError
from mxpert.integrations.checkpoints.quantize import quantize_checkpoint
from mxpert.integrations.models.convert import convert, restore
from mxpert.integrations.models.experts import find_experts
from tests.integrations.families import build, config_of


def dense() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )


def on_meta() -> Any:
    with torch.device("meta"):
        return transformers.MixtralForCausalLM(config_of("mixtral"))


def damaged(value: float) -> Any:
    model = build("qwen3_moe")
    with torch.no_grad():  # in the last layer: the first must not be converted before it is seen
        model.model.layers[1].mlp.experts.down_proj[3, 5, 7] = value
    return model


def quantised_by_another() -> Any:
    model = build("mixtral")
    model.config.quantization_config = {"quant_method": "fp8"}
    return model


def with_another_tensor() -> Any:
    model = build("mixtral")
    model.model.layers[1].mlp.experts.gate_up_proj_scale = torch.nn.Parameter(torch.ones(1))
    return model


def in_eight_bits() -> Any:
    model = build("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(
        experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False
    )
    return model


BAD = {
    "dense": (dense, ValueError, r"LlamaForCausalLM — need experts.*this one is dense"),
    "relu": (
        lambda: build("mixtral", hidden_act="relu"),
        UnsupportedError,
        r"layers\.0\.mlp\.experts: activation — need SiLU.*MixtralExperts with ReLU",
    ),
    "hidden-size": (
        lambda: build("gpt_oss", hidden_size=80, head_dim=20),
        ValueError,
        r"hidden size that is a multiple of 32, got 80; .*pad",
    ),
    "intermediate-size": (
        lambda: build("qwen3_moe", moe_intermediate_size=48),
        ValueError,
        r"intermediate size that is a multiple of 32, got 48",
    ),
    "meta": (on_meta, ValueError, r"need loaded weights, got a meta tensor"),
    "nan": (
        lambda: damaged(float("nan")),
        ValueError,
        r"layers\.1\.mlp\.experts\.down_proj — need finite weights",
    ),
    "infinity": (lambda: damaged(float("inf")), ValueError, r"need finite weights"),
    "quantised": (quantised_by_another, UnsupportedError, r"quantization_config — need none"),
    "more-tensors": (with_another_tensor, UnsupportedError, r"gate_up_proj_scale.*dequantised"),
    "float8": (in_eight_bits, TypeError, r"down_proj\.dtype — need bfloat16.*dequantise"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_model_that_does_not_fit_is_left_as_it_was(name) -> None:
    make, error, match = BAD[name]
    model = make()
    before = dict(model.named_parameters())
    modules = [type(module) for module in model.modules()]
    with pytest.raises(error, match=match):
        convert(model, progress=False)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[key] is before[key] for key in before)
    assert [type(module) for module in model.modules()] == modules


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"activation_format": "int8"}, ValueError, "activation_format — need one of"),
        ({"scale_rule": "up"}, ValueError, "scale_rule — need a ScaleRule"),
        ({"recipe": "mxfp8"}, TypeError, "recipe — need an MXFP8Recipe"),
        ({"device": "cuda:99"}, ValueError, "device — need a GPU of this machine"),
    ],
)
def test_bad_arguments_are_named(arguments, error, match) -> None:
    with pytest.raises(error, match=match):
        convert(build("mixtral"), progress=False, **arguments)


def test_something_else_than_a_model() -> None:
    with pytest.raises(TypeError, match="model — need a Module"):
        convert({"model": 1})
    with pytest.raises(ValueError, match=r"restore: .* call mxpert\.convert"):
        restore(build("mixtral"))


def test_unconverted_experts_say_what_to_do() -> None:
    model = transformers.AutoModelForCausalLM.from_config(
        config_of("qwen3_moe"), experts_implementation="mxpert"
    ).eval()
    with pytest.raises(UnsupportedError, match=r"mxpert\.convert\(model\)"):
        model(torch.arange(4)[None])
    converted = convert(model, progress=False)
    assert converted(torch.arange(4)[None]).logits.isfinite().all()


def test_loading_a_dense_checkpoint_is_refused(tmp_path) -> None:
    dense().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="this one is dense"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="mxpert")


def test_a_quantised_checkpoint_must_state_its_order(tmp_path) -> None:
    build("mixtral", dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    config.write_text(config.read_text("utf-8").replace('"gate_up_order"', '"order"'), "utf-8")
    with pytest.raises(ValueError, match="gate_up_order — need one of"):
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", experts_implementation="mxpert"
        )


class Experts(torch.nn.Module):
    """Experts as model authors write them; subclasses bring a gate of their own."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.limit, self.alpha, self.act_fn = 7.0, 1.702, torch.nn.functional.silu
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 64, 32))
        self.down_proj = torch.nn.Parameter(torch.zeros(2, 32, 32))

    def forward(self, *arguments: Any) -> None:
        raise NotImplementedError


def clamped(self: Any, values: torch.Tensor) -> torch.Tensor:
    gate, up = values.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def clamped_after(self: Any, values: torch.Tensor) -> torch.Tensor:
    gate, up = values.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


def swiglu(self: Any, values: torch.Tensor) -> torch.Tensor:
    gate, up = values.chunk(2, dim=-1)
    gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
    return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


def up_first(self: Any, values: torch.Tensor) -> torch.Tensor:
    up, gate = values.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def geglu(self: Any, values: torch.Tensor) -> torch.Tensor:
    gate, up = values.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate) * up


def geglu_by_tanh(self: Any, values: torch.Tensor) -> torch.Tensor:
    gate, up = values.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


class UngatedExperts(Experts):
    """Up and down projections alone; subclasses bring `act_fn`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.gate_up_proj
        self.up_proj = torch.nn.Parameter(torch.zeros(2, 32, 32))
        self.act_fn = config.act_fn


def find_one(gate: Any, base: type = Experts, act_fn: Any = None, **flags: bool) -> Any:
    members = {} if gate is None else {"_apply_gate": gate}
    made = use_experts_implementation(type("Some", (base,), members), **flags)
    model = torch.nn.ModuleDict({"experts": made(SimpleNamespace(act_fn=act_fn))})
    return find_experts(model, "convert")[0]


@pytest.mark.parametrize(
    ("gate", "activation"),
    [
        (None, SiLU()),
        (clamped, ClampedSiLU(7.0)),
        (swiglu, SwiGLU(1.702, 7.0)),
        (geglu, GELU()),
        (geglu_by_tanh, GELU("tanh")),
    ],
    ids=["default", "clamped", "swiglu", "gelu", "gelu_tanh"],
)
def test_a_gate_is_known_by_what_it_does(gate, activation) -> None:
    found = find_one(gate)
    assert found.activation == activation
    assert found.order is GateUpOrder.CONCATENATED


@pytest.mark.parametrize("gate", [clamped_after, up_first])
def test_a_gate_that_does_something_else_is_refused(gate) -> None:
    with pytest.raises(UnsupportedError, match="experts: activation"):
        find_one(gate)


def test_an_order_that_the_gate_contradicts_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="gate and up interleaved"):
        find_one(None, is_concatenated=False)


def test_experts_without_a_gate_are_known_by_what_they_do() -> None:
    found = find_one(None, UngatedExperts, lambda x: x.relu() ** 2, has_gate=False)
    assert (found.activation, found.order) == (ReLU2(), None)
    assert found.projections == ("up_proj", "down_proj")


def test_other_experts_without_a_gate_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"activation — need relu\(x\)² in experts without"):
        find_one(None, UngatedExperts, torch.nn.functional.silu, has_gate=False)


def test_public_name() -> None:
    assert mxpert.convert is convert
