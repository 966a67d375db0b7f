"""The comparison with peers: its rows, its order, and the script on tiny models."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mxpert
from benchmarks import ROOT
from benchmarks.moe import cells, estimate, ours, peers
from benchmarks.moe import run as compare
from benchmarks.moe.rows import SCHEMA
from benchmarks.routing import run as routing
from mxpert.cli.measure import RunWeights
from mxpert.core.target import on_device
from mxpert.formats.tensor import Layout
from mxpert.testing.problems import MODEL_SHAPES
from mxpert.testing.timing import Timing, time_sustained
from support.launches import H200, without_device
from tests.benchmarks.comparison_rows import row, row_key
from tests.benchmarks.scripts import dry_run

FUNCTION = 4
"""Where Triton's C launcher takes the kernel; without a device that is its name."""


def test_a_row_is_set_against_the_ceilings_of_its_run() -> None:
    found = row(us=50.0, model="gpt-oss-120b", stage="down_gemm")
    weight_bytes = 31.5 * 2880 * 2880 * 4.25 / 8
    assert found["tbs"] == pytest.approx(weight_bytes / 50e-6 / 1e12)
    assert found["tflops"] == pytest.approx(2 * 16 * 4 * 2880 * 2880 / 50e-6 / 1e12)
    assert found["percent_of_roof"] == pytest.approx(100 * weight_bytes / 4e12 / 50e-6)
    assert found["us_spread"] == 1.0


def test_the_compute_roof_is_that_of_the_activation_width() -> None:
    bf16, fp8 = (row(us=1e4, tokens=8192, activation=name) for name in ("bf16", "mxfp8"))
    assert bf16["percent_of_roof"] / fp8["percent_of_roof"] == pytest.approx(1300 / 700)


def test_important_cells_come_first() -> None:
    found = cells.ordered_cells(list(cells.MODELS.values())[::-1], cells.TOKENS)
    assert len(set(found)) == 8 * 9
    assert [str(cell) for cell in found[:2]] == [
        "gpt-oss-120b T=1 uniform",
        "gpt-oss-120b T=16 uniform",
    ]
    names, tokens = [cell.model.name for cell in found], [cell.tokens for cell in found]
    assert set(names[:36]) == set(cells.NAMED)
    assert {4, 64, 4096}.isdisjoint(tokens[:36])
    assert set(names[36:54]) == set(cells.REFERENCE)
    assert set(tokens[54:]) == {4, 64, 4096}


def test_the_reference_systems_shapes_have_their_own_token_counts() -> None:
    found = [cell for cell in cells.ordered_cells(list(cells.MODELS.values())) if cell.is_reference]
    published = itertools.product(("kimi-e385", "r1-e384"), (4, 16, 64, 256, 16384))
    names = [(cell.model.name, cell.tokens) for cell in found]
    assert names == [("gpt-oss-120b", 16384), *published]
    assert found[1].stages(cells.STAGES) == ["gate_up", "down", "layer"]
    assert cells.Cell(cells.MODELS["dsv3-ep8"], 16).stages(cells.STAGES) == list(cells.STAGES)


@pytest.mark.parametrize("name", cells.ROUTINGS)
def test_inputs_are_the_same_on_every_run(name: str) -> None:
    cell = cells.Cell(cells.tiny(cells.MODELS["dsv4-flash"]), 4, name)
    once, twice = (cells.random_inputs(cell, torch.device("cpu")) for _ in range(2))
    assert len(once) == cell.rotations == 2
    for a, b in zip(once, twice, strict=True):
        assert a.logits.equal(b.logits)
        assert a.x.equal(b.x)
    assert not once[0].logits.equal(once[1].logits)
    if name == "hot":
        assert (once[0].logits.argmax(1)[::2] == 0).all()


def test_recent_models_are_offered_and_described(tmp_path: Path) -> None:
    """By the same names as in `mxpert bench` and in the documentation."""
    page = (ROOT / "docs/performance.md").read_text("utf-8")
    for name, model in cells.OFFERED.items():
        assert name in MODEL_SHAPES
        assert f"| {name} | {model.E} | {model.k} | {model.H} | {model.F} |" in page
    assert not set(cells.RECENT) & set(cells.MODELS)
    options = ["--models", ",".join(cells.RECENT), "--tokens", "1", "--stages", "layer"]
    _, found = dry_run(compare.main, tmp_path / "x.json", *options, "--activations", "a8")
    assert {each["model"] for each in found["rows"]} == set(cells.RECENT)
    assert all(each["rel_l2"] < 2e-2 for each in found["rows"])


