"""Every container of quantised experts loads bit for bit, one layer at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mxpert
from mxpert.integrations.checkpoints.containers import CONTAINERS, GPT_OSS, container_of
from mxpert.integrations.checkpoints.load import load_expert_weights
from mxpert.integrations.checkpoints.safetensors_files import CheckpointReader
from mxpert.moe.local_weights import take_experts
from mxpert.testing.numerics import assert_exact
from support.expert_containers import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    KINDS,
    NUMBERED,
    PROJ,
    check_checkpoint,
    check_weights,
    rewrite,
    write,
)
from support.memory import held_and_peak

EVERY_KIND = pytest.mark.parametrize("name", KINDS)


def test_the_helpers_write_every_container() -> None:
    assert {container.name for container in CONTAINERS} == {GPT_OSS.name, *KINDS}


@EVERY_KIND
@pytest.mark.parametrize("names", [PROJ, NUMBERED], ids=["proj", "numbered"])
def test_every_container_loads_bit_for_bit(name: str, names: Any, tmp_path: Path) -> None:
    check_checkpoint(tmp_path, write(tmp_path, name, names=names))


@EVERY_KIND
def test_some_layers_are_chosen_by_number_or_path(name: str, tmp_path: Path) -> None:
    modules = write(tmp_path, name, layers=(0, 2, 10))
    ((path, weights),) = load_expert_weights(tmp_path, layers=[2])
    assert path == modules[1].path
    check_weights(weights, modules[1])
    ((path, _),) = mxpert.load_expert_weights(tmp_path, layers=[modules[2].path])
    assert path == modules[2].path


def test_modelopt_may_state_its_format_in_its_own_file(tmp_path: Path) -> None:
    modules = write(tmp_path, "ModelOpt NVFP4", quantization_config=None)
    stated = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    own = {"producer": {"name": "modelopt"}, "quantization": stated}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own), encoding="utf-8")
    check_checkpoint(tmp_path, modules)


OTHER_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "format of the experts' group": (
        "compressed-tensors mxfp4-pack-quantized",
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "group_0": {"format": "float-quantized", "targets": ["re:.*self_attn.*"]},
                "group_1": {
                    "format": "mxfp4-pack-quantized",
                    "targets": ["re:.*mlp.experts.*(gate|up|down)_proj$"],
                },
            },
        },
    ),
    "format of the whole": (
        "compressed-tensors nvfp4-pack-quantized",
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    ),
    "quark's pattern for experts": (
        "Quark OCP MX",
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}},
            "layer_quant_config": {
                "*mlp.experts*": {
                    "weight": [{"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}]
                }
            },
        },
    ),
    "modelopt's list of layers": (
        "ModelOpt NVFP4",
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.mlp.experts": {"quant_algo": "NVFP4"},
                "model.layers.1.mlp.experts*": {"quant_algo": "nvfp4"},
                "model.layers.1.self_attn.q_proj": {"quant_algo": "FP8"},
            },
        },
    ),
    "weight-only": ("ModelOpt NVFP4", {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}),
    "modelopt_fp4": ("ModelOpt NVFP4", {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}),
    "expert_dtype in the entry": ("DeepSeek-V4", {"quant_method": "fp8", "expert_dtype": "fp4"}),
}


@pytest.mark.parametrize("case", OTHER_CONFIGS)
def test_other_words_for_the_same_container(case: str, tmp_path: Path) -> None:
    name, stated = OTHER_CONFIGS[case]
    more = {"expert_dtype": None} if case.startswith("expert") else {}
    check_checkpoint(tmp_path, write(tmp_path, name, quantization_config=stated, **more))


def test_the_language_part_may_state_it(tmp_path: Path) -> None:
    name = "compressed-tensors mxfp4-pack-quantized"
    text = {"hidden_size": HIDDEN, "n_routed_experts": EXPERTS} | KINDS[name].config
    check_checkpoint(tmp_path, write(tmp_path, name, quantization_config=None, text_config=text))


def test_biases_are_read_with_their_matrices(tmp_path: Path) -> None:
    (module,) = write(tmp_path, "compressed-tensors mxfp4-pack-quantized", layers=[0])
    rows = {"gate_proj": INTERMEDIATE, "up_proj": INTERMEDIATE, "down_proj": HIDDEN}
    biases = {
        f"{module.path}.{expert}.{part}.bias": torch.randn(count).bfloat16()
        for expert in range(EXPERTS)
        for part, count in rows.items()
    }
    rewrite(tmp_path, lambda tensors: tensors.update(biases))
    ((_, weights),) = load_expert_weights(tmp_path)
    for expert in range(EXPERTS):
        gate, up, down = (biases[f"{module.path}.{expert}.{part}.bias"].float() for part in rows)
        assert_exact(weights.gate_up_bias[expert], torch.cat((gate, up)), "gate_up_bias")
        assert_exact(weights.down_bias[expert], down, "down_bias")
    rewrite(tmp_path, lambda tensors: tensors.pop(f"{module.path}.3.up_proj.bias"))
    with pytest.raises(ValueError, match=r"experts\.3\.up_proj\.bias — need this tensor"):
        load_expert_weights(tmp_path)


def test_some_experts_are_read_in_the_wanted_order(demo: Path, tmp_path: Path) -> None:
    write(tmp_path, "DeepSeek-V4")
    for path in (demo, tmp_path):
        reader = CheckpointReader(path, "read")
        container, statement = container_of(reader)
        names = container.paths(reader, statement)
        (module,) = container.check(reader, statement, names[1:])
        assert (module.num_experts, module.hidden_size) == (EXPERTS, HIDDEN)
        wanted = take_experts(container.read(reader, module), [2, 0])
        found = container.read(reader, module, experts=[2, 0])
        states = wanted.state_dict(), found.state_dict()
        assert states[0].keys() == states[1].keys()
        assert states[0].pop("_extra_state") == states[1].pop("_extra_state")
        for name, tensor in states[0].items():
            assert torch.equal(tensor, states[1][name]), name


def test_experts_without_a_gate_load(tmp_path: Path) -> None:
    name = "ModelOpt NVFP4"
    (module,) = write(tmp_path, name, layers=[0], model_type="nemotron_h")
    with pytest.raises(ValueError, match="need 2 matrices for each of 4 experts, got 12"):
        load_expert_weights(tmp_path)

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for each in [each for each in tensors if ".gate_proj." in each]:
            del tensors[each]

    rewrite(tmp_path, drop)
    ((_, weights),) = load_expert_weights(tmp_path)
    assert weights.gate_up_order is None
    assert_exact(weights.dequantize(torch.float64)[0], module.stacked("up"), "up_proj")


@pytest.mark.parametrize("name", ["compressed-tensors mxfp4-pack-quantized", "ModelOpt NVFP4"])
def test_one_layer_is_held_at_a_time(name: str, tmp_path: Path) -> None:
    write(tmp_path, name, layers=range(6))
    layer = EXPERTS * 3 * HIDDEN * INTERMEDIATE * 17 // 32
    matrix = HIDDEN * INTERMEDIATE // 2
    held, peak = held_and_peak(tmp_path)
    assert held == layer
    assert layer <= peak < layer + 8 * matrix  # float64 scales of one matrix are 4 of these
