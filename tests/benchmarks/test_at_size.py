"""The proof at size: it covers every format and bucket, sees wrong results, leaves models out."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import mxpert
from benchmarks.moe import at_size
from mxpert.core.problem import ACTIVATION_FORMATS
from tests.benchmarks.scripts import dry_run


def run(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    return dry_run(at_size.main, path, "--models", "gpt-oss-20b,padded", *arguments)


def test_every_model_format_and_bucket_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(tmp_path / "a.json")
    assert code == 0
    places = ("gpt-oss-20b", "padded"), ACTIVATION_FORMATS, at_size.DRY_TOKENS
    found_places = [(row["model"], row["activation"], row["T"]) for row in found["rows"]]
    assert found_places == list(itertools.product(*places))
    assert [row["compared"] for row in found["rows"][:3]] == [1, 3, 4]
    assert all(0 < row["limits"][stage] < 1 for row in found["rows"] for stage in at_size.STAGES)
    assert all(row["ok"] and row["finite"] for row in found["rows"])
    assert "| padded mxfp4 | 0.0 | 1 … 16 |" in capsys.readouterr().out
    written = (tmp_path / "a.md").read_text("utf-8")
    assert "## Not proven" not in written
    (tmp_path / "a.md").unlink()
    assert at_size.main(["--render", str(tmp_path / "a.json")]) == 0
    assert (tmp_path / "a.md").read_text("utf-8") == written


def test_two_projections_are_larger_than_4_gib() -> None:
    large = [
        name
        for name, shape in at_size.SHAPES.items()
        if shape.num_experts * 2 * shape.intermediate_size * shape.hidden_size / 2 > 2**32
    ]
    assert large == ["kimi-k2", "dsv4-pro"]
    assert at_size.TOKENS == (1, 4, 16, 64, 128, 256, 1024, 4096, 8192, 32768)
    assert {count - 1 for count in at_size.TOKENS} <= set(at_size.SAMPLE)


@pytest.mark.parametrize(
    "stage, op, factor",
    [
        pytest.param("gate_up", "moe_gate_up", 1.01, id="stage-1"),
        pytest.param("down", "moe_down", 1.01, id="stage-2"),
        pytest.param("layer", "fused_moe", 1.03, id="layer"),
        pytest.param("layer", "fused_moe", float("nan"), id="nan"),
    ],
)
def test_a_wrong_result_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, op: str, factor: float
) -> None:
    right, explain = getattr(mxpert, op), mxpert.explain

    def wrong(x: Any, weights: Any, *rest: Any, **options: Any) -> Any:
        result = right(x, weights, *rest, **options)
        exact = str(options.get("out_dtype")) == "torch.float64"
        return result if exact else result * factor

    def explain_right(called: Any, *rest: Any, **options: Any) -> Any:
        return explain(right if called is wrong else called, *rest, **options)

    monkeypatch.setattr(mxpert, op, wrong)
    monkeypatch.setattr(mxpert, "explain", explain_right)
    code, found = run(tmp_path / "a.json", "--formats", "bf16", "--models", "gpt-oss-20b")
    assert code == 1
    assert len(found["rows"]) == 3
    for row in found["rows"]:
        assert not row["ok"]
        assert at_size.share_of_limit([row], stage) > 1


def test_a_format_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_batch = at_size.run_batch

    def fail(inputs: Any, a_format: str) -> Any:
        if a_format == "mxfp8":
            raise RuntimeError("no such kernel")
        return run_batch(inputs, a_format)

    monkeypatch.setattr(at_size, "run_batch", fail)
    code, found = run(tmp_path / "a.json", "--formats", "mxfp8,mxfp4")
    assert code == 1
    assert {row["activation"] for row in found["rows"]} == {"mxfp4"}
    errors = [each["error"] for each in found["meta"]["failures"]]
    assert errors == ["RuntimeError: no such kernel"] * 2


def test_what_is_left_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    code, found = run(path, "--time-limit", "0")
    assert (code, found["rows"]) == (0, [])
    assert found["meta"]["left"] == ["gpt-oss-20b", "padded"]
    _, first = run(path, "--models", "gpt-oss-20b", "--formats", "bf16")
    code, found = run(path, "--formats", "bf16", "--resume")
    assert code == 0
    assert found["rows"][:3] == first["rows"]
    assert [row["model"] for row in found["rows"]] == ["gpt-oss-20b"] * 3 + ["padded"] * 3
    assert at_size.main(["--dry-run", "--commit", "other", "--output", str(path), "--resume"]) == 2
