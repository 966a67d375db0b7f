"""Registration, and which method the served configs give to which layer, in this vLLM."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-serving")
import vllm
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization import mxfp4

import mxpert
from mxpert import UnsupportedError
from mxpert.formats.names import FORMAT_OF
from mxpert.integrations.vllm import PROBE, register, serve
from mxpert.integrations.vllm import _configs as served_configs
from mxpert.integrations.vllm._configs import SERVED, in_tree_config
from mxpert.integrations.vllm._method import ServedMethod
from mxpert.integrations.vllm._plugin import served_names
from tests.integrations.serving.vllm_layers import (
    CONFIGS,
    current_config,
    make_layer,
    moe_config,
    routed_experts,
)

pytestmark = pytest.mark.usefixtures("without_a_gpu")
NAMES = served_names()
PREFIX = "model.layers.0.mlp.experts"


FORMATS = {
    "compressed-tensors": "MXFP4",
    "quark": "MXFP4",
    "deepseek_v4_fp8": "MXFP4",
    "modelopt_fp4": "NVFP4",
    "modelopt_mixed": "NVFP4",
    "modelopt_mxfp8": "MXFP8",
    "mxfp8": "MXFP8",
}
"""Of the experts in CONFIGS, where the name does not say it."""


def config(name: str, changes: dict[str, Any] | None = None) -> Any:
    made: Any = SERVED[name]
    return made.from_config({**CONFIGS[name], **(changes or {})})


def test_registration_imports_no_implementation() -> None:
    program = """
import sys, time
import vllm.engine.arg_utils, mxpert  # who makes an engine has imported the first
before = set(sys.modules)
start = time.process_time()
from mxpert.integrations.vllm import register
register()
seconds = time.process_time() - start
new = set(sys.modules) - before
others = "vllm.", "transformers.", "mxpert.integrations."  # vLLM's registry of models, used next
assert all(name.startswith(others) for name in new), new
assert not any("quantization" in name or "fused_moe" in name for name in new), new
assert "mxpert.integrations.vllm._configs" not in new
assert seconds < 0.3, seconds
print(f"{1000 * seconds:.1f} ms")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("ms")


def test_registration_alone_replaces_no_config() -> None:
    custom = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG
    with mock.patch.dict(custom, clear=True):
        register()
        assert set(custom) == {PROBE}
        for name in NAMES:
            assert quantization.get_quantization_config(name) is in_tree_config(name)


def test_configs_of_other_plugins_come_back() -> None:
    custom = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG
    with mock.patch.dict(custom, clear=True):
        theirs = custom["mxfp4"] = mxfp4.Mxfp4Config
        for _ in range(2):
            serve(True)
        assert custom["mxfp4"] is not theirs
        serve(False)
        assert custom == {"mxfp4": theirs}


def test_every_name_is_registered() -> None:
    serve(True)
    serve(True)
    for name in NAMES:
        lazy: Any = quantization.get_quantization_config(name)
        assert lazy.__name__ == f"Mxpert[{name}]"
        assert issubclass(SERVED[name], in_tree_config(name))
        assert type(lazy.from_config(CONFIGS[name])) is SERVED[name]
        assert lazy.get_config_filenames() == in_tree_config(name).get_config_filenames()
        assert lazy.get_min_capability() == in_tree_config(name).get_min_capability()
    assert in_tree_config("mxfp4") is mxfp4.Mxfp4Config


@pytest.mark.parametrize("name", NAMES)
def test_configs_are_pickled_to_workers(name: str) -> None:
    again = pickle.loads(pickle.dumps(config(name)))
    assert type(again) is SERVED[name]
    assert again.get_name() == config(name).get_name()


def test_gpt_oss_checkpoints_are_still_recognised() -> None:
    serve(True)
    lazy: Any = quantization.get_quantization_config("gpt_oss_mxfp4")
    answer = lazy.override_quantization_method(
        {"quant_method": "mxfp4"}, None, hf_config=SimpleNamespace(model_type="gpt_oss")
    )
    assert answer == "gpt_oss_mxfp4"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("additional", [{}, {"another": 1}, None], ids=str)