def run(path: Path, *arguments: str) -> dict[str, Any]:
    _, found = dry_run(compare.main, path, "--models", "dsv3-ep8", "--tokens", "1,16", *arguments)
    SCHEMA.validate(found)
    return found


def test_a_dry_run_walks_all_cells(tmp_path: Path) -> None:
    found = run(tmp_path / "x.json", "--routings", "uniform,hot")
    places = ["dsv3-ep8"], (1, 16), ("uniform", "hot"), ["mxpert"]
    formats, stages = ("bf16", "mxfp8", "fp8_token", "mxfp4"), ("gate_up", "down", "layer")
    found_keys = {row_key(each) for each in found["rows"]}
    assert found_keys == set(itertools.product(*places, formats, stages))
    assert found["meta"]["commit"] == "abc"
    assert {each["error"] for each in found["meta"]["failures"]} == {compare.NO_GEMM}
    assert all(each["rel_l2"] < 1e-2 for each in found["rows"])


def test_sustained_times_each_variant_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: list[set[str]] = []

    def record(variants: Any, **options: Any) -> dict[str, Timing]:
        alone.append({name.split("/")[1] for name in variants})
        return time_sustained(variants, **options)

    monkeypatch.setattr(compare, "time_sustained", record)
    found = run(tmp_path / "x.json", "--sustained", "--stages", "layer")
    assert alone == [{"bf16", "mxfp8", "fp8_token", "mxfp4"}] * 2
    assert len(found["rows"]) == 8
    assert found["meta"]["protocol"]["power"].startswith("each variant alone")
    assert "sweep" in found["meta"]["protocol"]["timing"]


def test_mxfp4_is_measured_beside_the_a8_peers() -> None:
    found = compare.asked_peers(["mxfp4"], compare.PEERS)
    a8 = ["humming fp8_token", "humming fp8_group", "flashinfer fp8_token"]
    assert [" ".join(key) for key in found] == a8


def test_a_resumed_run_measures_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    first = run(path, "--tokens", "1")
    measured, collect = [], compare.collect

    def record(run: Any, cell: Any, *rest: Any) -> Any:
        measured.append(str(cell))
        return collect(run, cell, *rest)

    monkeypatch.setattr(compare, "collect", record)
    again = run(path, "--resume")
    assert measured == ["dsv3-ep8 T=16 uniform"]
    assert again["rows"][: len(first["rows"])] == first["rows"]


def test_a_wrong_result_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = mxpert.fused_moe_from_logits
    monkeypatch.setattr(
        mxpert, "fused_moe_from_logits", lambda *args, **kwargs: 1.1 * right(*args, **kwargs)
    )
    monkeypatch.setitem(compare.build_model.__globals__, "Ours", PlainOurs)
    found = run(tmp_path / "x.json", "--activations", "a16w4")
    assert found["rows"] == []
    assert all("relative L2" in each["error"] for each in found["meta"]["failures"])
    assert len(found["meta"]["failures"]) == 2 * len(cells.STAGES)


class PlainOurs(ours.Ours):
    """Chooses weights without asking about the function that the test replaced."""

    def _chosen_weights(self, inputs: cells.Inputs) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            right = sys.modules["mxpert.moe.from_logits"].fused_moe_from_logits
            patch.setattr(mxpert, "fused_moe_from_logits", right)
            return super()._chosen_weights(inputs)


class FakePeer:
    """Two variants of different speed; its down stage cannot run."""

    impl, activation, same_weights = "humming", "bf16", True
    factor = 1.0

    def __init__(self, model: cells.Model, weights: mxpert.MoEWeights) -> None:
        self.model, self.weights = model, weights

    def prepare(self, cell: cells.Cell, batches: Any) -> peers.Variants:
        def layer() -> torch.Tensor:
            routed = mxpert.route_topk(batches[0].logits, self.model.k)
            options = dict(activation=ours.ACTIVATION, activation_format="bf16")
            return self.factor * mxpert.fused_moe(batches[0].x, self.weights, *routed, **options)

        def fail() -> None:
            raise RuntimeError("cannot")

        stages = dict.fromkeys(cells.STAGES, layer) | {"down": fail}
        calls = {stage: [call] * len(batches) for stage, call in stages.items()}
        return {"padding 0": calls, "padding 128": calls}


