"""Experts are named by their full module paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mxpert
from mxpert.formats import dequantize_blocks, quantize_blocks
from mxpert.integrations.checkpoints.inspect import inspect_checkpoint
from mxpert.integrations.checkpoints.load import load_expert_weights
from mxpert.integrations.checkpoints.quantize import quantize_checkpoint
from mxpert.integrations.module_paths import choose_modules, match_modules, short_names
from mxpert.testing.numerics import assert_exact
from support.mixtral import tiny_mixtral

TWO_IN_A_LAYER = [
    "model.layers.0.mlp.experts",
    "model.layers.0.mlp.routed.experts",
    "model.layers.1.mlp.experts",
]
GPT_STYLE = [
    "transformer.h.0.moe.experts",
    "transformer.h.1.moe.experts",
    "transformer.h.10.moe.experts",
    "transformer.h.9.moe.experts",
]


def dense(directory: Path, modules: list[str]) -> dict[str, torch.Tensor]:
    """Write a bf16 checkpoint with one matrix per expert; returns the down projections."""
    torch.manual_seed(0)
    tensors = {
        f"{module}.{expert}.{part}_proj.weight": torch.randn(32, 32).bfloat16()
        for module in modules
        for expert in range(2)
        for part in ("gate", "up", "down")
    }
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(
        json.dumps({"model_type": "toy", "hidden_size": 32, "num_experts": 2}), encoding="utf-8"
    )
    return {
        module: torch.stack(
            [tensors[f"{module}.{expert}.down_proj.weight"] for expert in range(2)]
        ).float()
        for module in modules
    }


@pytest.mark.parametrize("modules", [TWO_IN_A_LAYER, GPT_STYLE], ids=["two in a layer", "gpt"])
def test_every_module_is_loaded_and_inspected_by_its_path(
    modules: list[str], tmp_path: Path
) -> None:
    down = dense(tmp_path / "bf16", modules)
    report = quantize_checkpoint(tmp_path / "bf16", tmp_path / "mxfp4")
    assert report.verified, report.failures
    loaded = dict(load_expert_weights(tmp_path / "mxfp4"))
    assert sorted(loaded) == modules
    for module, weights in loaded.items():
        wanted = quantize_blocks(down[module], "mxfp4", rule=mxpert.ScaleRule.RCEIL)
        assert_exact(weights.down_proj.qdata, wanted.qdata, module)
        ((only, again),) = load_expert_weights(tmp_path / "mxfp4", layers=[module])
        assert only == module
        assert_exact(again.down_proj.qdata, wanted.qdata, module)
    entries = inspect_checkpoint(tmp_path / "mxfp4", source=tmp_path / "bf16")
    assert {entry.module for entry in entries} == set(modules)
    for entry in entries:
        if entry.projection == "down_proj":
            values = dequantize_blocks(loaded[entry.module].down_proj)
            error = (down[entry.module] - values).norm() / down[entry.module].norm()
            assert entry.relative_l2 == pytest.approx(float(error), rel=1e-5)
        (alone,) = (
            found
            for found in inspect_checkpoint(tmp_path / "mxfp4", layer=entry.module)
            if found.projection == entry.projection
        )
        assert alone.scale_histogram == entry.scale_histogram


def test_a_number_is_short_for_the_only_module_of_its_layer(tmp_path: Path) -> None:
    dense(tmp_path / "bf16", TWO_IN_A_LAYER)
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "mxfp4")
    ((name, _),) = load_expert_weights(tmp_path / "mxfp4", layers=[1])
    assert name == TWO_IN_A_LAYER[2]
    with pytest.raises(
        ValueError,
        match=r"need a layer with one experts module, got 0 with "
        r"\['model.layers.0.mlp.experts', .*name a module by its full path",
    ):
        load_expert_weights(tmp_path / "mxfp4", layers=[0])
    with pytest.raises(ValueError, match=r"need modules among .* got 'model\.layers\.2\.mlp"):
        load_expert_weights(tmp_path / "mxfp4", layers=["model.layers.2.mlp.experts"])
    with pytest.raises(TypeError, match=r"need module paths or layer numbers, got 1\.0"):
        choose_modules(TWO_IN_A_LAYER, [1.0], "test")  # type: ignore[list-item]
    assert {entry.module for entry in inspect_checkpoint(tmp_path / "mxfp4", layer=0)} == set(
        TWO_IN_A_LAYER[:2]
    )


def test_layers_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    dense(tmp_path / "bf16", GPT_STYLE)
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "mxfp4")
    assert [name for name, _ in load_expert_weights(tmp_path / "mxfp4")] == [
        f"transformer.h.{layer}.moe.experts" for layer in (0, 1, 9, 10)
    ]


def test_renamed_parents_match_by_number_where_that_is_unambiguous() -> None:
    old = ["model.layers.0.block_sparse_moe.experts", "model.layers.1.block_sparse_moe.experts"]
    new = [name.replace("block_sparse_moe", "mlp") for name in old]
    assert match_modules(new, old) == dict(zip(new, old, strict=True))
    assert match_modules(TWO_IN_A_LAYER, old) == {
        TWO_IN_A_LAYER[2]: "model.layers.1.block_sparse_moe.experts"
    }


def test_a_source_that_could_be_either_is_refused(tmp_path: Path) -> None:
    dense(tmp_path / "bf16", TWO_IN_A_LAYER)
    dense(tmp_path / "other", [name.replace("mlp", "moe") for name in TWO_IN_A_LAYER])
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "mxfp4")
    with pytest.raises(ValueError, match=r"need the experts of model\.layers\.0\.mlp\.experts"):
        inspect_checkpoint(tmp_path / "mxfp4", source=tmp_path / "other")


def test_a_model_with_two_experts_modules_in_a_layer_converts(tmp_path: Path) -> None:
    model: Any = tiny_mixtral(hidden_size=32, num_local_experts=2)
    mlp = model.model.layers[0].mlp
    mlp.more_experts = type(mlp.experts)(model.config)
    torch.nn.init.normal_(mlp.more_experts.gate_up_proj)
    torch.nn.init.normal_(mlp.more_experts.down_proj)
    mxpert.convert(model, progress=False)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    loaded = dict(load_expert_weights(tmp_path))
    assert len(loaded) == 2
    for path, weights in loaded.items():
        assert_exact(weights.down_proj.qdata, stored[f"{path}.down_proj_blocks"].flatten(-2), path)


def test_rows_of_a_table_have_names_of_their_own() -> None:
    assert short_names(GPT_STYLE) == dict(zip(GPT_STYLE, ["0", "1", "10", "9"], strict=True))
    assert list(short_names(TWO_IN_A_LAYER).values()) == [*TWO_IN_A_LAYER[:2], "1"]
    assert short_names(["experts"]) == {"experts": "experts"}
