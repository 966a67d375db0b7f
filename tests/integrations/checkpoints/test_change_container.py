"""Checkpoints in another container: the same weights, tensors as published, or one line why not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mxpert import UnsupportedError
from mxpert.integrations.checkpoints import container_plan
from mxpert.integrations.checkpoints.change_container import convert_checkpoint
from mxpert.integrations.checkpoints.load import load_expert_weights
from mxpert.integrations.checkpoints.written_containers import TARGETS
from mxpert.moe.weights import MoEWeights
from mxpert.testing.numerics import assert_exact
from support.converted_experts import SOURCES, write_source
from support.expert_containers import (
    EXACT_NVFP4,
    EXPERTS,
    KINDS,
    MX_KINDS,
    Experts,
    Kind,
    awq,
    edit,
    gptq,
    pack_quantized,
    rewrite,
    rewrite_all,
    store_experts,
    tensors_of,
    write,
)
from support.written_experts import state_of
from tests.integrations.families import build
from tests.integrations.test_transformers_loading import load, logits

SHORT = {each.container: name for name, each in TARGETS.items()}
CASTS = ("ModelOpt NVFP4", "compressed-tensors nvfp4-pack-quantized")
MXFP8 = [name for name, kind in KINDS.items() if kind.format == "mxfp8_e4m3"]
MXFP4 = [name for name in MX_KINDS if name not in CASTS]
WRITTEN_MX = [name for name in MXFP4 if name in SHORT]
INT4 = {
    "pack-quantized": pack_quantized(32),
    "pack-quantized g128 with zeros": pack_quantized(128, torch.float16, has_zeros=True),
    "awq": awq(64),
    "gptq sym": gptq(32, sym=True),
    "gptq": gptq(128),
    "gptq_v2": gptq(32, v2=True),
}
ACTIVATIONS = ("input_scale", "input_global_scale")
DENSE = {
    "model.embed_tokens.weight": torch.randn(8, 64, dtype=torch.bfloat16),
    "model.layers.0.self_attn.q_proj.weight": torch.randn(64, 64, dtype=torch.bfloat16),
    "model.layers.0.input_layernorm.weight": torch.ones(64),
}


def values(weights: MoEWeights) -> tuple[torch.Tensor, ...]:
    """gate, up and down in float64."""
    gate_up, down = weights.dequantize(torch.float64)
    if weights.gate_up_order.value == "interleaved":
        return gate_up[:, ::2], gate_up[:, 1::2], down
    return *gate_up.chunk(2, dim=1), down


def check_values(path: Path, modules: list[Experts]) -> None:
    loaded = dict(load_expert_weights(path))
    assert list(loaded) == [module.path for module in modules]
    for module in modules:
        for part, found in zip(("gate", "up", "down"), values(loaded[module.path]), strict=True):
            assert_exact(found, module.stacked(part), part)


def sizes_of(kind: Kind) -> tuple[int, int]:
    return (128, 256) if kind.group == 128 else (64, 192) if kind.group == 64 else (64, 96)


PAIRS = [
    *((source, SHORT[target]) for source in MXFP4 for target in WRITTEN_MX if source != target),
    *((source, name) for source in MXFP4 for name in ("gpt-oss", *map(SHORT.get, MXFP8))),
    *((source, name) for source in MXFP4 for name in map(SHORT.get, CASTS)),
    *((source, name) for source in CASTS for name in ("gpt-oss", *map(SHORT.get, WRITTEN_MX))),
    *((source, SHORT[target]) for source in MXFP8 for target in MXFP8 if source != target),
    (CASTS[0], "nvfp4-pack-quantized"),
    (CASTS[1], "modelopt-nvfp4"),
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_weight_is_the_same_afterwards(source: str, target: str, tmp_path: Path) -> None:
    kind = KINDS[source]
    if (source, target) == (CASTS[1], "modelopt-nvfp4"):
        kind = EXACT_NVFP4[source]
    if (source, target) == (CASTS[0], "nvfp4-pack-quantized"):
        kind = replace(kind, store=powers_of_two)
    modules = write(tmp_path / "in", kind, more=DENSE)
    seen: list[tuple[int, int]] = []
    report = convert_checkpoint(
        tmp_path / "in",
        tmp_path / "out",
        container=target,
        on_progress=lambda done, total, what: seen.append((done, total)),
    )
    assert report.verified, report.failures
    assert (report.source_container, report.container) == (source, TARGETS[target].container)
    assert (report.modules, report.matrices) == (2, 2 * 3 * EXPERTS)
    check_values(tmp_path / "out", modules)
    after = state_of(tmp_path / "out")
    for name, tensor in DENSE.items():
        assert torch.equal(after[name], tensor), name
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0
    is_scale = [name for name in state_of(tmp_path / "in") if name.endswith(ACTIVATIONS)]
    assert report.activation_scales == len(is_scale)
    assert not [name for name in after if name.endswith(ACTIVATIONS)]


def powers_of_two(matrix: Any, factor: int) -> dict[str, torch.Tensor]:
    return KINDS["ModelOpt NVFP4"].store(matrix, factor)


@pytest.mark.parametrize("target", ["pack-quantized", "awq", "gptq"])
@pytest.mark.parametrize("source", INT4)
def test_codes_zero_points_and_scales_of_int4_stay(
    source: str, target: str, tmp_path: Path
) -> None:
    kind = INT4[source]
    modules = write(tmp_path / "in", kind, sizes=sizes_of(kind), more=DENSE)
    if source.startswith(target):
        with pytest.raises(ValueError, match=r"^convert_checkpoint: container — need another"):
            convert_checkpoint(tmp_path / "in", tmp_path / "out", container=target)
        return
    assert convert_checkpoint(tmp_path / "in", tmp_path / "out", container=target).verified
    check_values(tmp_path / "out", modules)
    entry = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))["quantization_config"]
    has_zeros = target == "awq" or "zeros" in source or source in ("awq", "gptq", "gptq_v2")
    if target == "gptq":
        assert (entry["sym"], entry["checkpoint_format"]) == (
            (False, "gptq_v2") if has_zeros else (True, "gptq")
        )
    before, after = (dict(load_expert_weights(tmp_path / each)) for each in ("in", "out"))
    for path, weights in before.items():
        for projection in ("gate_up_proj", "down_proj"):
            old, new = (getattr(each, projection) for each in (weights, after[path]))
            assert old.format == new.format
            assert torch.equal(old.qdata, new.qdata)
            assert old.scale.dtype == new.scale.dtype
            assert torch.equal(old.scale, new.scale)
            assert (new.zero_point is not None) == has_zeros
            if old.zero_point is not None:
                assert torch.equal(old.zero_point, new.zero_point)


def test_stacked_experts_with_biases_become_matrices_and_come_back(
    demo: Path, tmp_path: Path
) -> None:
    """gpt-oss's gate and up rows alternate; afterwards its tensors are those of the source."""
    report = convert_checkpoint(demo, tmp_path / "out", container="mxfp4-pack-quantized")
    assert report.verified, report.failures
    state = state_of(tmp_path / "out")
    before = state_of(demo)
    path = "model.layers.1.mlp.experts"
    for expert in range(4):
        bias = before[f"{path}.gate_up_proj_bias"][expert]
        assert torch.equal(state[f"{path}.{expert}.gate_proj.bias"], bias[0::2])
        assert torch.equal(state[f"{path}.{expert}.up_proj.bias"], bias[1::2])
        blocks = before[f"{path}.gate_up_proj_blocks"][expert, 1::2].flatten(1)
        assert torch.equal(state[f"{path}.{expert}.up_proj.weight_packed"], blocks)
    back = convert_checkpoint(tmp_path / "out", tmp_path / "back", container="gpt-oss")
    assert back.verified, back.failures
    after = state_of(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name
    configs = [
        json.loads((each / "config.json").read_text("utf-8")) for each in (demo, tmp_path / "back")
    ]
    stated = [config.pop("quantization_config")["quant_method"] for config in configs]
    assert stated == ["mxfp4", "mxfp4"]
    assert configs[0] == configs[1]


def test_names_of_the_source_stay(tmp_path: Path) -> None:
    names = ("w1", "w3", "w2")
    modules = write(tmp_path / "in", "Quark OCP MX", names=names)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", container="mxfp4-pack-quantized")
    state = state_of(tmp_path / "out")
    for module in modules:
        for expert in range(EXPERTS):
            for name, part in zip(names, ("gate", "up", "down"), strict=True):
                stored = state[f"{module.path}.{expert}.{name}.weight_packed"]
                assert torch.equal(stored, module.matrices[expert, part].packed)


def test_experts_without_a_gate_are_converted(tmp_path: Path) -> None:
    write(tmp_path / "in", "Quark OCP MX", model_type="nemotron_h")
    rewrite_all(tmp_path / "in", lambda state: [state.pop(n) for n in list(state) if "gate" in n])
    assert convert_checkpoint(tmp_path / "in", tmp_path / "out", container="gpt-oss").verified
    assert convert_checkpoint(
        tmp_path / "out", tmp_path / "back", container="mxfp4-pack-quantized"
    ).verified
    pairs = zip(
        *(load_expert_weights(tmp_path / each) for each in ("in", "out", "back")), strict=True
    )
    for (_, first), (_, second), (_, third) in pairs:
        for other in (second, third):
            assert other.gate_up_order is None
            assert torch.equal(first.dequantize()[0], other.dequantize()[0])
            assert torch.equal(first.dequantize()[1], other.dequantize()[1])


OTHERS = {
    "mxfp4-pack-quantized": "Quark OCP MX",
    "modelopt-nvfp4": "compressed-tensors nvfp4-pack-quantized",
    "minimax-mxfp8": "ModelOpt MXFP8",
    "gptq": "AWQ",
    "awq": "compressed-tensors pack-quantized",
}


@pytest.mark.parametrize(("target", "source"), OTHERS.items())
def test_other_quantised_layers_are_converted_like_experts(
    target: str, source: str, tmp_path: Path
) -> None:
    """Attention in the experts' own container, read back as experts of a second module."""
    kind = EXACT_NVFP4.get(source, KINDS[source])
    write(tmp_path / "in", kind, more=DENSE)
    edit(tmp_path / "in", quantization_config=without_exclusions(kind))
    spare = Experts("model.layers.0.self_attn", {})
    matrix = kind.draw(torch.Generator().manual_seed(7), 64, 96)
    spare.matrices[0, "up"] = matrix
    names = ("none", "k_proj", "none")
    stored = {
        name.replace("self_attn.0.", "self_attn."): tensor
        for name, tensor in tensors_of(kind, spare, names).items()
    }
    rewrite(tmp_path / "in", lambda state: state.update(stored))
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", container=target)
    assert report.verified, report.failures
    assert report.matrices == 2 * 3 * EXPERTS + 1
    plan_of = container_plan.QuantizedCheckpoint.open(
        tmp_path / "out", TARGETS[target].weight_format
    )
    unit = container_plan.Unit({"": "model.layers.0.self_attn.k_proj"}, 0)
    assert_exact(plan_of.matrices(unit)[""].dequantize(torch.float64), matrix.values, "k_proj")
    entry = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))["quantization_config"]
    assert "self_attn.q_proj" in json.dumps(entry)
    assert "self_attn.k_proj" not in json.dumps(entry)
    with pytest.raises(
        (ValueError, UnsupportedError), match=r"need experts alone quantised|exactly"
    ):
        convert_checkpoint(tmp_path / "in", tmp_path / "no", container="gpt-oss")


