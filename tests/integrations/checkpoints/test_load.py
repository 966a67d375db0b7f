"""Reading gpt-oss checkpoints: what arrives is what is stored, and bad files are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mxpert import GateUpOrder, MoEWeights, SwiGLU
from mxpert.formats import quantize_blocks
from mxpert.integrations.checkpoints.inspect import inspect_checkpoint
from mxpert.integrations.checkpoints.load import (
    load_expert_weights,
    load_gpt_oss_layers,
    save_gpt_oss_layer_tensors,
)
from mxpert.integrations.checkpoints.safetensors_files import CheckpointReader
from support.gpt_oss import tiny_gpt_oss
from support.incomplete import copy_without
from support.written_experts import state_of

EXPERTS = "model.layers.1.mlp.experts"
ROUTER = "model.layers.1.mlp.router"


def test_a_layer_holds_the_stored_bytes(demo: Path) -> None:
    state = state_of(demo)
    (layer,) = load_gpt_oss_layers(demo, layers=[1])
    weights = layer.weights
    assert layer.layer == 1
    assert layer.top_k == 2
    assert layer.activation == SwiGLU(alpha=1.702, limit=7.0)
    assert weights.gate_up_order is GateUpOrder.INTERLEAVED
    assert (weights.num_experts, weights.hidden_size, weights.intermediate_size) == (4, 64, 96)
    for name, projection in (
        ("gate_up_proj", weights.gate_up_proj),
        ("down_proj", weights.down_proj),
    ):
        assert torch.equal(projection.qdata, state[f"{EXPERTS}.{name}_blocks"].flatten(-2))
        assert torch.equal(projection.scale, state[f"{EXPERTS}.{name}_scales"])
    assert torch.equal(weights.gate_up_bias, state[f"{EXPERTS}.gate_up_proj_bias"].float())
    assert torch.equal(weights.down_bias, state[f"{EXPERTS}.down_proj_bias"].float())
    assert torch.equal(layer.router_weight, state[f"{ROUTER}.weight"])
    assert torch.equal(layer.router_bias, state[f"{ROUTER}.bias"])


def test_all_layers_come_in_order_and_a_single_file_is_the_same(demo: Path, tmp_path: Path) -> None:
    single = tiny_gpt_oss(tmp_path / "single", sharded=False)
    assert (single / "model.safetensors").is_file()
    pairs = list(zip(load_gpt_oss_layers(demo), load_gpt_oss_layers(single), strict=True))
    assert [left.layer for left, _ in pairs] == [0, 1]
    for left, right in pairs:
        assert torch.equal(left.weights.gate_up_proj.qdata, right.weights.gate_up_proj.qdata)
        assert torch.equal(left.router_weight, right.router_weight)


def test_naming_is_the_inverse_of_loading(demo: Path) -> None:
    state = state_of(demo)
    (layer,) = load_gpt_oss_layers(demo, layers=[1])
    tensors = save_gpt_oss_layer_tensors(1, layer.weights, layer.router_weight, layer.router_bias)
    moe = {name for name in state if name.startswith("model.layers.1.mlp.")}
    assert set(tensors) == moe
    for name in moe:
        assert tensors[name].dtype == state[name].dtype, name
        assert torch.equal(tensors[name], state[name]), name


@pytest.mark.parametrize("order", GateUpOrder, ids=lambda order: order.value)
def test_naming_interleaves_every_order(order: GateUpOrder) -> None:
    gate, up = torch.randn(2, 32, 64), torch.randn(2, 32, 64)
    pairs = torch.stack((gate, up), dim=2)  # [E, F, 2, H]
    rows = {
        GateUpOrder.INTERLEAVED: pairs.flatten(1, 2),
        GateUpOrder.CONCATENATED: torch.cat((gate, up), dim=1),
        GateUpOrder.INTERLEAVED_16: torch.cat(
            [
                part
                for start in (0, 16)
                for part in (gate[:, start : start + 16], up[:, start : start + 16])
            ],
            dim=1,
        ),
    }[order]
    weights = MoEWeights(
        quantize_blocks(rows, "mxfp4"),
        quantize_blocks(torch.randn(2, 64, 32), "mxfp4"),
        gate_up_bias=rows[..., 0].contiguous(),
        gate_up_order=order,
    )
    tensors = save_gpt_oss_layer_tensors(0, weights)
    wanted = quantize_blocks(pairs.flatten(1, 2), "mxfp4")
    prefix = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(tensors[f"{prefix}_blocks"].flatten(-2), wanted.qdata)
    assert torch.equal(tensors[f"{prefix}_scales"], wanted.scale)
    assert torch.equal(tensors[f"{prefix}_bias"], pairs.flatten(1, 2)[..., 0].to(torch.bfloat16))


def test_only_moe_tensors_are_read(
    demo: Path, copy_of: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = copy_of(demo)
    index = json.loads((directory / "model.safetensors.index.json").read_text("utf-8"))
    (directory / index["weight_map"]["model.embed_tokens.weight"]).unlink()
    read, names = CheckpointReader.read_into, []
    monkeypatch.setattr(
        CheckpointReader,
        "read_into",
        lambda self, name, memory: names.append(name) or read(self, name, memory),
    )
    layers = load_gpt_oss_layers(directory)
    assert names == []  # nothing is read before the first layer is asked for
    next(layers)
    assert names
    assert all(name.startswith("model.layers.0.mlp.") for name in names)


def cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, :-1].contiguous()


BAD_TENSORS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "blocks missing": (
        f"{EXPERTS}.gate_up_proj_blocks",
        lambda t: None,
        r"model-\S+safetensors: \S+gate_up_proj_blocks — need the tensor",
    ),
    "blocks of another shape": (
        f"{EXPERTS}.gate_up_proj_blocks",
        cut,
        r"gate_up_proj_blocks.shape — need \[4, 192, 2, 16\], got \[4, 19",
    ),
    "scales of another shape": (
        f"{EXPERTS}.down_proj_scales",
        cut,
        r"down_proj_scales.shape — need \[4, 64, 3\], got \[4, 63, 3\]",
    ),
    "scales as floats": (
        f"{EXPERTS}.down_proj_scales",
        lambda t: t.float(),
        r"down_proj_scales.dtype — need U8, got F32",
    ),
    "bias as integers": (
        f"{EXPERTS}.down_proj_bias",
        lambda t: t.int(),
        r"down_proj_bias.dtype — need BF16 or F16 or F32, got I32",
    ),
    "bias of another shape": (
        f"{EXPERTS}.gate_up_proj_bias",
        cut,
        r"gate_up_proj_bias.shape — need \[4, 192\], got \[4, 191\]",
    ),
    "router of another shape": (
        f"{ROUTER}.weight",
        cut,
        r"router.weight.shape — need \[4, 64\], got \[4, 63\]",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_bad_tensor_is_named(case: str, demo: Path, copy_of: Any, rewrite: Any) -> None:
    name, change, expected = BAD_TENSORS[case]
    directory = copy_of(demo)
    rewrite(directory, name, change)
    with pytest.raises(ValueError, match=f"^load_gpt_oss_layers: .*{expected}"):
        load_gpt_oss_layers(directory)
    assert next(load_gpt_oss_layers(directory, layers=[0])).layer == 0  # the other layer is fine


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model_type": "mixtral"}, r'model_type — need "gpt_oss", got mixtral'),
    "not quantised": ({"quantization_config": None}, r'quant_method — need "mxfp4", got None'),
    "another method": ({"quantization_config": {"quant_method": "fp8"}}, 'need "mxfp4", got fp8'),
    "no experts": ({"num_local_experts": None}, "need a positive integer, got None"),
    "top_k too large": ({"num_experts_per_tok": 5}, "need at most 4 experts, got 5"),
    "odd width": ({"hidden_size": 72}, "hidden_size — need a multiple of 32, got 72"),
    "other width": ({"hidden_size": 128}, r"gate_up_proj_blocks.shape — need \[4, 192, 4, 16\]"),
    "limit of zero": ({"swiglu_limit": 0}, "swiglu_limit — need a positive number, got 0"),
    "other order": (
        {
            "quantization_config": {
                "quant_method": "mxfp4",
                "mxpert": {"gate_up_order": "concatenated"},
            }
        },
        "gate_up_order — need GateUpOrder.INTERLEAVED",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_bad_config_is_named(case: str, demo: Path, copy_of: Any) -> None:
    change, expected = BAD_CONFIGS[case]
    path = copy_of(demo) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | change), encoding="utf-8")
    with pytest.raises(ValueError, match=f"^load_gpt_oss_layers: .*{expected}"):
        load_gpt_oss_layers(path.parent)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


BAD_FILES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no index": (
        "model.safetensors.index.json",
        Path.unlink,
        "need model.safetensors.index.json or model.safetensors in it, got neither",
    ),
    "no config": ("config.json", Path.unlink, "config.json — need an existing JSON file"),
    "index is no JSON": ("model.safetensors.index.json", truncate, "need valid JSON"),
    "config is a list": ("config.json", lambda path: path.write_text("[]"), "need a JSON object"),
    "index leaves the directory": (
        "model.safetensors.index.json",
        lambda path: path.write_text('{"weight_map": {"a": "../model.safetensors"}}'),
        "to files in the same directory",
    ),
    "shard missing": (
        "model-00003-of-00003.safetensors",
        Path.unlink,
        "00003.safetensors — need an existing safetensors file",
    ),
    "shard truncated": (
        "model-00003-of-00003.safetensors",
        truncate,
        "00003.safetensors — need a complete safetensors file",
    ),
    "shard is text": (
        "model-00003-of-00003.safetensors",
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
        "00003.safetensors — need a complete safetensors file",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_named(case: str, demo: Path, copy_of: Any) -> None:
    name, damage, expected = BAD_FILES[case]
    directory = copy_of(demo)
    damage(directory / name)
    with pytest.raises(ValueError, match=f"^load_gpt_oss_layers: .*{expected}"):
        load_gpt_oss_layers(directory)


def test_a_layer_that_does_not_exist_is_refused(demo: Path) -> None:
    with pytest.raises(ValueError, match="layers — need layers 0 to 1, got 2"):
        load_gpt_oss_layers(demo, layers=[0, 2])
    with pytest.raises(ValueError, match=r"layers — need layers among \[0, 1\], got 2"):
        load_expert_weights(demo, layers=[2])


KINDS = [
    f"{projection}_proj_{part}"
    for projection in ("gate_up", "down")
    for part in ("blocks", "scales", "bias")
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_tensor_of_experts_is_named(kind: str, demo: Path, tmp_path: Path) -> None:
    """The index does not know it either, so that nothing but the layout says that it is missing."""
    name = f"{EXPERTS}.{kind}"
    damaged = copy_without(demo, tmp_path / "damaged", name)
    for read in (load_expert_weights, load_gpt_oss_layers):
        with pytest.raises(ValueError, match=f"{name} — need this tensor in the checkpoint"):
            read(damaged)
    if not kind.endswith("bias"):
        with pytest.raises(ValueError, match=f"{name} — need this tensor in the checkpoint"):
            inspect_checkpoint(damaged)


@pytest.mark.parametrize("mmap", [False, True])
def test_loaded_layers_do_not_follow_the_files(tmp_path: Path, mmap: bool) -> None:
    """A file that changes behind a loaded checkpoint reaches it only where mmap asks."""
    folder = tiny_gpt_oss(tmp_path / "demo", num_layers=1, sharded=False)
    options = dict(mmap=True) if mmap else {}
    ((_, weights),) = load_expert_weights(folder, **options)
    (layer,) = load_gpt_oss_layers(folder, **options)
    held = [layer.router_weight, layer.router_bias]
    for each in (weights, layer.weights):
        held += [each.gate_up_proj.qdata, each.down_proj.qdata, each.down_proj.scale]
    before = [tensor.clone() for tensor in held]
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(1 << 12)
        file.write(b"\xff" * (size - (1 << 12)))
    same = [torch.equal(*pair) for pair in zip(held, before, strict=True)]
    assert not any(same) if mmap else all(same)
