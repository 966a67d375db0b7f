"""What a container does not hold exactly is refused in one line, and nothing is left."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from mxpert import UnsupportedError
from mxpert.integrations.checkpoints.change_container import convert_checkpoint
from mxpert.integrations.checkpoints.containers import CONTAINERS
from mxpert.integrations.checkpoints.written_containers import TARGETS
from support.expert_containers import (
    EXACT_NVFP4,
    KINDS,
    edit,
    pack_quantized,
    rewrite,
    rewrite_all,
    write,
)
from support.written_experts import state_of

REFUSED = {
    "unknown": ("Quark OCP MX", "mxfp4", "container — need one of gpt-oss, mxfp4-pack-quantized"),
    "its own": ("Quark OCP MX", "quark", "container — need another container than the source's"),
    "DeepSeek": ("Quark OCP MX", "DeepSeek-V4", "container — need one of gpt-oss"),
    "narrower": (
        "MiniMax MXFP8",
        "quark",
        "container — need one that holds MXFP8 exactly, for example minimax-mxfp8, got quark "
        "(MXFP4); 8-bit codes do not fit in 4 bits",
    ),
    "integers": ("AWQ", "nvfp4-pack-quantized", "16 evenly spaced integers are no e2m1 codes"),
    "floats": ("Quark OCP MX", "awq", "e2m1 codes are no evenly spaced integers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_lossless_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    source, target, match = REFUSED[case]
    write(tmp_path / "in", source)
    with pytest.raises(ValueError, match=f"^convert_checkpoint: .*{re.escape(match)}") as error:
        convert_checkpoint(tmp_path / "in", tmp_path / "out", container=target)
    assert "\n" not in str(error.value)
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("target", ["gpt-oss", "mxfp4-pack-quantized", "quark"])
@pytest.mark.parametrize("source", EXACT_NVFP4)
def test_nvfp4_that_is_no_cast_stays_nvfp4(source: str, target: str, tmp_path: Path) -> None:
    write(tmp_path / "in", EXACT_NVFP4[source])
    match = r"^convert_checkpoint: model\.layers\.0\.\S+ — need a cast of MXFP4: .* got NVFP4 with"
    with pytest.raises(ValueError, match=match):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", container=target)
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


def test_a_factor_without_a_divisor_is_refused(tmp_path: Path) -> None:
    """1.9 lies between the reciprocals of two neighbours, which are 2 units of it apart."""
    write(tmp_path / "in", EXACT_NVFP4["ModelOpt NVFP4"])
    factor = next(
        each
        for each in torch.linspace(1.5, 2.0, 1000).unbind()
        if not bool((reciprocals_near(each) == each).any())
    )

    def change(state: dict[str, torch.Tensor]) -> None:
        for name in state:
            if name.endswith("weight_scale_2"):
                state[name] = factor.clone()

    rewrite(tmp_path / "in", change)
    match = r"weight_global_scale — need a factor that is the reciprocal of a float32 number, got 1"
    with pytest.raises(ValueError, match=match):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", container="nvfp4-pack-quantized")
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


def reciprocals_near(factor: torch.Tensor) -> torch.Tensor:
    """Of the 9 float32 numbers next to 1 / `factor`."""
    bits = (1 / factor).view(torch.int32) + torch.arange(-4, 5, dtype=torch.int32)
    return 1 / bits.view(torch.float32)


def test_mxfp4_with_scales_too_far_apart_is_no_nvfp4(tmp_path: Path) -> None:
    write(tmp_path / "in", "Quark OCP MX")

    def change(state: dict[str, torch.Tensor], exponent: int) -> None:
        name = "model.layers.0.mlp.experts.1.up_proj.weight_scale"
        state[name][0, 0] = 127 + exponent

    highest = -1  # of the gate's and up's other scales
    rewrite_all(tmp_path / "in", lambda state: change(state, highest - 17))
    for target in ("modelopt-nvfp4", "nvfp4-pack-quantized"):
        assert convert_checkpoint(tmp_path / "in", tmp_path / target, container=target).verified
        rewrite_all(tmp_path / "in", lambda state: change(state, highest - 18))
        match = r"experts\.1\.up_proj — need scales within 18 binades, none NaN, for NVFP4's e4m3"
        with pytest.raises(ValueError, match=match):
            convert_checkpoint(tmp_path / "in", tmp_path / "out", container=target)
        rewrite_all(tmp_path / "in", lambda state: change(state, highest - 17))
    rewrite_all(tmp_path / "in", lambda state: change(state, 128))
    with pytest.raises(ValueError, match="none NaN"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", container="modelopt-nvfp4")


def test_layers_that_no_other_container_states_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "in", "DeepSeek-V4")
    fp8 = {"layers.0.attn.wq.weight": torch.ones(64, 64).to(torch.float8_e4m3fn)}
    rewrite(tmp_path / "in", lambda state: state.update(fp8))
    match = r"wq\.weight — need dense layers, or layers in DeepSeek-V4, beside the experts, got F8"
    with pytest.raises(UnsupportedError, match=match):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", container="quark")


def test_a_quantised_cache_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "in", "ModelOpt MXFP8")
    entry = KINDS["ModelOpt MXFP8"].config["quantization_config"]
    edit(tmp_path / "in", quantization_config=entry | {"kv_cache_scheme": {"num_bits": 8}})
    with pytest.raises(ValueError, match=r"quantization_config\.kv_cache_scheme — need none, got"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", container="minimax-mxfp8")


def test_several_sizes_of_groups_are_refused(tmp_path: Path) -> None:
    kind = pack_quantized(32)
    write(tmp_path / "in", kind, layers=(0,), sizes=(64, 64))
    write(tmp_path / "other", pack_quantized(64), layers=(1,), sizes=(64, 64))
    rewrite(tmp_path / "in", lambda state: state.update(state_of(tmp_path / "other")))
    entry = json.loads(json.dumps(kind.config["quantization_config"]))
    second = json.loads(json.dumps(entry["config_groups"]["group_0"]))
    second["weights"]["group_size"], second["targets"] = 64, [r"re:.*layers\.1\..*"]
    entry["config_groups"]["group_1"] = second
    edit(tmp_path / "in", quantization_config=entry)
    with pytest.raises(
        ValueError, match=r"need matrices with one size of groups.* int4_g32 and int"
    ):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", container="awq")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in", "other"]


def test_every_container_but_those_with_fp8_layers_is_written() -> None:
    left = {each.name for each in CONTAINERS} - {each.container for each in TARGETS.values()}
    assert left == {"DeepSeek-V4", "MiMo"}
    formats = {each.name: each.weight_format for each in CONTAINERS}
    assert all(formats[each.container] == each.weight_format for each in TARGETS.values())
    documented = convert_checkpoint.__doc__ or ""
    assert all(f'"{name}"' in documented for name in TARGETS)
