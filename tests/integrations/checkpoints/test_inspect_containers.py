"""`mxpert inspect` of every container: what it is, what it holds, and how much of it is MXFP4."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from mxpert.cli.main import app
from mxpert.errors import UnsupportedError
from mxpert.integrations.checkpoints.inspect import inspect_checkpoint
from mxpert.integrations.checkpoints.load import load_expert_weights
from support.expert_containers import (
    EXACT_NVFP4,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    KINDS,
    MX_KINDS,
    pack_quantized,
    rewrite,
    write,
)

MODELOPT = "ModelOpt NVFP4"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", MX_KINDS)
def test_every_container_is_inspected(name: str, tmp_path: Path) -> None:
    modules = write(tmp_path, name)
    entries = inspect_checkpoint(tmp_path)
    assert [(entry.module, entry.projection) for entry in entries] == [
        (module.path, projection)
        for module in modules
        for projection in ("gate_up_proj", "down_proj")
    ]
    for entry in entries:
        (module,) = [each for each in modules if each.path == entry.module]
        parts = ("down",) if entry.projection == "down_proj" else ("gate", "up")
        sizes = (HIDDEN, INTERMEDIATE) if parts == ("down",) else (2 * INTERMEDIATE, HIDDEN)
        assert entry.shape == (EXPERTS, *sizes)
        exponents = torch.cat(
            [
                module.matrices[expert, part].exponents.flatten()
                for expert in range(EXPERTS)
                for part in parts
            ]
        )
        values, counts = exponents.unique(return_counts=True)
        wanted = dict(zip(values.tolist(), counts.tolist(), strict=True))
        assert entry.scale_histogram == wanted
        assert entry.exact_fold
        assert entry.container == name
        assert entry.gate_up_order == "concatenated"
        is_cast = "nvfp4" in name.lower()
        assert entry.weight_format == ("NVFP4, cast from MXFP4" if is_cast else "MXFP4")
        assert entry.experts_cast == (EXPERTS if is_cast else None)


def test_published_tensors_name_their_container(demo: Path) -> None:
    entry = inspect_checkpoint(demo)[0]
    assert (entry.container, entry.weight_format) == ("gpt-oss", "MXFP4")
    assert (entry.gate_up_order, entry.experts_cast) == ("interleaved", None)


def make_exact(path: Path, module: str, expert: int, part: str = "up_proj") -> None:
    """Give one scale of an expert's projection another significand."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{module}.{expert}.{part}.weight_scale"].view(torch.uint8)[3, 1] += 1

    rewrite(path, change)


def test_experts_that_are_no_casts_are_counted(tmp_path: Path) -> None:
    modules = write(tmp_path, MODELOPT)
    make_exact(tmp_path, modules[0].path, 2)
    first, second, *rest = inspect_checkpoint(tmp_path)
    assert (first.experts_cast, second.experts_cast) == (EXPERTS - 1, EXPERTS)
    for entry in (first, second):  # a module has one format
        assert (entry.weight_format, entry.exact_fold) == ("NVFP4", False)
        assert (entry.blocks_outside, entry.rows_outside, entry.widest_span) == (None, None, None)
        assert entry.blocks * 16 == math.prod(entry.shape)
        assert sum(entry.scale_histogram.values()) + entry.zero_blocks == entry.blocks
    for entry in rest:
        assert entry.experts_cast == EXPERTS
        assert (entry.weight_format, entry.exact_fold) == ("NVFP4, cast from MXFP4", True)
    shown = run("inspect", tmp_path)
    assert shown.exit_code == 0, shown.output
    assert "ModelOpt NVFP4: NVFP4 and NVFP4, cast from MXFP4, gate and up" in shown.stdout
    assert "casts" in shown.stdout
    row = next(line for line in shown.stdout.splitlines() if "0 gate_up" in line)
    assert "3/4" in row
    assert "no MXFP4" in row
    row = next(line for line in shown.stdout.splitlines() if "0 down" in line)
    assert "4/4" in row
    assert "no MXFP4" in row
    assert re.search(r"\bNVFP4\b", row)
    row = next(line for line in shown.stdout.splitlines() if "1 down" in line)
    assert re.search(r"\bMXFP4\b", row)
    assert "no MXFP4" not in row


def test_a_down_projection_that_is_no_cast_makes_its_module_exact(tmp_path: Path) -> None:
    modules = write(tmp_path, MODELOPT)
    make_exact(tmp_path, modules[0].path, 1, "down_proj")
    entries = inspect_checkpoint(tmp_path)
    assert [entry.experts_cast for entry in entries] == [EXPERTS, EXPERTS - 1, EXPERTS, EXPERTS]
    formats = [weights.weight_format for _, weights in load_expert_weights(tmp_path)]
    assert formats == ["nvfp4", "mxfp4"]
    cast = "NVFP4, cast from MXFP4"
    assert [entry.weight_format for entry in entries] == ["NVFP4", "NVFP4", cast, cast]


OTHER = {name: kind for name, kind in KINDS.items() if name not in MX_KINDS}
OTHER |= {f"exact {name}": kind for name, kind in EXACT_NVFP4.items()}
OTHER |= {"asymmetric": pack_quantized(32, has_zeros=True)}
SHOWN = {"mxfp8_e4m3": "MXFP8", "nvfp4": "NVFP4", "int4_g32": "INT4, groups of 32"}


