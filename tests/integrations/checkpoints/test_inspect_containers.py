"""`mxpert inspect` of every container: what it is, what it holds, and how much of it is MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from mxpert.cli.main import app
from mxpert.errors import UnsupportedError
from mxpert.integrations.checkpoints.inspect import inspect_checkpoint
from support.expert_containers import EXPERTS, HIDDEN, INTERMEDIATE, KINDS, rewrite, write

MODELOPT = "ModelOpt NVFP4"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", KINDS)
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


def make_exact(path: Path, module: str, expert: int) -> None:
    """Give one scale of an expert's up projection another significand."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{module}.{expert}.up_proj.weight_scale"].view(torch.uint8)[3, 1] += 1

    rewrite(path, change)


def test_experts_that_are_no_casts_are_counted(tmp_path: Path) -> None:
    modules = write(tmp_path, MODELOPT)
    make_exact(tmp_path, modules[0].path, 2)
    first, second, *rest = inspect_checkpoint(tmp_path)
    assert (first.experts_cast, first.exact_fold) == (EXPERTS - 1, False)
    assert sum(first.scale_histogram.values()) == (EXPERTS - 1) * first.blocks // EXPERTS
    assert (second.experts_cast, second.exact_fold) == (EXPERTS, True)
    assert all(entry.experts_cast == EXPERTS for entry in rest)
    shown = run("inspect", tmp_path)
    assert shown.exit_code == 0, shown.output
    assert "ModelOpt NVFP4: NVFP4, cast from MXFP4, gate and up concatenated" in shown.stdout
    assert "casts" in shown.stdout
    row = next(line for line in shown.stdout.splitlines() if "0 gate_up" in line)
    assert "3/4" in row
    assert "no MXFP4" in row
    assert "4/4" in next(line for line in shown.stdout.splitlines() if "0 down" in line)


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
    write(tmp_path, MODELOPT, quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedError, match=r"^inspect_checkpoint: .*got GPTQ \(INT4\)"):
        inspect_checkpoint(tmp_path)
    shown = run("inspect", tmp_path)
    assert shown.exit_code == 2
    assert "GPTQ" in shown.stderr
