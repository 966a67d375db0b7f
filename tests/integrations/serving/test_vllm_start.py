"""What is refused while this vLLM reads its options, before it starts an engine."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-serving")
import vllm
import vllm.envs
from vllm.model_executor.layers import quantization
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

from mxpert import UnsupportedError
from mxpert.integrations.vllm import PROBE, register
from mxpert.integrations.vllm._plugin import served_names
from tests.integrations.serving.vllm_layers import CONFIGS, vllm_config

ON = {"mxpert": "a16w4"}


def vllm_checks(architecture: str, made: Any) -> None:
    """What vLLM does with a quantised model before it starts an engine."""
    register()
    for name in quantization.QUANTIZATION_METHODS:
        if name == PROBE or name in served_names():
            kind: Any = quantization.get_quantization_config(name)
            hf_config = SimpleNamespace(architectures=[architecture], model_type="a model")
            answer = kind.override_quantization_method(
                {"quant_method": "another"}, None, hf_config=hf_config
            )
            assert answer is None
    MODELS_CONFIG_MAP[architecture].verify_and_update_config(made)


@pytest.fixture(autouse=True)
def registry() -> Any:
    with mock.patch.dict(MODELS_CONFIG_MAP):
        yield


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("--enable-eplb", {"enable_eplb": True}),
    ("--enable-lora", {"lora_config": object()}),
    (
        "--all2all-backend allgather_reducescatter",
        {
            "enable_expert_parallel": True,
            "data_parallel_size": 2,
            "all2all_backend": "deepep_low_latency",
        },
    ),
    ("--cpu-offload-gb", {"cpu_offload_gb": 4}),
    ("--offload-group-size", {"offload_group_size": 2}),
    ("--moe-backend", {"moe_backend": "marlin"}),
    ("--dtype bfloat16", {"dtype": torch.float16}),
    ("the model's quantization — need 'gpt_oss_mxfp4'", {"quantization": "fp8"}),
]


@pytest.mark.parametrize("option, changes", REFUSED, ids=[case[0] for case in REFUSED])
def test_refusals_name_the_option(option: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError) as error:
        vllm_checks("GptOssForCausalLM", vllm_config(ON, **changes))
    assert option in str(error.value)
    assert "\n" not in str(error.value)
    vllm_checks("NewForCausalLM", vllm_config({}, **changes))


FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT8_WEIGHTS = {"num_bits": 8, "type": "int", "group_size": 128}
FP8_SCHEME = {"weight": {"dtype": "fp8_e4m3"}, "input_tensors": None}
OTHER_EXPERTS: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v4_fp8", {"expert_dtype": "fp8"}, "expert_dtype 'fp8'"),
    (
        "compressed-tensors",
        {"config_groups": {"a": {"weights": FP8_WEIGHTS}, "b": {"weights": INT8_WEIGHTS}}},
        "('float', 8, None), ('int', 8, 128)",
    ),
    ("quark", {"global_quant_config": FP8_SCHEME}, "fp8_e4m3"),
]


@pytest.mark.parametrize("name, changes, said", OTHER_EXPERTS, ids=lambda value: str(value)[:20])
def test_checkpoints_in_other_formats_are_refused(
    name: str, changes: dict[str, Any], said: str
) -> None:
    hf_config = SimpleNamespace(quantization_config={**CONFIGS[name], **changes}, **changes)
    made = vllm_config(ON, quantization=name, hf_config=hf_config)
    with pytest.raises(UnsupportedError, match=r"the model's experts — need MXFP4, .*got") as error:
        vllm_checks("NewForCausalLM", made)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_checkpoints_in_served_formats_pass(name: str) -> None:
    if name not in served_names():
        pytest.skip(f"vLLM {vllm.__version__} has no {name}")
    for hf_config in (SimpleNamespace(quantization_config=CONFIGS[name]), SimpleNamespace()):
        made = vllm_config(ON, quantization=name, hf_config=hf_config)
        vllm_checks("NewForCausalLM", made)


def test_configs_are_replaced_only_where_the_option_asks() -> None:
    custom = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG
    known = set(served_names())
    with mock.patch.dict(custom, clear=True):
        for option, replaced in (({}, set()), (ON, known), (None, set())):
            vllm_checks("NewForCausalLM", vllm_config(option))
            assert set(custom) - {PROBE} == replaced


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_models_that_are_not_quantised_are_refused(architecture: str) -> None:
    """They ask no quantisation config; the check is there all the same."""
    register()
    check = MODELS_CONFIG_MAP[architecture].verify_and_update_config
    plain = vllm_config(ON, quantization=None)
    with pytest.raises(UnsupportedError, match="got a model that is not quantised; quantise"):
        check(plain)


def test_batch_invariance_is_refused() -> None:
    with (
        mock.patch.object(vllm.envs, "VLLM_BATCH_INVARIANT", True, create=True),
        pytest.raises(UnsupportedError, match="VLLM_BATCH_INVARIANT"),
    ):
        vllm_checks("NewForCausalLM", vllm_config(ON))


def test_a_wrong_option_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a16w4.*'w4a16'"):
        vllm_checks("NewForCausalLM", vllm_config({"mxpert": "w4a16"}))
    with pytest.raises(ValueError, match="'mxprt'"):
        vllm_checks("NewForCausalLM", vllm_config({"mxprt": "a16w4"}))


@pytest.mark.parametrize("changes", [{"is_moe": False}, {"runner_type": "draft"}], ids=str)
def test_dense_models_and_drafts_take_any_option(changes: dict[str, Any]) -> None:
    vllm_checks("NewForCausalLM", vllm_config(ON, enable_eplb=True, **changes))


def test_vllms_own_check_still_runs() -> None:
    seen: list[Any] = []

    class InTree(VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            seen.append(vllm_config)

    MODELS_CONFIG_MAP["NewForCausalLM"] = InTree
    without, served = vllm_config(), vllm_config(ON)
    vllm_checks("NewForCausalLM", without)
    vllm_checks("NewForCausalLM", served)
    assert seen == [without, served]  # once each, however often the plugin is registered
    with pytest.raises(UnsupportedError):
        vllm_checks("NewForCausalLM", vllm_config(ON, enable_eplb=True))
    assert len(seen) == 2


def test_commands_end_with_the_line_alone() -> None:
    wrong = vllm_config({"mxpert": "w4a16"})
    with (
        mock.patch.object(sys, "argv", ["/somewhere/bin/vllm", "serve"]),
        pytest.raises(SystemExit) as ended,
    ):
        vllm_checks("NewForCausalLM", wrong)
    assert str(ended.value.code).startswith("mxpert for vLLM: --additional-config 'mxpert' — need")
    assert "\n" not in str(ended.value.code)


def test_outside_the_range_vllm_keeps_its_configs_and_the_option_is_refused() -> None:
    custom = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG
    with mock.patch.object(vllm, "__version__", "0.34.1"), mock.patch.dict(custom, clear=True):
        vllm_checks("NewForCausalLM", vllm_config())
        assert set(custom) == {PROBE}
        with pytest.raises(UnsupportedError) as error:
            vllm_checks("NewForCausalLM", vllm_config(ON))
    said = "vllm — need 0.20.2 or newer, below 0.34.0, got 0.34.1; install such a vllm or remove"
    assert said in str(error.value)
    assert "\n" not in str(error.value)
