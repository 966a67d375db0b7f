"""Quantising checkpoints: right place, right order, right numbers; resumable, never half done."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mxpert import GateUpOrder, MoEWeights, ScaleRule, UnsupportedError, __version__
from mxpert.formats import MXTensor, decode_scale, dequantize_blocks, quantize_blocks
from mxpert.integrations.checkpoints import safetensors_files
from mxpert.integrations.checkpoints.gpt_oss import load_transformers_oracle
from mxpert.integrations.checkpoints.load import load_expert_weights, load_gpt_oss_layers
from mxpert.integrations.checkpoints.plan import plan_quantization
from mxpert.integrations.checkpoints.quantize import MANIFEST_FILE, quantize_checkpoint
from mxpert.integrations.checkpoints.safetensors_files import CheckpointReader, sha256_of
from mxpert.integrations.checkpoints.verify import verify_quantized
from mxpert.integrations.module_paths import layer_number
from support.written_experts import state_of

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


def within_half_a_step(original: torch.Tensor, quantized: MXTensor) -> bool:
    """RCEIL never saturates, and e2m1's widest gap (4 to 6) is two scales: |error| <= one scale."""
    bound = decode_scale(quantized.scale).repeat_interleave(32, dim=-1)
    return bool(((original - dequantize_blocks(quantized)).abs() <= bound).all())


def matches(weights: MoEWeights, truth: dict[str, torch.Tensor]) -> bool:
    interleaved = torch.stack((truth["gate"], truth["up"]), dim=2).flatten(1, 2)
    return within_half_a_step(interleaved, weights.gate_up_proj) and within_half_a_step(
        truth["down"], weights.down_proj
    )


def files_of(directory: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in directory.iterdir()}