def without_exclusions(kind: Kind) -> dict[str, Any]:
    entry = dict(kind.config["quantization_config"])
    entry |= {key: ["lm_head"] for key in ("ignore", "exclude") if key in entry}
    return entry | ({"layer_quant_config": {}} if "layer_quant_config" in entry else {})


def test_a_layer_that_stays_dense_is_named(tmp_path: Path) -> None:
    """Dense experts, which the source's config excludes, are copied and excluded again."""
    write(tmp_path / "in", "compressed-tensors mxfp4-pack-quantized", layers=(0,), more=DENSE)
    entry = dict(KINDS["compressed-tensors mxfp4-pack-quantized"].config["quantization_config"])
    entry["ignore"] = [*entry["ignore"], "re:model.layers.1.*"]
    edit(tmp_path / "in", quantization_config=entry)
    name = "model.layers.1.mlp.experts.{}.{}_proj.weight"
    dense = {
        name.format(expert, part): torch.randn(2, 64).to(torch.bfloat16)
        for expert in range(EXPERTS)
        for part in ("gate", "up", "down")
    }
    rewrite(tmp_path / "in", lambda state: state.update(dense))
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", container="quark")
    assert report.verified, report.failures
    assert report.modules == 1
    state = state_of(tmp_path / "out")
    assert all(torch.equal(state[each], tensor) for each, tensor in dense.items())


