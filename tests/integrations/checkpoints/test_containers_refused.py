"""What is no container that loads is refused in one line that names what was found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mxpert.errors import UnsupportedError
from mxpert.integrations.checkpoints.containers import CONTAINERS, UNSERVED
from mxpert.integrations.checkpoints.load import load_expert_weights
from support.expert_containers import KINDS, check_checkpoint, rewrite, write

FIRST = "model.layers.0.mlp.experts.0.gate_proj"
CT, QUARK, MODELOPT = ("compressed-tensors mxfp4-pack-quantized", "Quark OCP MX", "ModelOpt NVFP4")


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(old)]:
            tensors[name.removesuffix(old) + new] = tensors.pop(name)

    return change


def changed(
    name: str, function: Callable[[torch.Tensor], torch.Tensor | None]
) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        new = function(tensors.pop(name))
        if new is not None:
            tensors[name] = new

    return change


DAMAGED: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no scales": (CT, renamed(".weight_scale", ".other"), r"\.other — need N\.gate_proj\."),
    "one scale missing": (
        CT,
        changed(f"{FIRST}.weight_scale", lambda t: None),
        rf"{FIRST}\.weight_scale — need this tensor in the checkpoint",
    ),
    "one matrix missing": (
        QUARK,
        lambda tensors: [tensors.pop(f"{FIRST}.{each}") for each in ("weight", "weight_scale")],
        r"experts\.0 — need a gate projection for each of 4 experts, got none",
    ),
    "codes alone": (
        QUARK,
        lambda tensors: [tensors.pop(name) for name in [*tensors] if name.endswith("_scale")],
        r"weight_scale — need this tensor in the checkpoint",
    ),
    "half of the scales": (
        CT,
        changed(f"{FIRST}.weight_scale", lambda t: t[:, :1].contiguous()),
        rf"{FIRST}\.weight_scale\.shape — need \[96, 2\], got \[96, 1\]; the matrix is \[96, 64\]",
    ),
    "scales of NVFP4": (
        QUARK,
        changed(f"{FIRST}.weight_scale", lambda t: t.float().to(torch.float8_e4m3fn)),
        rf"{FIRST}\.weight_scale\.dtype — need U8 or F8_E8M0, got F8_E4M3",
    ),
    "codes of another width": (
        CT,
        changed(f"{FIRST}.weight_packed", lambda t: t[:, :16].contiguous()),
        r"shape — need hidden_size 64, as .* states, got \[96, 16\]",
    ),
    "no whole blocks": (
        CT,
        changed(f"{FIRST}.weight_packed", lambda t: t[:, :8].contiguous()),
        r"need hidden_size a multiple of 32",
    ),
    "a scale of three dimensions": (
        CT,
        changed(f"{FIRST}.weight_packed", lambda t: t[None]),
        r"weight_packed\.shape — need \[N, K/2\], got \[1, 96, 32\]",
    ),
    "another naming beside it": (
        CT,
        lambda tensors: tensors.update(
            {FIRST.replace("gate_proj", "w1") + ".weight_packed": torch.zeros(1)}
        ),
        r"experts\.0\.w1 — need one naming of experts, got .*gate_proj beside it",
    ),
    "a tensor of another container": (
        CT,
        lambda tensors: tensors.update({f"{FIRST}.weight_global_scale": torch.zeros(1)}),
        r"gate_proj\.weight_global_scale — need .*as compressed-tensors mxfp4-pack-quantized",
    ),
    "scales of AWQ": (
        MODELOPT,
        lambda tensors: tensors.update({f"{FIRST}.pre_quant_scale": torch.zeros(1)}),
        "pre_quant_scale — need .*; scales of AWQ's kind on the activations are not supported",
    ),
    "stacked tensors": (
        CT,
        lambda tensors: (
            tensors.clear(),
            tensors.update(
                {
                    "model.layers.0.mlp.experts.gate_up_proj_blocks": torch.zeros(
                        1, dtype=torch.uint8
                    )
                }
            ),
        ),
        r"experts\.gate_up_proj_blocks — need N\.gate_proj\.weight_packed and",
    ),
    "an expert too many": (
        CT,
        lambda tensors: tensors.update(
            {
                name.replace("experts.3.", "experts.4."): each.clone()
                for name, each in tensors.items()
                if ".experts.3." in name
            }
        ),
        r"need 3 matrices for each of 4 experts, got 15; config and tensors belong to different",
    ),
    "dense experts that nothing excludes": (
        CT,
        lambda tensors: (
            tensors.clear(),
            tensors.update({f"{FIRST}.weight": torch.zeros(96, 64).bfloat16()}),
        ),
        rf"{FIRST}\.weight — need .*got dense BF16 weights that it does not exclude",
    ),
    "a global scale of two numbers": (
        MODELOPT,
        changed(f"{FIRST}.weight_scale_2", lambda t: torch.ones(2)),
        r"weight_scale_2\.shape — need \[\] or \[1\], got \[2\]",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_wrong_tensor_is_named_before_anything_is_read(case: str, tmp_path: Path) -> None:
    name, damage, expected = DAMAGED[case]
    write(tmp_path, name)
    rewrite(tmp_path, damage)
    with pytest.raises(ValueError, match=f"^load_expert_weights: [^\n]*{expected}[^\n]*$"):
        load_expert_weights(tmp_path)  # no iteration: headers are checked by the call itself


@pytest.mark.parametrize("kept", [0, 100, 4000])
def test_a_truncated_shard_is_named(kept: int, tmp_path: Path) -> None:
    write(tmp_path, CT)
    os.truncate(sorted(tmp_path.glob("*.safetensors"))[-1], kept)
    expected = r"^load_expert_weights: [^\n]*model-000.*\.safetensors — need a complete safetensors"
    with pytest.raises(ValueError, match=expected):
        load_expert_weights(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path, CT)
    sorted(tmp_path.glob("*.safetensors"))[-1].unlink()
    with pytest.raises(ValueError, match=r"model-000.*\.safetensors — need an existing"):
        load_expert_weights(tmp_path)


def test_dense_experts_that_the_config_excludes_are_left_out(tmp_path: Path) -> None:
    modules = write(tmp_path, MODELOPT, layers=(0, 1))
    stated = KINDS[MODELOPT].config["quantization_config"]
    stated = stated | {"ignore": ["model.layers.0.mlp.experts*"]}
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config["quantization_config"] = stated
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def dense(tensors: dict[str, torch.Tensor]) -> None:
        for name in [*tensors]:
            tensor = tensors.pop(name)
            if name.endswith(".weight"):
                tensors[name] = tensor.bfloat16()

    rewrite(tmp_path, dense)
    check_checkpoint(tmp_path, modules[1:])


MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4"},
        "model.layers.1.mlp.experts": {"quant_algo": "MXFP8"},
    },
}
STATED: dict[str, tuple[Any, str]] = {
    "nothing": (None, r"quant_method — need one of gpt-oss, compressed-tensors mx.*, got None"),
    "no object": ("fp8", "quantization_config — need a JSON object, got 'fp8'"),
    "no method": ({}, "quant_method — need the name of a method, got None"),
    "a list of groups": (
        {"quant_method": "compressed-tensors", "config_groups": []},
        r"config_groups — need a JSON object, got \[\]",
    ),
    "a group that is text": (
        {"quant_method": "compressed-tensors", "config_groups": {"a": "MXFP4"}},
        "config_groups — need a JSON object, got 'MXFP4'",
    ),
    "targets that are text": (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": "Linear"}}},
        "targets — need a list, got str",
    ),
    "no regular expression": (
        {"quant_method": "compressed-tensors", "ignore": ["re:("]},
        "need regular expressions, got",
    ),
    "quark without weights": (
        {"quant_method": "quark", "global_quant_config": None},
        "global_quant_config — need a JSON object, got None",
    ),
    "experts that it excludes": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*.experts*"]},
        "need quantised experts, got model.layers.0.mlp.experts.0.*_proj among the layers",
    ),
    "two formats": (MIXED, r"need experts in one format, got 'NVFP4' \(.*\) and 'MXFP8' \("),
}


@pytest.mark.parametrize("case", STATED)
def test_a_config_that_says_no_container_is_refused(case: str, tmp_path: Path) -> None:
    stated, expected = STATED[case]
    write(tmp_path, MODELOPT, quantization_config=stated)
    with pytest.raises(ValueError, match=f"^load_expert_weights: [^\n]*{expected}[^\n]*$"):
        load_expert_weights(tmp_path)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "NVFP4 with AWQ": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
        r"got ModelOpt NVFP4 with AWQ \(NVFP4\)",
    ),
    "FP8 of compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        r"got compressed-tensors float-quantized \(FP8\)",
    ),
    "FP8": ({"quant_method": "fp8"}, r"got FP8 in blocks \(FP8\); FP8 experts in this container"),
    "unknown": ({"quant_method": "hqq"}, "got 'hqq'; see docs/which-checkpoints-run.md"),
    "fp6 of quark": (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp6_e2m3"}}},
        "got 'quark fp6_e2m3'",
    ),
    "fp4 of another block size": (
        {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {"dtype": "fp4", "group_size": 16, "scale_format": "e4m3"}
            },
        },
        "got .quark fp4 group_size=16 scale_format='e4m3'.",
    ),
    "float weights of quark": (
        {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}
            },
            "export": {"weight_format": "fake_quantized"},
        },
        "got 'quark fp4 fake_quantized'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_formats_are_refused_by_name(case: str, tmp_path: Path) -> None:
    stated, expected = REFUSED[case]
    write(tmp_path, MODELOPT, quantization_config=stated)
    with pytest.raises(UnsupportedError, match=f"^load_expert_weights: [^\n]*{expected}[^\n]*$"):
        load_expert_weights(tmp_path)


def test_no_two_containers_are_stated_alike() -> None:
    stated = [
        (each.stated.method, format)
        for each in (*CONTAINERS, *UNSERVED)
        for format in each.stated.formats
    ]
    assert len(stated) == len(set(stated))
    names = [each.name for each in (*CONTAINERS, *UNSERVED)]
    assert len(names) == len(set(names))


def test_pages_of_a_file_are_refused_where_experts_are_stacked(tmp_path: Path) -> None:
    write(tmp_path, CT)
    with pytest.raises(ValueError, match="mmap — need False for compressed-tensors mxfp4"):
        load_expert_weights(tmp_path, mmap=True)