@pytest.mark.parametrize("naming", ["", "_stacked"], ids=["published", "stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_naming_round_trips(
    family: str, naming: str, sources: dict[str, Path], expert_truth: Any, tmp_path: Path
) -> None:
    source, out = sources[family + naming], tmp_path / "out"
    report = quantize_checkpoint(source, out)
    assert report.verified, report.failures
    moe_layers = [1] if family == "deepseek_v3" else [0, 1]
    loaded = dict(load_expert_weights(out))
    assert list(loaded) == [entry.module for entry in report.projections[::2]]
    assert [layer_number(name) for name in loaded] == moe_layers
    last = list(loaded.values())[-1]
    assert last.gate_up_order is GateUpOrder.INTERLEAVED
    truth = expert_truth(family)
    assert matches(last, truth)
    assert not matches(last, truth | {"gate": truth["up"], "up": truth["gate"]})  # can fail
    assert not matches(last, truth | {"down": truth["down"].roll(1, dims=0)})
    before, after = state_of(source), state_of(out)
    replaced = re.compile(r"\.experts\.(\d+\.|gate_up_proj$|down_proj$)")
    copied = {name for name in before if not replaced.search(name)}
    added = {name for name in after if name.endswith(("_blocks", "_scales"))}
    assert set(after) == copied | added
    assert all(torch.equal(before[name], after[name]) for name in copied)
    config = json.loads((out / "config.json").read_text("utf-8"))
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert config["quantization_config"]["mxpert"] == {
        "gate_up_order": "interleaved",
        "scale_rule": "rceil",
        "version": __version__,
    }
    original = json.loads((source / "config.json").read_text("utf-8"))
    # Transformers reads gpt-oss's MXFP4 by itself; the others' config names who reads them.
    added = {} if config["model_type"] == "gpt_oss" else {"experts_implementation": "mxpert"}
    assert {k: v for k, v in config.items() if k != "quantization_config"} == original | added
    assert (out / "tokenizer.json").read_text("utf-8") == "{}"
    assert len(report.projections) == 2 * len(moe_layers)


def test_transformers_reads_our_gpt_oss(sources: dict[str, Path], tmp_path: Path) -> None:
    quantize_checkpoint(sources["gpt_oss"], tmp_path / "out")
    model = load_transformers_oracle(tmp_path / "out")
    for layer in load_gpt_oss_layers(tmp_path / "out"):
        experts = model.model.layers[layer.layer].mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            ours = dequantize_blocks(getattr(layer.weights, name))
            assert torch.equal(ours, getattr(experts, name).transpose(1, 2))
        assert torch.equal(layer.weights.gate_up_bias, experts.gate_up_proj_bias)
        assert torch.equal(layer.weights.down_bias, experts.down_proj_bias)


@pytest.mark.parametrize("rule", ScaleRule, ids=lambda rule: rule.value)
def test_codes_and_sqnr_are_those_of_the_rule(
    rule: ScaleRule, sources: dict[str, Path], expert_truth: Any, tmp_path: Path
) -> None:
    report = quantize_checkpoint(sources["mixtral"], tmp_path / "out", scale_rule=rule)
    ((_, weights),) = load_expert_weights(tmp_path / "out", layers=[1])
    down = expert_truth("mixtral")["down"]
    wanted = quantize_blocks(down, "mxfp4", rule=rule)
    assert torch.equal(weights.down_proj.qdata, wanted.qdata)
    assert torch.equal(weights.down_proj.scale, wanted.scale)
    noise = (down.double() - dequantize_blocks(wanted, torch.float64)).square().sum()
    sqnr = 10 * torch.log10(down.double().square().sum() / noise)
    (entry,) = (p for p in report.projections if p.projection == "down_proj" and ".1." in p.module)
    # Float32 squares summed in float64: the relative error of either sum is below 2^-22.
    assert entry.sqnr_db == pytest.approx(float(sqnr), abs=1e-5)


def test_a_stacked_gate_up_bias_is_interleaved(
    sources: dict[str, Path], copy_of: Any, rewrite: Any, tmp_path: Path
) -> None:
    source, name = copy_of(sources["mixtral_stacked"]), "model.layers.1.mlp.experts.gate_up_proj"
    file = rewrite(source, name, lambda t: t)
    bias = torch.randn(4, 64, dtype=torch.bfloat16)
    save_file(load_file(file) | {f"{name}_bias": bias}, file)
    index = json.loads((source / "model.safetensors.index.json").read_text("utf-8"))
    index["weight_map"][f"{name}_bias"] = file.name
    (source / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    quantize_checkpoint(source, tmp_path / "out")
    ((path, weights),) = load_expert_weights(tmp_path / "out", layers=[1])
    assert f"{path}.gate_up_proj" == name
    assert torch.equal(weights.gate_up_bias[:, 0::2], bias[:, :32].float())
    assert torch.equal(weights.gate_up_bias[:, 1::2], bias[:, 32:].float())


KILLED_RUN = """
import os, signal, sys
from mxpert.integrations.checkpoints import safetensors_files as files
from mxpert.integrations.checkpoints.quantize import quantize_checkpoint
save, calls = files.save_file, []
def save_file(tensors, path, metadata):
    calls.append(path)
    if len(calls) == 3:  # leave half a shard and die without a goodbye
        save(tensors, path, metadata=metadata)
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    save(tensors, path, metadata=metadata)
files.save_file = save_file
quantize_checkpoint(sys.argv[1], sys.argv[2])
"""


def test_a_killed_run_continues_and_ends_the_same(sources: dict[str, Path], tmp_path: Path) -> None:
    source, out = sources["qwen3_moe"], tmp_path / "out"
    run = subprocess.run(
        [sys.executable, "-c", KILLED_RUN, str(source), str(out)], check=False, capture_output=True
    )
    assert run.returncode == -9, run.stderr
    partial = [path.name for path in out.iterdir() if path.name.endswith(".partial")]
    assert len(partial) == 1
    finished = sorted(path for path in out.glob("model-*.safetensors"))
    assert len(finished) == 2
    for file in finished:
        with safe_open(file, "pt") as content:  # complete
            assert len(content.keys()) == 4
    assert not (out / "config.json").exists()
    report = quantize_checkpoint(source, out)
    assert report.verified
    assert report.shards_resumed == 2
    quantize_checkpoint(source, tmp_path / "clean")
    assert files_of(out) == files_of(tmp_path / "clean")
    again = quantize_checkpoint(source, out)
    assert (again.shards_written, again.shards_resumed) == (0, len(list(out.glob("model-*-of*"))))
    assert again.projections == report.projections


def test_a_failed_write_leaves_no_trace_and_a_damaged_shard_is_redone(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = sources["mixtral"], tmp_path / "out"

    def fail(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(safetensors_files, "save_file", fail)
        with pytest.raises(OSError, match="No space left"):
            quantize_checkpoint(source, out)
    assert [path.name for path in out.iterdir()] == [MANIFEST_FILE]
    quantize_checkpoint(source, out)
    damaged = out / sorted(path.name for path in out.glob("*.safetensors"))[1]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    report = quantize_checkpoint(source, out)
    assert report.verified
    assert report.shards_written == 1


@pytest.mark.parametrize("what", ["a code", "a scale", "a copied tensor"])
def test_verification_finds(
    what: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suffix = {
        "a code": "down_proj_blocks",
        "a scale": "gate_up_proj_scales",
        "a copied tensor": "self_attn.q_proj.weight",
    }[what]

    def save_damaged(tensors: dict[str, torch.Tensor], path: Path, metadata: Any) -> None:
        for name, tensor in tensors.items():
            if name.endswith(suffix):
                tensor = tensor.clone()
                tensor.view(torch.uint8).reshape(-1)[-1] ^= 1
                tensors = tensors | {name: tensor}
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(safetensors_files, "save_file", save_damaged)
    report = quantize_checkpoint(sources["mixtral"], tmp_path / "out")
    assert len(report.failures) == 2  # in both layers
    assert all(suffix in failure and "model-" in failure for failure in report.failures)


def test_verification_finds_a_byte_that_changed_on_disk(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    source, out = sources["mixtral"], tmp_path / "out"
    quantize_checkpoint(source, out)
    plan = plan_quantization(source, out, scale_rule=ScaleRule.RCEIL, device="cpu")
    manifest = json.loads((out / MANIFEST_FILE).read_text("utf-8"))
    assert verify_quantized(plan, manifest) == []
    file = out / plan.shards[0].name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    (failure,) = verify_quantized(plan, manifest)
    assert failure.startswith(f"{file}: checksum differs")


def test_a_destination_with_other_content_is_refused(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    source, out = sources["mixtral"], tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="need an absent or empty directory, got 1 entries"):
        quantize_checkpoint(source, out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    with pytest.raises(ValueError, match="need a directory, got a file"):
        quantize_checkpoint(source, out / "notes.txt")
    with pytest.raises(ValueError, match="need a destination outside of the source"):
        quantize_checkpoint(source, source / "mxfp4")


def test_another_runs_output_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(sources["mixtral"], out)
    before = files_of(out)
    with pytest.raises(ValueError, match=r"got another run's \(source differ\)"):
        quantize_checkpoint(sources["qwen3_moe"], out)
    with pytest.raises(ValueError, match=r"got another run's \(scale_rule differ\)"):
        quantize_checkpoint(sources["mixtral"], out, scale_rule=ScaleRule.FLOOR)
    assert files_of(out) == before


GATE = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
BAD_TENSORS: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "missing": ("mixtral", GATE, lambda t: None, r"safetensors: \S+2.w1.weight — need the tensor"),
    "mis-shaped": (
        "mixtral",
        GATE,
        lambda t: t[:-1].contiguous(),
        r"2.w1.weight.shape — need \[32, 64\], got \[31, 64\]",
    ),
    "quantised": (
        "mixtral",
        GATE,
        lambda t: t.to(torch.float8_e4m3fn),
        "2.w1.weight.dtype — need BF16 or F16 or F32, got F8_E4M3",
    ),
    "not finite": (
        "mixtral",
        GATE,
        lambda t: t.fill_(float("nan")),
        "expert 2 gate_up_proj — need finite weights, got NaN or infinity",
    ),
    "stacked mis-shaped": (
        "mixtral_stacked",
        "model.layers.1.mlp.experts.down_proj",
        lambda t: t[:, :-1].contiguous(),
        r"gate_up_proj.shape — need \[E, 2F",
    ),
    "stacked 2-D": (
        "gpt_oss",
        "model.layers.0.mlp.experts.down_proj",
        lambda t: t[0].clone(),
        "down_proj.shape — need 3 dimensions",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_bad_source_tensor_is_named(
    case: str, sources: dict[str, Path], copy_of: Any, rewrite: Any, tmp_path: Path
) -> None:
    family, name, change, expected = BAD_TENSORS[case]
    source = copy_of(sources[family])
    rewrite(source, name, change)
    with pytest.raises(ValueError, match=f"^quantize_checkpoint: .*{expected}"):
        quantize_checkpoint(source, tmp_path / "out")
    # Bad headers are found before anything is written; bad values leave a run that can continue.
    assert (tmp_path / "out").exists() == (case == "not finite")
    assert not (tmp_path / "out" / "config.json").exists()


BAD_CONFIGS: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "quantised already": (
        "mixtral",
        {"quantization_config": {"quant_method": "fp8"}},
        ValueError,
        "need an unquantised .* got fp8; dequantise it to bf16 first",
    ),
    "more experts": (
        "mixtral",
        {"num_local_experts": 5},
        ValueError,
        "experts.4 — need a gate projection for each of 5 experts, got none",
    ),
    "fewer experts": (
        "qwen3_moe",
        {"num_local_experts": 3},
        ValueError,
        "need 3 matrices for each of 3 experts, got 12",
    ),
    "other width": ("mixtral", {"hidden_size": 96}, ValueError, "need hidden_size 96"),
    "stacked, unknown model": (
        "mixtral_stacked",
        {"model_type": "novel"},
        UnsupportedError,
        "model_type — need one of .* got novel; save it with one matrix",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_bad_source_config_is_named(
    case: str, sources: dict[str, Path], copy_of: Any, tmp_path: Path
) -> None:
    family, change, error, expected = BAD_CONFIGS[case]
    source = copy_of(sources[family])
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | change), encoding="utf-8")
    with pytest.raises(error, match=f"^quantize_checkpoint: .*{expected}"):
        quantize_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_bad_sources_are_refused(tmp_path: Path, sources: dict[str, Path]) -> None:
    dense = tmp_path / "dense"
    dense.mkdir()
    save_file(
        {"model.layers.0.mlp.down_proj.weight": torch.zeros(32, 32)}, dense / "model.safetensors"
    )
    (dense / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"need MoE experts .* this one is dense"):
        quantize_checkpoint(dense, tmp_path / "out")
    save_file(
        {
            f"model.layers.0.mlp.experts.0.{part}_proj.weight": torch.zeros(48, 48)
            for part in ("gate", "up", "down")
        },
        dense / "model.safetensors",
    )
    with pytest.raises(ValueError, match="need hidden_size a multiple of 32"):
        quantize_checkpoint(dense, tmp_path / "out")
    save_file(
        {"model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv": torch.zeros(1)},
        dense / "model.safetensors",
    )
    with pytest.raises(UnsupportedError, match="weight_scale_inv — need experts made of gate"):
        quantize_checkpoint(dense, tmp_path / "out")
    with pytest.raises(UnsupportedError, match="device — need a device of this machine"):
        quantize_checkpoint(sources["mixtral"], tmp_path / "out", device="nonsense")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weight_format", ["mxfp4", "mxfp8", "int4_g32", "nvfp4"])
def test_memory_stays_at_one_expert_of_the_source(
    weight_format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, H, F, E = tmp_path / "source", 128, 96, 16
    source.mkdir()
    tensors = {
        f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight": torch.randn(
            *((H, F) if part == "down" else (F, H))
        ).to(torch.bfloat16)
        for layer in range(2)
        for e in range(E)
        for part in ("gate", "up", "down")
    }
    tensors |= {f"model.layers.{i}.other.weight": torch.randn(64, 256) for i in range(32)}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "qwen3_moe"}', encoding="utf-8")
    read, live, peak = CheckpointReader.read, Counter(), Counter()

    def tracked(self: CheckpointReader, name: str) -> torch.Tensor:
        tensor, kind = read(self, name), "expert" if ".experts." in name else "copy"
        live[kind] += tensor.nbytes
        peak[kind] = max(peak[kind], live[kind])
        weakref.finalize(tensor, live.subtract, {kind: tensor.nbytes})
        return tensor

    monkeypatch.setattr(CheckpointReader, "read", tracked)
    assert quantize_checkpoint(source, tmp_path / "out", weight_format=weight_format).verified
    assert 0 < peak["expert"] <= 2 * (2 * H * F)  # gate and up of one expert, two bytes each
    # A shard of copies has at most as many bytes as the larger projection has elements.
    assert 0 < peak["copy"] <= E * 2 * F * H
    assert sum(t.nbytes for name, t in tensors.items() if "other" in name) > 4 * E * 2 * F * H