@pytest.fixture
def fake_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(run: compare.Run, model: cells.Model, key: tuple[str, str]) -> FakePeer:
        if key == ("humming", "bf16"):
            return FakePeer(model, run.models[model.name].weights.plain)
        raise ImportError(f"no {key[0]}")

    monkeypatch.setattr(compare, "make_peer", make)
    monkeypatch.setattr(compare, "start_compiler", lambda run, cells: None)


@pytest.mark.usefixtures("fake_peers")
def test_peers_fail_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = run(tmp_path / "x.json", "--peers", str(tmp_path), "--tokens", "1")
    theirs = {each["stage"]: each for each in found["rows"] if each["impl"] == "humming"}
    assert set(theirs) == set(cells.STAGES) - {"down"}
    assert theirs["layer"]["rel_l2"] < 1e-2
    assert theirs["gate_up"]["rel_l2"] is None
    names = ("impl", "activation", "stage")
    failed = {tuple(each[name] for name in names) for each in found["meta"]["failures"]}
    absent = set(peers.PEER_KEYS) - {("humming", "bf16")}
    assert {each for each in failed if each[0] != "mxpert"} == {
        ("humming", "bf16", "down"),
        *((*key, stage) for key in absent for stage in cells.STAGES),
    }
    assert found["meta"]["peers"]["marlin/bf16"].startswith("absent: ImportError")
    assert found["meta"]["peers"]["humming/bf16"] == "present"