def test_without_the_option_vllm_answers(name: str, additional: object) -> None:
    """Both configs give the layer what vLLM's own config gives it: the same class, or its error."""

    def answer(made: Any) -> object:
        try:
            return type(made.get_quant_method(routed_experts(), PREFIX))
        except Exception as error:
            return type(error), str(error)

    theirs: Any = in_tree_config(name)
    plain = theirs.from_config(CONFIGS[name])
    with current_config(additional):
        assert answer(config(name)) == answer(plain)
        mine, own = (
            made.get_quant_method(torch.nn.Identity(), "lm_head") for made in (config(name), plain)
        )
        assert type(mine) is type(own)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("activation_format", ["a16w4", "mxfp8", "a4w4", "a8w4-token"])
def test_the_option_switches_routed_experts(name: str, activation_format: str) -> None:
    with current_config({"mxpert": activation_format}):
        method = config(name).get_quant_method(routed_experts(), PREFIX)
        other = config(name).get_quant_method(torch.nn.Identity(), "lm_head")
    assert isinstance(method, ServedMethod)
    assert method.options.activation_format == FORMAT_OF[activation_format]
    assert method.experts.format == FORMATS.get(name, "MXFP4" if "4" in name else "INT4")
    one_method = name == "mxfp4" and vllm.__version__.startswith(("0.20.", "0.26."))
    assert method.gpt_oss == (name == "gpt_oss_mxfp4" or one_method)
    assert not isinstance(other, ServedMethod)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_option_ends_the_start(name: str) -> None:
    with current_config({"mxpert": "bf17"}), pytest.raises(ValueError, match=r"a16w4.*'bf17'"):
        config(name).get_quant_method(routed_experts(), PREFIX)


def test_a_version_outside_the_range_is_refused() -> None:
    made = config("gpt_oss_mxfp4")
    with (
        mock.patch.object(vllm, "__version__", "0.34.1"),
        current_config({"mxpert": "a16w4"}),
        pytest.raises(UnsupportedError, match=r"below 0\.34\.0, got 0\.34\.1"),
    ):
        made.get_quant_method(routed_experts(), PREFIX)


@pytest.mark.parametrize("name", [each for each in NAMES if each[-5:] not in ("mxfp4", "4_fp8")])
def test_excluded_experts_stay_with_vllm(name: str) -> None:
    layer, excluded = routed_experts(), "model.layers.7.mlp.experts"
    assert config(name).experts(layer, PREFIX) is not None
    assert config(name).experts(layer, excluded) is None


def test_other_experts_are_refused() -> None:
    fp8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": fp8}}
    other = [
        ("compressed-tensors", {"config_groups": groups, "format": "float-quantized"}, "scheme"),
        ("quark", {"global_quant_config": _quark(dtype="fp6_e2m3")}, "fp6_e2m3"),
        ("quark", {"global_quant_config": _quark(static=True)}, "static"),
    ]
    with current_config({"mxpert": "a16w4"}):
        for name, changes, said in other:
            with pytest.raises(UnsupportedError, match=f"NVFP4 or INT4, got .*{said}") as error:
                config(name, changes).get_quant_method(routed_experts(), PREFIX)
            assert PREFIX in str(error.value)
            assert "\n" not in str(error.value)
        made = config("deepseek_v4_fp8")
        made._resolved_expert_dtype = "fp8"
        with pytest.raises(UnsupportedError, match="expert_dtype 'fp8'"):
            made.get_quant_method(routed_experts(), PREFIX)
        if hasattr(made, "_resolved_moe_quant_algo"):
            made._resolved_expert_dtype, made._resolved_moe_quant_algo = "fp4", "NVFP4"
            with pytest.raises(UnsupportedError, match="NVFP4"):
                made.get_quant_method(routed_experts(), PREFIX)


def _quark(*, dtype: str = "fp4", static: bool = False) -> dict[str, Any]:
    scheme: Any = dict(CONFIGS["quark"]["global_quant_config"])  # type: ignore[arg-type,call-overload]
    scheme["weight"] = {**scheme["weight"], "dtype": dtype}
    if static:
        scheme["input_tensors"] = {
            "dtype": "fp8_e4m3",
            "qscheme": "per_tensor",
            "is_dynamic": False,
        }
    return scheme


