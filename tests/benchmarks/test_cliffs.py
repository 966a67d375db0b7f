"""The search for cliffs: neighbours, ratios, binaries, and the script on tiny shapes."""

from __future__ import annotations

import itertools
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks.moe import cliffs
from benchmarks.moe.cells import MODELS, Model
from tests.benchmarks.scripts import dry_run

SHAPE = "E128-k8-H2048-F384"


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """First calls without new processes."""
    found = {
        "seconds": {"bf16 T=17": 0.5, "mxfp8 T=17": 30.25},
        "binaries": {"bf16": 2, "mxfp8": 3},
        "by_kernel": {"_planted_kernel": 2, "_other_kernel": 1},
    }
    monkeypatch.setattr(cliffs, "start_first_calls", lambda dry: found)


def run(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    return dry_run(cliffs.main, path, "--shapes", SHAPE, "--tokens", "5", *arguments)


def test_the_shapes_are_those_of_the_goal() -> None:
    found = list(cliffs.SHAPES.values())
    assert len(found) == len(cliffs.FEATURES) * len(cliffs.HIDDEN) + 1
    assert {model.F for model in found[:4]} == set(cliffs.FEATURES)
    assert {model.H for model in found[:4]} == set(cliffs.HIDDEN)
    assert {model.E for model in found} == {32, 128}
    assert {model.name for model in found} & set(MODELS) == {"qwen3-235b"}


@pytest.mark.parametrize(
    "shape, wanted",
    [
        pytest.param((128, 2048, 384), "kimi-k2-tp4", id="narrow"),
        pytest.param((128, 5120, 1536), "qwen3-235b", id="wide"),
        pytest.param((16, 3072, 3072), "gpt-oss-20b", id="equal-distance-fewer-experts"),
        pytest.param((128, 7168, 2048), "dsv3-ep8", id="same-sizes"),
    ],
)
def test_the_neighbour_is_nearest_in_log_sizes(shape: tuple[int, int, int], wanted: str) -> None:
    num_experts, hidden_size, features = shape
    assert cliffs.neighbour_of(Model("", num_experts, 8, hidden_size, features)).name == wanted


def test_neighbours_come_first_and_every_cell_once() -> None:
    plan = cliffs.plan(cliffs.SHAPES.values(), cliffs.TOKENS, cliffs.ROUTINGS)
    assert [model.name for model in plan][:2] == ["kimi-k2-tp4", "qwen3-235b"]
    cells = [cell for found in plan.values() for cell in found]
    assert len(cells) == len(set(cells)) == 13 * 9 + 3
    assert {cell.routing for cell in plan[MODELS["kimi-k2-tp4"]]} == {"uniform"}
    assert len(plan[MODELS["qwen3-235b"]]) == 9


def test_binaries_are_counted_once_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel(cliffs.JITFunction):
        def __init__(self, *hashes: str) -> None:
            cache = {index: types.SimpleNamespace(hash=each) for index, each in enumerate(hashes)}
            self.__name__, self.device_caches = "_planted_kernel", {0: (cache, {})}

    module = types.ModuleType("mxpert.moe.planted")
    module.first, module.again = [Kernel("a", "b", "a")] * 2
    module.unused = Kernel()
    elsewhere = types.ModuleType("mxpert.testing.planted")
    elsewhere.kernel = Kernel("c")
    for each in (module, elsewhere):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    assert cliffs.count_binaries()["_planted_kernel"] == 2


def test_a_dry_run_measures_shape_and_neighbour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(tmp_path / "x.json")
    assert code == 0, found["meta"]["failures"]
    names = ("model", "routing", "activation", "stage")
    kinds = list(itertools.product(cliffs.FORMATS, cliffs.STAGES))
    assert {tuple(each[name] for name in names) for each in found["rows"]} == {
        *(("kimi-k2-tp4", "uniform", *kind) for kind in kinds),
        *((SHAPE, name, *kind) for name in cliffs.ROUTINGS for kind in kinds),
    }
    assert all(each["rel_l2"] < 1e-2 and each["relative"] > 0 for each in found["rows"])
    assert {each["relative"] for each in found["rows"] if each["model"] == "kimi-k2-tp4"} == {1.0}
    assert found["meta"]["commit"] == "abc"
    assert found["meta"]["left"] == []
    calls = found["first_calls"]
    assert set(calls) == {"empty_cache", "kept_cache", "most_s", "most_binaries"}
    assert list(calls["kept_cache"]["seconds"]) == [
        f"{name} T={tokens}" for name in cliffs.FORMATS for tokens in (17, 2053)
    ]
    assert calls["empty_cache"]["binaries"] == dict.fromkeys(cliffs.FORMATS, 0)
    text = capsys.readouterr().out
    assert f"| {SHAPE} | 5 | hot | kimi-k2-tp4 |" in text
    assert "| first call, s | empty cache | kept cache |" in text
    page = (tmp_path / "x.md").read_text("utf-8")
    assert f"| {SHAPE} | 5 | hot | kimi-k2-tp4 |" in page
    assert page.count("<details>") == page.count("</details>") >= 1
    assert "## Not measured" not in page


@pytest.mark.usefixtures("no_children")
def test_binaries_of_one_model_are_those_of_its_own_process(tmp_path: Path) -> None:
    _, found = run(tmp_path / "x.json", "--time-limit", "0")
    assert found["binaries"]["by_kernel"] == cliffs.count_binaries()
    page = (tmp_path / "x.md").read_text("utf-8")
    assert "| _planted_kernel | 2 | 0 |" in page
    assert "| all (of one model at most 12) | 3 | " in page
    assert "One model: 2 after bf16, 3 after mxfp8." in page
    assert "| longest (at most 20) | 30.25 | 30.25 |" in page
    assert f"out of time: kimi-k2-tp4 T=5 uniform, {SHAPE} T=5 uniform" in page


@pytest.mark.usefixtures("no_children")
def test_a_wrong_result_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cliffs.Ours._layer

    def wrong(self: Any, *operands: Any) -> Any:
        return right(self, *operands) * (1.1 if self.activation == "mxfp8" else 1.0)

    monkeypatch.setattr(cliffs.Ours, "_layer", wrong)
    code, found = run(tmp_path / "x.json", "--routings", "uniform")
    assert code == 1
    assert {each["activation"] for each in found["rows"]} == {"bf16", "mxfp4"}
    errors = [each["error"] for each in found["meta"]["failures"]]
    assert len(errors) == 2
    assert all(error.startswith("GateError") and "relative L2" in error for error in errors)


@pytest.mark.usefixtures("no_children")
def test_after_the_time_limit_cells_are_left(tmp_path: Path) -> None:
    code, found = run(tmp_path / "x.json", "--time-limit", "0")
    assert (code, found["rows"]) == (0, [])
    assert len(found["meta"]["left"]) == 1 + 3


def test_a_process_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    code, found = run(tmp_path / "x.json", "--time-limit", "0")
    assert code == 1
    assert [each["cell"] for each in found["meta"]["failures"]] == [
        "first calls, empty_cache",
        "first calls, kept_cache",
    ]
