"""Race hunts: every variant is named once, a planted bit is found, a run goes on where it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.hunts import run as hunts
from benchmarks.hunts import variants as hunt_variants
from mxpert.core.problem import ACTIVATION_FORMATS
from support.races import fp8_tiles, hopper_tiles
from tests.benchmarks.scripts import dry_run


def run(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    return dry_run(hunts.main, path, "--processes", "1", *arguments)


def test_every_kernel_variant_is_hunted() -> None:
    names = [each.name for each in hunt_variants.variants()]
    assert len(set(names)) == len(names)
    for a_format in ACTIVATION_FORMATS:
        for tile in hopper_tiles(a_format):
            assert f"hopper moe/{a_format}/{tile}" in names
        kinds = ("triton moe", "large layer")
        if a_format != "fp8_token":  # its scale needs the whole row
            kinds += ("hopper one launch", "large one launch")
        for kind in kinds:
            assert any(name.startswith(f"{kind}/{a_format}/") for name in names)
    for source in hunt_variants.CHOICES:
        assert f"hopper one launch/bf16/T=1 {source}" in names
    for tile in fp8_tiles():
        assert f"hopper fp8 copy/mxfp8/{tile}" in names
    for weight_format in hunt_variants.WEIGHT_FORMATS:
        for a_format in ("bf16", "mxfp8"):
            for tile in hopper_tiles(a_format, weight_format):
                assert f"hopper {weight_format} weights/{a_format}/{tile}" in names
    grouped = ("grouped/auto/forward", "grouped/exact/dgrad", "grouped/row/wgrad", "hopper dual/")
    rows = ("routing/plan", "routing/topk", "combine/forward", "combine/backward")
    for part in (*grouped, *rows):
        assert any(part in name for name in names)
    large = [name.startswith("large") for name in names]
    assert large == sorted(large)


def test_a_dry_run_repeats_every_variant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(tmp_path / "h.json")
    assert code == 0
    names = [each.name for each in hunt_variants.variants()]
    assert [row["name"] for row in found["rows"]] == names
    for row in found["rows"]:
        assert (row["repeats"], row["mismatches"]) == (hunts.DRY_REPEATS, 0)
    assert (found["meta"]["left"], found["meta"]["failures"]) == ([], {})
    assert "| hopper moe | 43 | 6 | 258 | 0 |" in capsys.readouterr().out
    page = (tmp_path / "h.md").read_text("utf-8")
    assert "| hopper moe/mxfp4/wide | E64 k4 H640 F384" in page
    assert "## Not finished" not in page


def test_a_planted_bit_is_found_in_every_variant(tmp_path: Path) -> None:
    code, found = run(tmp_path / "h.json", "--plant", "4", "--variants", "[rhc]*/*[d8kt]*")
    assert code == 0
    assert len(found["rows"]) > 30
    assert {row["mismatches"] for row in found["rows"]} == {1}
    assert "**Control: one bit of repeat 4" in (tmp_path / "h.md").read_text("utf-8")


def test_a_bit_that_is_not_found_fails_the_control(tmp_path: Path) -> None:
    code, _ = run(tmp_path / "h.json", "--plant", "1000", "--variants", "combine/*")
    assert code == 1


def test_a_value_that_differs_fails_the_hunt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    combine, calls = hunt_variants.mxpert.training.rows.op.combine_rows, [0]

    def racy(*arguments: Any) -> Any:
        calls[0] += 1
        return combine(*arguments) + (calls[0] == 4)

    monkeypatch.setattr(hunt_variants.mxpert.training.rows.op, "combine_rows", racy)
    code, found = run(tmp_path / "h.json", "--variants", "combine/*")
    assert code == 1
    assert {row["name"]: row["mismatches"] > 0 for row in found["rows"]} == {
        "combine/forward": True,
        "combine/backward": False,
    }


def test_what_is_left_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    code, found = run(path, "--variants", "combine/*", "--time-limit", "0")
    assert (code, found["rows"]) == (0, [])
    assert found["meta"]["left"] == ["combine/forward", "combine/backward"]
    assert "out of time: combine/forward" in path.with_suffix(".md").read_text("utf-8")
    _, first = run(path, "--variants", "combine/forward")
    code, found = run(path, "--variants", "combine/*", "--resume")
    assert code == 0
    assert found["rows"][0] == first["rows"][0]
    assert [row["name"] for row in found["rows"]] == ["combine/forward", "combine/backward"]
    assert run(path, "--resume", "--plant", "1")[0] == 2


def test_a_variant_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(hunt_variants.mxpert.training.rows.op, "combine_rows_backward", fail)
    code, found = run(tmp_path / "h.json", "--variants", "combine/*")
    assert code == 1
    assert found["meta"]["failures"] == {"combine/backward": "RuntimeError: no such kernel"}
    assert [row["name"] for row in found["rows"]] == ["combine/forward"]


def test_several_processes_share_the_variants(tmp_path: Path) -> None:
    code, found = run(tmp_path / "h.json", "--processes", "2", "--variants", "combine/*")
    assert code == 0
    assert {row["name"] for row in found["rows"]} == {"combine/forward", "combine/backward"}
    assert {row["processes"] for row in found["rows"]} == {2}