DISPATCHES = {"use_ep": True, "dp_size": 2, "all2all_backend": "deepep_low_latency"}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("--all2all-backend allgather_reducescatter", {"parallel": DISPATCHES}),
    ("hidden_size", {"hidden_dim": 100}),
    ("the experts' activation", {"activation": MoEActivation.SWIGLUSTEP}),
]


@pytest.mark.parametrize("said, moe", REFUSED, ids=[case[0] for case in REFUSED])
def test_layers_that_are_not_served_are_refused(said: str, moe: dict[str, Any]) -> None:
    layer = make_layer(moe_config(**moe))
    with current_config({"mxpert": "a16w4"}), pytest.raises(UnsupportedError) as error:
        config("gpt_oss_mxfp4").get_quant_method(layer, PREFIX)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_options_are_refused_before_weights_are_loaded() -> None:
    """Where vLLM did not check the options of the engine: they are checked at each layer again."""
    layer = make_layer(moe_config())
    changes = {"enable_eplb": True}
    with (
        current_config({"mxpert": "a16w4"}, **changes),
        pytest.raises(UnsupportedError, match="--enable-eplb"),
    ):
        config("mxfp4").get_quant_method(layer, PREFIX)


ACTIVATIONS: list[tuple[str, dict[str, Any], mxpert.core.problem.Activation]] = [
    ("SWIGLUOAI", {}, mxpert.SwiGLU(1.702, 7.0)),
    ("SILU", {}, mxpert.SiLU()),
    ("SILU", {"swiglu_limit": 10.0}, mxpert.ClampedSiLU(10.0)),
    (
        "SWIGLUOAI_UNINTERLEAVE",
        {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
        mxpert.SwiGLU(1.702, 7.0),
    ),
    ("SWIGLUOAI_UNINTERLEAVE", {"swiglu_limit": 5.0}, mxpert.ClampedSiLU(5.0)),
    (
        "SWIGLUOAI_UNINTERLEAVE",
        {"swiglu_limit": 5.0, "swiglu_alpha": 1.3, "swiglu_beta": 0.0},
        mxpert.SwiGLU(1.3, 5.0, 0.0),
    ),
    ("GELU", {}, mxpert.GELU()),
    ("GELU_TANH", {}, mxpert.GELU("tanh")),
    (
        "SITU",
        {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0},
        mxpert.SiTUv2(4.0, 25.0),
    ),
]


@pytest.mark.parametrize("kind, parameters, expected", ACTIVATIONS, ids=lambda value: str(value))
def test_activations(kind: str, parameters: dict[str, Any], expected: object) -> None:
    from mxpert.integrations.vllm._refusals import activation_of

    if not hasattr(MoEActivation, kind):
        pytest.skip(f"vLLM {vllm.__version__} has no {kind}")
    moe = moe_config(activation=getattr(MoEActivation, kind))
    activation, order = activation_of(moe, SimpleNamespace(**parameters))
    assert activation == expected
    interleaved = kind == "SWIGLUOAI"
    assert (order is mxpert.GateUpOrder.INTERLEAVED) == interleaved


def test_unknown_activations_are_refused() -> None:
    from mxpert.integrations.vllm._refusals import activation_of

    with pytest.raises(UnsupportedError, match="got relu2_no_mul"):
        # vLLM itself makes no config of it on a CPU
        activation_of(SimpleNamespace(activation=MoEActivation.RELU2_NO_MUL), SimpleNamespace())
    if hasattr(MoEActivation, "SITU"):
        with pytest.raises(UnsupportedError, match="both of its parameters, got situ"):
            activation_of(moe_config(activation=MoEActivation.SITU), SimpleNamespace())


def test_vllm_config_is_read_through_vllm() -> None:
    from vllm.config import get_current_vllm_config

    assert served_configs.get_current_vllm_config is get_current_vllm_config