def test_files_have_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in", "Quark OCP MX", more=DENSE)
    monkeypatch.setattr(container_plan, "MAX_COPY_BYTES", 20_000)
    target = "mxfp4-pack-quantized"
    assert convert_checkpoint(tmp_path / "in", tmp_path / "out", container=target).verified
    sizes = [
        sum(t.nbytes for t in load_file(file).values())
        for file in (tmp_path / "out").glob("*.safetensors")
    ]
    assert len(sizes) == 5  # two experts of 9,792 bytes in each of four, and what is copied
    assert max(sizes) <= 20_000


def test_a_destination_that_exists_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "in", "Quark OCP MX")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"out — need a destination that does not exist, got one"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", container="gpt-oss")
    with pytest.raises(ValueError, match=r"need a destination outside of the source"):
        convert_checkpoint(tmp_path / "in", tmp_path / "in" / "out", container="gpt-oss")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_interrupted_run_leaves_nothing_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in", "Quark OCP MX")
    seen = []

    def interrupt(done: int, total: int, what: str) -> None:
        seen.append(sorted(each.name for each in tmp_path.iterdir()))
        if done > total // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(
            tmp_path / "in", tmp_path / "out", container="gpt-oss", on_progress=interrupt
        )
    assert seen[-1] != ["in"]
    assert not any("out" in names for names in seen)
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


