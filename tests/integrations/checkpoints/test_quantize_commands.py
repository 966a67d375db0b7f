"""`mxpert quantize` and `mxpert inspect` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from mxpert.cli.inspect import sparkline
from mxpert.cli.main import app
from mxpert.integrations.checkpoints import safetensors_files

runner = CliRunner()


def run(*arguments: object) -> Any:
    return runner.invoke(app, [str(argument) for argument in arguments])


def test_quantize_then_inspect(sources: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(
        "quantize",
        sources["qwen3_moe"],
        out,
        "--scale-rule",
        "even",
        "--json",
        tmp_path / "summary.json",
    )
    assert done.exit_code == 0, done.output
    assert "verified." in done.stdout
    assert "1 gate_up" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text("utf-8"))
    assert summary["verified"] is True
    assert summary["scale_rule"] == "even"
    assert len(summary["projections"]) == 4
    assert all(10 < entry["sqnr_db"] < 30 for entry in summary["projections"])
    shown = run("inspect", out, "--source", sources["qwen3_moe"], "--layer", 1)
    assert shown.exit_code == 0, shown.output
    assert "SQNR dB" in shown.stdout
    assert "1 down" in shown.stdout
    assert "0 down" not in shown.stdout
    assert f"{summary['projections'][3]['sqnr_db']:.2f}" in shown.stdout
    again = run("quantize", sources["qwen3_moe"], out, "--scale-rule", "even", "--json", "-")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["shards_written"] == 0  # nothing but JSON on standard output


@pytest.mark.parametrize(
    ("options", "format", "container", "weights"),
    [
        (("--to", "mxfp4"), "mxfp4", "gpt-oss", None),
        (("--to", "mxfp8"), "mxfp8_e4m3", "compressed-tensors mxfp8-quantized", (8, 32)),
        (("--to", "nvfp4"), "nvfp4", "compressed-tensors nvfp4-pack-quantized", (4, 16)),
        (("--to", "int4"), "int4_g32", "compressed-tensors pack-quantized", (4, 32)),
        (
            ("--to", "int4", "--group-size", 32),
            "int4_g32",
            "compressed-tensors pack-quantized",
            (4, 32),
        ),
    ],
)
def test_to_chooses_the_format(
    options: tuple[object, ...],
    format: str,
    container: str,
    weights: tuple[int, int] | None,
    sources: dict[str, Path],
    tmp_path: Path,
) -> None:
    out, report = tmp_path / "out", tmp_path / "report.json"
    done = run("quantize", sources["qwen3_moe"], out, *options, "--json", report)
    assert done.exit_code == 0, done.output
    assert f"Quantised to {format} ({container})" in " ".join(done.stdout.split())
    assert "verified." in done.stdout
    stated = json.loads(report.read_text("utf-8"))
    assert (stated["weight_format"], stated["container"]) == (format, container)
    config = json.loads((out / "config.json").read_text("utf-8"))["quantization_config"]
    if weights is not None:
        arguments = config["config_groups"]["group_0"]["weights"]
        assert (arguments["num_bits"], arguments["group_size"]) == weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "mxfp8", "--group-size", 32), "--group-size — need none with --to mxfp8, got 32"),
        (("--group-size", 64), "--group-size — need none with --to mxfp4, got 64"),
        (("--to", "nvfp4", "--scale-rule", "even"), "scale_rule — need none for nvfp4, got even"),
        (("--to", "int4", "--group-size", 128), "hidden_size — need a multiple of 128"),
        (("--to", "int4", "--group-size", 16), "'16' is not one of '32', '64', '128'"),
        (("--to", "int8"), "'int8' is not one of 'mxfp4', 'mxfp8', 'nvfp4', 'int4'"),
    ],
)
def test_options_that_do_not_fit_the_format_are_exit_code_2(
    options: tuple[object, ...], message: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    failed = run("quantize", sources["qwen3_moe"], tmp_path / "out", *options)
    assert failed.exit_code == 2
    assert message in " ".join(failed.stderr.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_inspect_writes_json_to_standard_output(demo: Path) -> None:
    shown = run("inspect", demo, "--json", "-")
    assert shown.exit_code == 0
    projections = json.loads(shown.stdout)["projections"]
    assert [(p["layer"], p["projection"]) for p in projections] == [
        (0, "gate_up_proj"),
        (0, "down_proj"),
        (1, "gate_up_proj"),
        (1, "down_proj"),
    ]


def test_inspect_shows_what_does_not_fold(tmp_path: Path) -> None:
    scales = torch.tensor([[[127, 100, 255]]], dtype=torch.uint8)
    save_file(
        {
            "experts.up_blocks": torch.full((1, 1, 3, 16), 0x22, dtype=torch.uint8),
            "experts.up_scales": scales,
        },
        tmp_path / "x.safetensors",
    )
    shown = run("inspect", tmp_path / "x.safetensors")
    assert shown.exit_code == 0, shown.output
    assert "not 2" in shown.stdout
    assert "NaN" in shown.stdout
    assert "-27/-27/0" in shown.stdout


@pytest.mark.parametrize(
    "arguments",
    [("quantize", "/nowhere", "/tmp/never"), ("inspect", "/nowhere")],
    ids=["quantize", "inspect"],
)
def test_a_missing_path_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    failed = run(*arguments)
    assert failed.exit_code == 2
    assert "/nowhere — need an existing checkpoint" in failed.stderr
    assert "Traceback" not in failed.output


@pytest.mark.parametrize(
    "command", [("quantize", "mixtral", "out"), ("inspect", "mixtral")], ids=["quantize", "inspect"]
)
def test_a_summary_that_cannot_be_written_is_refused_first(
    command: tuple[str, ...], sources: dict[str, Path], tmp_path: Path
) -> None:
    name, family, *out = command
    failed = run(
        name,
        sources[family],
        *(tmp_path / part for part in out),
        "--json",
        tmp_path / "absent" / "summary.json",
    )
    assert failed.exit_code == 2
    assert "--json — need a file in an existing directory" in failed.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_full_destination_is_exit_code_2(sources: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("", encoding="utf-8")
    failed = run("quantize", sources["mixtral"], tmp_path)
    assert failed.exit_code == 2
    assert "name another destination, or empty this one yourself" in failed.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_failed_verification_is_exit_code_1(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_zeros(tensors: dict[str, torch.Tensor], path: Path, metadata: Any) -> None:
        save_file(
            {name: torch.zeros_like(tensor) for name, tensor in tensors.items()},
            path,
            metadata=metadata,
        )

    monkeypatch.setattr(safetensors_files, "save_file", save_zeros)
    failed = run("quantize", sources["mixtral"], tmp_path / "out")
    assert failed.exit_code == 1
    assert "verification FAILED" in failed.stdout
    assert "differs from a fresh quantisation" in failed.stderr


def test_sparklines_show_every_block() -> None:
    assert sparkline({}) == ""
    assert sparkline({5: 3}) == "█"
    assert sparkline({-3: 1, -2: 8, 0: 4}) == "▁█ ▄"
    wide = sparkline(dict.fromkeys(range(-40, 41), 2))
    assert len(wide) <= 12
    assert " " not in wide