@pytest.mark.parametrize("name", OTHER)
def test_other_formats_are_inspected(name: str, tmp_path: Path) -> None:
    """Exponents by math.frexp of each scale; blocks of zeros are those whose values are."""
    kind = OTHER[name]
    (module,) = write(tmp_path, kind, layers=[0])
    gate_up, down = inspect_checkpoint(tmp_path)
    ((_, weights),) = load_expert_weights(tmp_path)
    for entry, parts in ((gate_up, ("gate", "up")), (down, ("down",))):
        matrices = [module.matrices[expert, part] for expert in range(EXPERTS) for part in parts]
        counted: Counter[int] = Counter()
        zero = 0
        for matrix in matrices:
            values = matrix.values.unflatten(1, (-1, kind.group)).abs().amax(-1)
            if kind.format == "mxfp8_e4m3":
                scales = torch.exp2(matrix.exponents.double())
            else:
                scales = matrix.scale.double() * getattr(matrix, "rows_factor", torch.ones(()))
            for value, scale in zip(values.flatten(), scales.flatten(), strict=True):
                zero += value == 0
                counted[math.frexp(scale)[1] - 1] += int(value != 0)
        assert entry.scale_histogram == {key: count for key, count in counted.items() if count}
        assert zero >= len(matrices)
        assert (entry.zero_blocks, entry.nan_scales) == (zero, 0)
        assert entry.weight_format == SHOWN[kind.format]
        assert entry.experts_cast == (0 if kind.format == "nvfp4" else None)
        assert (entry.exact_fold, entry.widest_span) == (False, None)
    assert gate_up.bytes == weights.gate_up_proj.nbytes
    assert down.bytes == weights.down_proj.nbytes
    shown = run("inspect", tmp_path)
    assert shown.exit_code == 0, shown.output
    assert f"{SHOWN[kind.format]}, gate and up concatenated" in shown.stdout
    done = json.loads(run("inspect", tmp_path, "--json", "-").stdout)
    assert {each["weight_format"] for each in done["projections"]} == {SHOWN[kind.format]}
    assert [each["widest_span"] for each in done["projections"]] == [None, None]


def test_sqnr_of_another_format_to_its_source(tmp_path: Path) -> None:
    (module,) = write(tmp_path / "int4", "GPTQ", layers=[0])
    source = tmp_path / "dense"
    source.mkdir()
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    tensors = {
        f"{module.path}.{expert}.{names[part]}.weight": matrix.values.float()
        for (expert, part), matrix in module.matrices.items()
    }
    tensors[f"{module.path}.0.down_proj.weight"] *= 2
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "toy"}), encoding="utf-8")
    gate_up, down = inspect_checkpoint(tmp_path / "int4", source=source)
    assert gate_up.relative_l2 == 0.0  # float32 holds fp16 scales times 5 bits
    assert down.relative_l2 is not None
    assert 0.25 < down.relative_l2 < 0.5  # half of the values of one of four experts is missing


def test_json_has_container_format_order_and_casts(tmp_path: Path) -> None:
    write(tmp_path, MODELOPT, layers=[0])
    done = run("inspect", tmp_path, "--json", "-")
    assert done.exit_code == 0, done.output
    for entry in json.loads(done.stdout)["projections"]:
        assert entry["container"] == MODELOPT
        assert entry["weight_format"] == "NVFP4, cast from MXFP4"
        assert entry["gate_up_order"] == "concatenated"
        assert entry["experts_cast"] == EXPERTS


def test_the_title_names_what_is_shown(demo: Path, tmp_path: Path) -> None:
    assert "gpt-oss: MXFP4, gate and up interleaved" in run("inspect", demo).stdout
    write(tmp_path, "DeepSeek-V4")
    shown = run("inspect", tmp_path, "--layer", 1).stdout
    assert "DeepSeek-V4: MXFP4, gate and up concatenated" in shown
    assert "casts" not in shown
    assert "0 down" not in shown


def test_sqnr_to_the_source_of_another_container(tmp_path: Path) -> None:
    (module,) = write(tmp_path / "mxfp4", "compressed-tensors mxfp4-pack-quantized", layers=[0])
    source = tmp_path / "bf16"
    source.mkdir()
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    tensors = {
        f"{module.path}.{expert}.{names[part]}.weight": matrix.values.bfloat16()
        for (expert, part), matrix in module.matrices.items()
    }
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "toy"}), encoding="utf-8")
    entries = inspect_checkpoint(tmp_path / "mxfp4", source=source)
    assert [entry.relative_l2 for entry in entries] == [0.0, 0.0]  # bf16 holds MXFP4 values


def test_what_does_not_load_is_not_inspected(tmp_path: Path) -> None:
    write(tmp_path, MODELOPT, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedError, match=r"^inspect_checkpoint: .*got FP8 in blocks"):
        inspect_checkpoint(tmp_path)
    shown = run("inspect", tmp_path)
    assert shown.exit_code == 2
    assert "FP8 in blocks" in shown.stderr