def test_side_files_are_copied_but_what_states_the_old_container(tmp_path: Path) -> None:
    write(tmp_path / "in", "ModelOpt MXFP8", text_config={"quantization_config": {"a": 1}, "b": 2})
    for name in ("tokenizer.json", "hf_quant_config.json", "mxpert_quantize.json"):
        (tmp_path / "in" / name).write_text("{}", encoding="utf-8")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", container="mxfp8-quantized")
    names = {each.name for each in (tmp_path / "out").iterdir()}
    assert "tokenizer.json" in names
    assert not names & {"hf_quant_config.json", "mxpert_quantize.json"}
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert config["text_config"] == {"b": 2}
    assert config["num_experts"] == EXPERTS


@pytest.mark.parametrize("name", SOURCES)
def test_compressed_tensors_reads_what_is_converted(name: str, tmp_path: Path) -> None:
    """The fixture holds what compressed-tensors decoded of the same checkpoint."""
    fixture = json.loads(Path(__file__).with_name("converted_experts.json").read_text("utf-8"))
    theirs = fixture[name]
    target, module = write_source(tmp_path / "in", name)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", container=target)
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert config["quantization_config"] == theirs["entry"]  # else make the fixture again
    for key, value in theirs["entry"].items():
        assert theirs["parsed"][key] == value or key == "config_groups"
    for matrix, made in theirs["decoded"].items():
        dtype = getattr(torch, made["dtype"].removeprefix("torch."))
        data = torch.frombuffer(bytearray.fromhex(made["bytes"]), dtype=dtype).double()
        wanted = module.matrices[1, matrix.rpartition(".")[2].removesuffix("_proj")].values
        # Codes and powers of two are exact in bfloat16; INT4's product is rounded once.
        assert_exact(data.reshape(wanted.shape), wanted.to(dtype).double(), matrix)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-MoE in bf16, one matrix per expert."""
    path = tmp_path_factory.mktemp("dense") / "qwen3_moe"
    build("qwen3_moe", dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("Quark OCP MX", ("gpt-oss", "mxfp4-pack-quantized", "modelopt-nvfp4")),
        ("ModelOpt NVFP4", ("quark",)),
        ("MiniMax MXFP8", ("modelopt-mxfp8", "mxfp8-quantized")),
        ("compressed-tensors pack-quantized", ("awq", "gptq")),
        ("AWQ", ("gptq", "pack-quantized")),
    ],
)
def test_a_model_of_transformers_computes_the_same(
    source: str, targets: tuple[str, ...], qwen: Path, tmp_path: Path
) -> None:
    store_experts(qwen, tmp_path / "in", source)
    wanted = logits(load(tmp_path / "in"))
    for target in targets:
        report = convert_checkpoint(tmp_path / "in", tmp_path / target, container=target)
        assert report.verified, report.failures
        assert_exact(logits(load(tmp_path / target)), wanted, target)
