"""Experts in MXFP8, NVFP4 and INT4 as compressed-tensors stores them: right bits, right names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mxpert import GateUpOrder, MoEWeights, quantize_weights
from mxpert.formats.weight_tensor import WeightTensor
from mxpert.integrations.checkpoints import expert_sources, expert_writers, plan, safetensors_files
from mxpert.integrations.checkpoints.load import load_expert_weights
from mxpert.integrations.checkpoints.quantize import quantize_checkpoint
from support.written_experts import (
    FORMATS,
    SUFFIXES,
    check_near,
    codes_of,
    decoded,
    state_of,
    steps_of,
    write_dense,
)

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)
EXPERTS = "model.layers.0.mlp.experts"
CONTAINERS = {
    "mxfp8": "compressed-tensors mxfp8-quantized",
    "int4_g32": "compressed-tensors pack-quantized",
    "nvfp4": "compressed-tensors nvfp4-pack-quantized",
}


def suffixes(format: str) -> tuple[str, ...]:
    return SUFFIXES["int4" if format.startswith("int4") else format]


def check_dense_layer(state: dict[str, Any], source: dict[str, Any], format: str) -> None:
    """Check the experts that `write_dense` made."""
    for name, tensor in source.items():
        if ".experts." in name:
            check_near(state, name.removesuffix(".weight"), format, tensor)


def quantized(truth: dict[str, torch.Tensor], format: Any) -> MoEWeights:
    """`quantize_weights` of the last layer's dense experts, in the checkpoints' dtype."""
    gate_up = torch.cat((truth["gate"], truth["up"]), dim=1).to(torch.bfloat16)
    down = truth["down"].to(torch.bfloat16)
    return quantize_weights(gate_up, down, gate_up_order="concatenated", weight_format=format)


@EVERY_FORMAT
@pytest.mark.parametrize("naming", ["", "_stacked"], ids=["published", "stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_naming_becomes_matrices_with_the_bits_of_quantize_weights(
    family: str,
    naming: str,
    format: Any,
    sources: dict[str, Path],
    expert_truth: Any,
    tmp_path: Path,
) -> None:
    source, out = sources[family + naming], tmp_path / "out"
    report = quantize_checkpoint(source, out, weight_format=format)
    assert report.verified, report.failures
    before, state, truth = state_of(source), state_of(out), expert_truth(family)
    named = MIXTRAL if family == "mixtral" and not naming else {}
    weights = quantized(truth, format)
    module = report.projections[-1].module
    rows = truth["gate"].shape[1]
    for expert in range(weights.num_experts):
        for part, whole in (
            ("gate", "gate_up_proj"),
            ("up", "gate_up_proj"),
            ("down", "down_proj"),
        ):
            name = f"{module}.{expert}.{named.get(part, f'{part}_proj')}"
            check_near(state, name, format, truth[part][expert])
            wanted: Any = getattr(weights, whole)[expert]
            wanted = {"gate": wanted[:rows], "up": wanted[rows:], "down": wanted}[part]
            check_bits(state, name, format, wanted)
    replaced = re.compile(r"\.experts\.(\d+\.|gate_up_proj|down_proj)")
    copied = {name for name in before if not replaced.search(name)}
    assert all(torch.equal(before[name], state[name]) for name in copied)
    parts = [f"{expert}.{named.get(part, f'{part}_proj')}" for expert in range(4) for part in truth]
    added = [*suffixes(format), *(["bias"] if family == "gpt_oss" else [])]
    modules = {entry.module for entry in report.projections}
    assert set(state) == copied | {
        f"{path}.{part}.{suffix}" for path in modules for part in parts for suffix in added
    }


@EVERY_FORMAT
@pytest.mark.parametrize("naming", ["", "_stacked"], ids=["published", "stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_loads_with_the_same_bits(
    family: str,
    naming: str,
    format: Any,
    sources: dict[str, Path],
    expert_truth: Any,
    tmp_path: Path,
) -> None:
    quantize_checkpoint(sources[family + naming], tmp_path / "out", weight_format=format)
    *_, (_, loaded) = load_expert_weights(tmp_path / "out")
    wanted = quantized(expert_truth(family), format)
    assert loaded.gate_up_order is GateUpOrder.CONCATENATED
    for projection in ("gate_up_proj", "down_proj"):
        found, made = getattr(loaded, projection), getattr(wanted, projection)
        assert found.format == made.format
        assert torch.equal(found.qdata, made.qdata)
        assert torch.equal(found.scale, made.scale)
        if format == "nvfp4":  # 1 / (1 / g): two roundings to float32
            error = (found.row_scale.double() / made.row_scale.double() - 1).abs()
            assert float(error.max()) <= 2.0**-23 * (1 + 2.0**-24)
    biased = family == "gpt_oss"
    assert (loaded.gate_up_bias is not None, loaded.down_bias is not None) == (biased, biased)


def check_bits(state: dict[str, Any], name: str, format: str, wanted: Any) -> None:
    """Check codes and scales of a matrix bit by bit; the reciprocal may round once more."""
    packed, scale = wanted.qdata, state[f"{name}.weight_scale"]
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    codes = packed if format == "mxfp8" else codes
    assert torch.equal(codes_of(state, name, format), codes.to(torch.int64))
    assert torch.equal(scale.view(torch.uint8), wanted.scale.view(torch.uint8))
    if format == "nvfp4":  # g was rounded to 1/d: |d · g - 1| <= 2^-24
        divisor = state[f"{name}.weight_global_scale"].double()
        assert abs(float(divisor * wanted.row_scale[0].double()) - 1) <= 2.0**-24


@EVERY_FORMAT
def test_biases_are_split_like_their_rows(
    format: Any, sources: dict[str, Path], tmp_path: Path
) -> None:
    quantize_checkpoint(sources["gpt_oss"], tmp_path / "out", weight_format=format)
    before, state = state_of(sources["gpt_oss"]), state_of(tmp_path / "out")
    path = "model.layers.1.mlp.experts"
    for expert in range(4):
        gate_up = before[f"{path}.gate_up_proj_bias"][expert]
        assert torch.equal(state[f"{path}.{expert}.gate_proj.bias"], gate_up[0::2])
        assert torch.equal(state[f"{path}.{expert}.up_proj.bias"], gate_up[1::2])
        down = before[f"{path}.down_proj_bias"][expert]
        assert torch.equal(state[f"{path}.{expert}.down_proj.bias"], down)


@EVERY_FORMAT
def test_compressed_tensors_reads_what_is_written(format: Any, tmp_path: Path) -> None:
    """The fixture holds what compressed-tensors made of the same checkpoint."""
    fixture = json.loads(Path(__file__).with_name("written_experts.json").read_text("utf-8"))
    theirs = fixture[format]
    source = write_dense(tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "out", weight_format=format)
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    entry, parsed = config["quantization_config"], theirs["parsed"]
    assert entry == theirs["entry"]  # else make the fixture again
    assert entry == {key: parsed[key] for key in entry}  # and nothing was dropped or changed
    assert theirs["quantized"] == sorted(
        name.removesuffix(".weight") for name in source if ".experts." in name
    )
    assert "experts_implementation" not in config
    state = state_of(tmp_path / "out")
    for part, made in theirs["decoded"].items():
        assert made["dtype"] == "torch.bfloat16"
        data = torch.frombuffer(bytearray.fromhex(made["bytes"]), dtype=torch.bfloat16)
        ours = decoded(state, f"{EXPERTS}.1.{part}", format)
        data = data.reshape(ours.shape)
        if format == "nvfp4":  # scale / divisor and the product are rounded, each to bfloat16
            error = (data.double() - ours).abs()
            assert bool((error <= ours.abs() * (2.0**-8 * (1 + 2.0**-9))).all())
        else:  # one product, rounded once
            assert torch.equal(data, ours.to(torch.bfloat16))


@EVERY_FORMAT
def test_how_many_rows_are_quantised_at_a_time_changes_no_bit(
    format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dense(tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "whole", weight_format=format)
    monkeypatch.setattr(plan, "CHUNK_ELEMENTS", 96)  # three rows; amax is in one of them
    quantize_checkpoint(tmp_path / "dense", tmp_path / "parts", weight_format=format)
    whole, parts = state_of(tmp_path / "whole"), state_of(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor.view(torch.uint8), parts[name].view(torch.uint8)), name


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_int4_has_the_groups_and_the_scales_that_are_asked_for(
    group: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    source = write_dense(tmp_path / "dense", hidden=256, intermediate=128, dtype=dtype)
    format: Any = f"int4_g{group}"
    report = quantize_checkpoint(tmp_path / "dense", tmp_path / "out", weight_format=format)
    assert report.verified
    assert report.weight_format == format
    state = state_of(tmp_path / "out")
    check_dense_layer(state, source, format)
    scale = state[f"{EXPERTS}.0.gate_proj.weight_scale"]
    assert (scale.dtype, scale.shape) == (dtype, (128, 256 // group))
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    (entry,) = config["quantization_config"]["config_groups"].values()
    assert entry["weights"]["group_size"] == group


def test_an_nvfp4_expert_has_one_divisor_for_gate_and_up(tmp_path: Path) -> None:
    source = write_dense(tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "out", weight_format="nvfp4")
    state = state_of(tmp_path / "out")
    for expert in range(2):
        gate, up, down = (f"{EXPERTS}.{expert}.{part}_proj" for part in ("gate", "up", "down"))
        pair = torch.stack([source[f"{part}.weight"] for part in (gate, up)])
        for parts, dense in (((gate, up), pair), ((down,), source[f"{down}.weight"])):
            factor = dense.float().abs().max() / (448 * 6)
            for part in parts:
                assert torch.equal(state[f"{part}.weight_global_scale"], factor.reciprocal()[None])


@EVERY_FORMAT
def test_experts_without_a_gate(
    format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_sources, "WITHOUT_GATE", ("a model without",))
    source = write_dense(tmp_path / "dense")
    kept = {name: tensor for name, tensor in source.items() if "gate_proj" not in name}
    save_file(kept, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "dense" / "config.json"
    config = json.loads(file.read_text("utf-8")) | {"model_type": "a model without"}
    file.write_text(json.dumps(config), encoding="utf-8")
    report = quantize_checkpoint(tmp_path / "dense", tmp_path / "out", weight_format=format)
    assert [entry.projection for entry in report.projections] == ["up_proj", "down_proj"]
    state = state_of(tmp_path / "out")
    check_dense_layer(state, kept, format)
    assert not [name for name in state if "gate_proj" in name]


@EVERY_FORMAT
def test_zeros_stay_zeros(format: Any, tmp_path: Path) -> None:
    source = write_dense(tmp_path / "dense")
    name = f"{EXPERTS}.0.down_proj"
    source[f"{name}.weight"] = torch.zeros_like(source[f"{name}.weight"])
    save_file(source, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    report = quantize_checkpoint(tmp_path / "dense", tmp_path / "out", weight_format=format)
    assert report.verified
    state = state_of(tmp_path / "out")
    assert torch.equal(decoded(state, name, format), torch.zeros(32, 32, dtype=torch.float64))
    assert bool(steps_of(state, name, format).isfinite().all())


def test_the_report_counts_bytes_and_noise_of_what_is_written(tmp_path: Path) -> None:
    source = write_dense(tmp_path / "dense")
    for format in FORMATS:
        out: Any = tmp_path / format
        report = quantize_checkpoint(tmp_path / "dense", out, weight_format=format)
        state = state_of(out)
        content = report.as_json()
        assert content["container"] == CONTAINERS[format]
        assert content["weight_format"] == {"mxfp8": "mxfp8_e4m3"}.get(format, format)
        assert content["gate_up_order"] is None
        assert content["scale_rule"] == ("rceil" if format == "mxfp8" else None)
        down = [name for name in state if "down_proj" in name]
        entry = report.projections[1]
        assert entry.bytes == sum(state[name].nbytes for name in down)
        assert report.bytes == sum(tensor.nbytes for tensor in state.values())
        signal = noise = 0.0
        for expert in range(2):
            name = f"{EXPERTS}.{expert}.down_proj"
            dense = source[f"{name}.weight"].double()
            signal += float(dense.square().sum())
            noise += float((decoded(state, name, format) - dense).square().sum())
        # Differences and squares in float32 err by 2^-23 of a weight, next to errors of 2^-6 of it
        # and more: below 2^-15 of the sum.
        assert entry.signal == pytest.approx(signal, rel=2.0**-20)
        assert entry.noise == pytest.approx(noise, rel=2.0**-15)


def swapped_nibbles(op: str, name: str, weight: WeightTensor) -> WeightTensor:
    return replace(weight, qdata=weight.qdata >> 4 | weight.qdata << 4)


def without_eight(op: str, name: str, weight: WeightTensor) -> WeightTensor:
    return replace(weight, qdata=weight.qdata ^ 0x88)


def multiplied(op: str, name: str, weight: WeightTensor) -> WeightTensor:
    assert weight.row_scale is not None
    return replace(weight, row_scale=weight.row_scale.reciprocal())


@pytest.mark.parametrize(
    ("format", "fault"),
    [
        ("int4_g32", swapped_nibbles),
        ("nvfp4", swapped_nibbles),
        ("int4_g32", without_eight),
        ("nvfp4", multiplied),
    ],
)
def test_a_planted_fault_of_packing_is_seen(
    format: Any, fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_dense(tmp_path / "dense")
    pack = expert_writers.CompressedTensorsWriter._weight
    monkeypatch.setattr(
        expert_writers.CompressedTensorsWriter,
        "_weight",
        lambda self, op, name, weight: pack(self, op, name, fault(op, name, weight)),
    )
    quantize_checkpoint(tmp_path / "dense", tmp_path / "out", weight_format=format)
    with pytest.raises(AssertionError, match="is not what it was made of"):
        check_dense_layer(state_of(tmp_path / "out"), source, format)


@EVERY_FORMAT
def test_gate_and_up_swapped_are_seen(
    format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_dense(tmp_path / "dense")
    monkeypatch.setitem(expert_writers._PARTS, "gate_up_proj", ("up", "gate"))
    quantize_checkpoint(tmp_path / "dense", tmp_path / "out", weight_format=format)
    with pytest.raises(AssertionError, match="is not what it was made of"):
        check_dense_layer(state_of(tmp_path / "out"), source, format)


@pytest.mark.parametrize(
    ("format", "suffix"), [(format, suffix) for format in FORMATS for suffix in suffixes(format)]
)
def test_verification_finds_a_damaged_tensor(
    format: Any, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dense(tmp_path / "dense")
    damaged = f"{EXPERTS}.1.up_proj.{suffix}"

    def save_damaged(tensors: dict[str, torch.Tensor], path: Path, metadata: Any) -> None:
        if damaged in tensors:
            tensor = tensors[damaged].clone()
            tensor.view(torch.uint8).reshape(-1)[-1] ^= 1
            tensors = tensors | {damaged: tensor}
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(safetensors_files, "save_file", save_damaged)
    report = quantize_checkpoint(tmp_path / "dense", tmp_path / "out", weight_format=format)
    (failure,) = report.failures
    assert damaged in failure


def test_an_interrupted_run_continues_in_its_own_format_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dense(tmp_path / "dense")
    calls = []

    def fail_second(tensors: dict[str, torch.Tensor], path: Path, metadata: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        save_file(tensors, path, metadata=metadata)

    with monkeypatch.context() as patched:
        patched.setattr(safetensors_files, "save_file", fail_second)
        with pytest.raises(OSError, match="No space left"):
            quantize_checkpoint(tmp_path / "dense", tmp_path / "out", weight_format="nvfp4")
    assert not (tmp_path / "out" / "config.json").exists()
    with pytest.raises(ValueError, match="container, weight_format differ"):
        quantize_checkpoint(tmp_path / "dense", tmp_path / "out", weight_format="int4_g32")
    report = quantize_checkpoint(tmp_path / "dense", tmp_path / "out", weight_format="nvfp4")
    assert report.verified
    assert report.shards_resumed == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_format": "int4"}, "weight_format — need one of"),
        ({"weight_format": "int4_g64"}, r"hidden_size — need a multiple of 64.*smaller group size"),
        ({"weight_format": "nvfp4", "scale_rule": "even"}, "scale_rule — need none for nvfp4"),
        ({"weight_format": "int4_g32", "scale_rule": "rceil"}, "scale_rule — need none for int4"),
    ],
)
def test_what_a_format_does_not_have_is_refused(
    arguments: Any, message: str, tmp_path: Path
) -> None:
    write_dense(tmp_path / "dense")
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(tmp_path / "dense", tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_weights_that_nvfp4_cannot_scale_are_refused(tmp_path: Path) -> None:
    source = write_dense(tmp_path / "dense")
    source[f"{EXPERTS}.1.down_proj.weight"] *= 1e-36
    save_file(source, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    message = r"experts\.1\.down_proj — need weights of 8e-36 or more.*write int4 or mxfp8"
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(tmp_path / "dense", tmp_path / "out", weight_format="nvfp4")
    report = quantize_checkpoint(tmp_path / "dense", tmp_path / "other", weight_format="mxfp8")
    assert report.verified


@EVERY_FORMAT
def test_weights_that_are_not_finite_are_refused(format: Any, tmp_path: Path) -> None:
    source = write_dense(tmp_path / "dense")
    source[f"{EXPERTS}.1.up_proj.weight"][3, 5] = float("inf")
    save_file(source, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="expert 1 gate_up_proj — need finite weights"):
        quantize_checkpoint(tmp_path / "dense", tmp_path / "out", weight_format=format)


@pytest.mark.parametrize("rule", ["floor", "even"])
def test_mxfp8_takes_a_scale_rule(rule: Any, tmp_path: Path) -> None:
    source = write_dense(tmp_path / "dense")
    quantize_checkpoint(
        tmp_path / "dense", tmp_path / "out", weight_format="mxfp8", scale_rule=rule
    )
    name = f"{EXPERTS}.1.down_proj"
    scale = state_of(tmp_path / "out")[f"{name}.weight_scale"]
    amax = source[f"{name}.weight"].double().abs().amax(dim=1)  # one block a row
    wanted = torch.floor(torch.log2(amax)) - 8
    if rule == "even":
        mantissa = amax / torch.exp2(torch.floor(torch.log2(amax)))
        wanted += mantissa >= 1.9375  # rounds to 2 with 3 bits
    assert torch.equal(scale[:, 0].double() - 127, wanted)
