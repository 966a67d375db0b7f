"""`mxpert convert` as a user calls it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mxpert.cli.main import app
from mxpert.integrations.checkpoints.written_containers import TARGETS
from support.expert_containers import EXACT_NVFP4, KINDS, write

runner = CliRunner()


def run(*arguments: object) -> Any:
    return runner.invoke(app, [str(argument) for argument in arguments])


def test_a_conversion_is_reported_in_words_and_json(tmp_path: Path) -> None:
    write(tmp_path / "in", "ModelOpt NVFP4")
    done = run("convert", tmp_path / "in", tmp_path / "out", "--container", "quark", "--json", "-")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["kind"] == "convert"
    assert report["verified"] is True
    assert (report["source_format"], report["weight_format"]) == ("NVFP4", "MXFP4")
    assert report["activation_scales"] == 24
    words = " ".join(done.stderr.split())
    assert "container ModelOpt NVFP4 Quark OCP MX" in words
    assert "every weight has the bits of the source. 24 scales of activations are left" in words
    shown = run("inspect", tmp_path / "out", "--json", "-")
    assert {each["container"] for each in json.loads(shown.stdout)["projections"]} == {
        "Quark OCP MX"
    }


def test_what_is_not_lossless_is_exit_code_2(tmp_path: Path) -> None:
    write(tmp_path / "in", EXACT_NVFP4["ModelOpt NVFP4"])
    for target, why in (("awq", "no evenly spaced integers"), ("gpt-oss", "need a cast of MXFP4")):
        failed = run("convert", tmp_path / "in", tmp_path / "out", "--container", target)
        assert failed.exit_code == 2
        (line,) = [each for each in failed.stderr.splitlines() if each.startswith("error")]
        assert why in line
        assert "Traceback" not in failed.output
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


def test_a_difference_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in", KINDS["AWQ"])
    encode = TARGETS["gptq"].encode
    assert encode is not None
    spoiled = replace(
        TARGETS["gptq"], encode=lambda each: encode(replace(each, scale=each.scale.flip(0)))
    )
    monkeypatch.setitem(TARGETS, "gptq", spoiled)
    failed = run("convert", tmp_path / "in", tmp_path / "out", "--container", "gptq")
    assert failed.exit_code == 1
    assert "verification FAILED; nothing was kept" in " ".join(failed.stdout.split())
    assert "has other weights than the source" in failed.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


def test_the_help_names_every_container() -> None:
    shown = " ".join(run("convert", "--help").stdout.replace("│", " ").split())
    assert all(name in shown for name in TARGETS)