@pytest.mark.usefixtures("fake_peers")
def test_a_peer_may_compute_the_layer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other stages are noted as absent, so that a resumed run does not look for them."""
    prepare = FakePeer.prepare

    def layer_alone(self: FakePeer, cell: cells.Cell, batches: Any) -> peers.Variants:
        return {"": {"layer": prepare(self, cell, batches)["padding 0"]["layer"]}}

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(FakePeer, "prepare", layer_alone)
    monkeypatch.setattr(FakePeer, "note", "half of its kernels", raising=False)
    path, options = tmp_path / "x.json", ("--peers", str(tmp_path), "--tokens", "1")
    found = run(path, *options)
    theirs = {each["stage"] for each in found["rows"] if each["impl"] == "humming"}
    absent = [each for each in found["meta"]["failures"] if each["error"] == compare.NO_STAGE]
    assert theirs == {"layer"}
    assert found["meta"]["peers"]["humming/bf16"] == "present: half of its kernels"
    assert {each["stage"] for each in absent} == set(cells.STAGES) - {"layer"}
    assert run(path, *options, "--resume")["rows"] == found["rows"]


@pytest.mark.usefixtures("fake_peers")
def test_a_wrong_peer_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(FakePeer, "factor", 1.1)
    found = run(tmp_path / "x.json", "--peers", str(tmp_path), "--tokens", "1")
    assert {each["impl"] for each in found["rows"]} == {"mxpert"}
    told = {each["error"] for each in found["meta"]["failures"] if each["activation"] == "bf16"}
    assert any("T=1 uniform bf16 layer — need relative L2 to float64" in text for text in told)


def test_after_the_time_limit_nothing_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(tmp_path / "x.json", "--time-limit", "0")
    assert found["rows"] == []
    assert found["meta"]["left"] == ["dsv3-ep8 T=1 uniform", "dsv3-ep8 T=16 uniform"]
    text = capsys.readouterr().out
    assert "2 cells left: dsv3-ep8 T=1 uniform, dsv3-ep8 T=16 uniform" in text
    assert "estimate for an H200, 2 cells, 11 variants: " in text


def test_the_cell_that_compiles_is_no_measure_of_those_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a resumed run's first cell, which compiles for 60 s, others are still measured."""
    path = tmp_path / "x.json"
    run(path, "--tokens", "1")
    now, run_cell = [0.0], compare.run_cell
    seconds = iter([60.0, 5.0, 5.0])

    def slow(given: Any, cell: Any) -> None:
        now[0] += next(seconds) if compare.wanted_stages(given, cell) else 0.0
        run_cell(given, cell)

    monkeypatch.setattr(compare.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(compare, "run_cell", slow)
    found = run(path, "--tokens", "1,4,16", "--resume", "--time-limit", "100")
    assert {each["T"] for each in found["rows"]} == {1, 4, 16}


def test_a_whole_comparison_is_estimated_to_fit() -> None:
    named = cells.ordered_cells(list(cells.NAMED.values()), cells.TOKENS)
    every = cells.ordered_cells(list(cells.MODELS.values()))
    variants = len(cells.FORMATS) + len(peers.PEER_KEYS)
    before, now = (
        sum(estimate.estimate(found, cells.STAGES, number).values())
        for found, number in ((named, variants - 1), (every, variants))
    )
    assert (len(named), len(every)) == (54, 65)
    assert before < now < 1.35 * before
    assert now < 480


def test_a_cell_with_a_gap_is_measured_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    first = run(path, "--tokens", "1", "--stages", "down")
    gap = [each for each in first["rows"] if each["activation"] != "mxfp8"]
    path.write_text(json.dumps({**first, "rows": gap}))
    again = run(path, "--tokens", "1", "--stages", "down", "--resume")
    assert {row_key(each) for each in again["rows"]} == {row_key(each) for each in first["rows"]}
    before, after = ({row_key(each): each["us"] for each in rows} for rows in (gap, again["rows"]))
    assert all(after[key] != us for key, us in before.items())


def test_a_compiler_that_may_not_run_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wheels unpacked as zip files lose the permission: the peer would be missing in every row."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    program = tmp_path / "humming/_native/x86_64/nvrtc_compile"
    program.parent.mkdir(parents=True)
    program.touch(0o644)
    paths = ["--peers", str(tmp_path), "--output", str(tmp_path / "x.json")]
    arguments = ["--dry-run", "--tokens", "1", "--time-limit", "0", *paths]
    assert compare.main(arguments) == 2
    assert f"chmod +x {program}" in capsys.readouterr().err
    program.chmod(0o755)
    assert compare.main(arguments) == 0


def test_routing_times_every_router_and_op(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = dry_run(routing.main, tmp_path / "r.json", "--tokens", "1,5")
    assert code == 0
    assert len(found["device_rows"]) == 4 * 2 * 3
    ops = {each["op"] for each in found["host_rows"]}
    for name, tokens in itertools.product(("bf16", "mxfp8"), (1, 16)):
        assert f"fused_moe {name}, T = {tokens}" in ops
    assert "| both E=384 k=8 |" in capsys.readouterr().out


@pytest.mark.parametrize("activation", cells.FORMATS)
@pytest.mark.parametrize(
    "tokens, kernels",
    [
        pytest.param(16, ["_moe_gemm_decode_kernel"], id="decode"),
        pytest.param(512, ["_moe_tile_schedule_kernel", "_moe_gemm_prefill_kernel"], id="prefill"),
    ],
)
def test_a_gemm_is_what_the_stage_launches(
    activation: str, tokens: int, kernels: list[str]
) -> None:
    model = cells.Model("small", 8, 2, 256, 256)
    weights = ours.random_weights(model, torch.device("cpu"))
    packed = RunWeights(
        weights.plain, weights.plain.prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT)
    )
    batch = cells.random_inputs(cells.Cell(model, tokens), torch.device("cpu"))[0]
    with without_device() as launches, on_device(H200):

        def launched_by(call: Any) -> list[str]:
            launches.clear()
            call()
            return [arguments[FUNCTION] for arguments in launches]

        mine = ours.Ours(model, packed, activation)
        ready = mine._batch(packed.prepared, batch)
        for stage in cells.GEMM_STAGES:
            whole = mine._call(stage.removesuffix("_gemm"), packed.prepared, ready)
            warm = [launched_by(whole) for _ in range(3)][-1]
            call = mine._gemm(stage, packed.prepared, ready)
            assert launched_by(call) == launched_by(call) == kernels
            assert set(kernels) < set(warm)
